"""Advised settings: allowed by the runtime, long enough, and in the order that HCCL requires."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_limits import PAIR, S, environment, limits, torch

from rankdump._core.timeouts import RankTimeouts
from rankdumpd.coordinator.hints.assessment import SettingsAdvice, advise_settings
from rankdumpd.coordinator.hints.timeout_limits import ProcessGroupLimits


def advised(found: ProcessGroupLimits, waited_s: float, *, sequence: int = 1) -> SettingsAdvice:
    budget = found.find_tightest(sequence)
    assert budget
    return advise_settings(found, sequence, limit_us=budget.limit_us, expected_us=int(waited_s * S))


def number(line: str) -> int:
    return int(re.findall(r"\d+", line)[-1])


@settings(deadline=None)
@given(waited=st.integers(918, 8000))
def test_advised_exec_timeout_is_twice_the_wait_rounded_up_to_a_step(waited: int):
    given = advised(limits(environment(HCCL_EXEC_TIMEOUT="1836")), waited)
    execution, event = given.settings
    assert execution.startswith("export HCCL_EXEC_TIMEOUT=")
    assert number(execution) % 68 == 0
    assert number(execution) >= min(2 * waited, 17340)
    assert event == f"export HCCL_EVENT_TIMEOUT={max(number(event), number(execution) + 30)}"
    assert ("910" in given.remark) == (number(execution) == 17340)


def test_event_timeout_above_exec_timeout_is_kept():
    found = limits(environment(HCCL_EXEC_TIMEOUT="1836", HCCL_EVENT_TIMEOUT="9000"))
    (line,) = advised(found, 950).settings
    assert line == "export HCCL_EXEC_TIMEOUT=2244"


def test_timeouts_derived_by_torch_npu_are_not_advised():
    (line,) = advised(limits(torch("hccl", 1800), framework="torch 2.1"), 950).settings
    assert line.startswith("export HCCL_EXEC_TIMEOUT=")
    lines = advised(limits(torch("hccl", 1900), framework="torch 2.1"), 950).settings
    assert lines == (
        "export HCCL_EXEC_TIMEOUT=2244",
        "init_process_group(..., timeout=timedelta(seconds=2274))",
    )


def test_process_group_timeouts_are_advised():
    gloo = limits(torch("gloo", 20), framework="torch 2.5")
    assert advised(gloo, 11).settings == ("init_process_group(..., timeout=timedelta(seconds=24))",)
    part = limits(RankTimeouts(), framework="torch 2.5", device="CPU", group=PAIR)
    assert advised(part, 1000).settings == ("new_group(..., timeout=timedelta(seconds=2160))",)


def test_connect_timeout_is_advised_for_first_collective():
    found = limits(environment())
    assert advised(found, 70, sequence=0).settings == ("export HCCL_CONNECT_TIMEOUT=144",)
    most = advised(limits(environment(HCCL_CONNECT_TIMEOUT="7200")), 7000, sequence=0)
    assert not any("CONNECT" in line for line in most.settings)
    assert most.remark


def test_aiv_mode_is_left_for_long_waits():
    found = limits(environment(HCCL_OP_EXPANSION_MODE="AIV", HCCL_EVENT_TIMEOUT="0"))
    assert advised(found, 600).settings == (
        "unset HCCL_OP_EXPANSION_MODE", "export HCCL_EXEC_TIMEOUT=1360",
    )  # fmt: skip
    low = limits(
        environment(HCCL_OP_EXPANSION_MODE="AIV", HCCL_EXEC_TIMEOUT="100", HCCL_EVENT_TIMEOUT="0")
    )
    assert advised(low, 55).settings == ("export HCCL_EXEC_TIMEOUT=120",)


def test_tensorflow_options_are_advised():
    timeouts = RankTimeouts(
        {"HCCL_EVENT_TIMEOUT": "0"}, limits={"hccl_timeout": 1836.0, "stream_sync_timeout": 1900.0}
    )
    assert advised(limits(timeouts, framework="tensorflow 2.6"), 950).settings == (
        "NPURunConfig(..., hccl_timeout=2244)",
        "NPURunConfig(..., stream_sync_timeout=2274000)",
    )


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@settings(deadline=None)
@given(limit=st.integers(1, 10_000), part=st.floats(0.5, 20))
def test_advised_timeouts_cover_twice_the_wait(backend: str, limit: int, part: float):
    (line,) = advised(limits(torch(backend, limit), framework="torch 2.5"), part * limit).settings
    assert number(line) >= 2 * int(part * limit)
    assert number(line) > limit

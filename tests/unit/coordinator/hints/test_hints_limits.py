"""Limits of a process group, their sources, and the rounding by the runtime."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_limits import PAIR, WORLD, S, environment, limits, torch

from rankdump._core.events import ProcessGroup
from rankdump._core.timeouts import TIMEOUT_VARIABLES, GroupTimeout, RankTimeouts
from rankdumpd.coordinator.fleet_views import JobFacts
from rankdumpd.coordinator.hints.timeout_limits import ProcessGroupLimits, collect_group_limits

PG = "timeout of init_process_group"


def seconds(found: ProcessGroupLimits, name: str) -> float:
    (limit,) = {each.limit_us for each in found.sorted_limits if each.name == name}
    return limit / S


def source(found: ProcessGroupLimits, name: str) -> str:
    return next(each.source for each in found.sorted_limits if each.name == name)


@pytest.mark.parametrize(
    ("text", "in_force"),
    [
        ("1836", 1836), ("600", 544), ("2040", 2040), ("60", 68), ("1", 68), ("67", 68),
        ("135", 68), ("0", 0), ("20000", 17340), ("-1", 1836), ("soon", 1836), ("600.5", 1836),
        ("", 1836), ("9999999999", 1836),
    ],
)  # fmt: skip
def test_exec_limit_is_rounded_down_to_steps_of_68(text: str, in_force: int):
    found = limits(environment(HCCL_EXEC_TIMEOUT=text))
    assert seconds(found, "HCCL_EXEC_TIMEOUT") == in_force
    said = source(found, "HCCL_EXEC_TIMEOUT")
    if text == "600":
        assert said == "environment: 600 s; Ascend 910 and 310P round it, other devices do not"
    if text == "soon":
        assert said == "default of CANN: 'soon' in the environment is not a number"
    if text == "9999999999":
        assert "is not between 0 and 2147483647" in said


@pytest.mark.parametrize(
    ("text", "in_force"), [("", 1091), ("500", 500), ("2000", 1091), ("0", 1091), ("0.5", 0.5)]
)
def test_aiv_mode_limits_exec_to_1091(text: str, in_force: float):
    found = limits(environment(HCCL_EXEC_TIMEOUT=text, HCCL_OP_EXPANSION_MODE="AIV"))
    assert seconds(found, "HCCL_EXEC_TIMEOUT") == in_force
    assert found.aiv


def test_limits_use_defaults_of_cann():
    found = limits(RankTimeouts())
    assert [seconds(found, f"HCCL_{name}_TIMEOUT") for name in ("EXEC", "EVENT", "CONNECT")] == [
        1836, 1868, 120,
    ]  # fmt: skip
    assert found.backend == "hccl"


@pytest.mark.parametrize(
    ("execution", "event"), [("", 1866), ("600", 630), ("0", 0), ("nonsense", 1866)]
)
def test_event_limit_of_torch_npu_follows_exec_limit(execution: str, event: int):
    found = limits(torch("hccl", 1800, HCCL_EXEC_TIMEOUT=execution), framework="torch 2.1.0")
    assert seconds(found, "HCCL_EVENT_TIMEOUT") == event
    watchdog = event - 30 + 1800 if event else 0
    assert seconds(found, PG) == watchdog


@pytest.mark.parametrize(
    ("variables", "in_force"),
    [
        ({}, 3636),
        ({"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}, 0),
        ({"TORCH_HCCL_ASYNC_ERROR_HANDLING": "2"}, 1800),
        ({"TORCH_HCCL_BLOCKING_WAIT": "true", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"}, 1800),
    ],
)
def test_watchdog_limit_of_torch_npu_is_above_exec_limit_at_its_default(
    variables: dict[str, str], in_force: int
):
    """Moved above execution only in the default mode, at the default of 30 minutes."""
    found = limits(torch("hccl", 1800, **variables), framework="torch 2.1.0")
    assert seconds(found, PG) == in_force
    set_by_user = limits(torch("hccl", 100), framework="torch 2.1.0")
    assert seconds(set_by_user, PG) == 100


def test_connect_limit_covers_first_collective_only():
    found = limits(environment(HCCL_CONNECT_TIMEOUT="200"))
    first, later = found.find_tightest(0), found.find_tightest(1)
    assert first
    assert (first.name, first.limit_us) == ("HCCL_CONNECT_TIMEOUT", 200 * S)
    assert later
    assert later.name == "HCCL_EXEC_TIMEOUT"
    low = limits(environment(HCCL_CONNECT_TIMEOUT="60"))
    assert seconds(low, "HCCL_CONNECT_TIMEOUT") == 120
    assert "60 in the environment is not between 120 and 7200" in source(
        low, "HCCL_CONNECT_TIMEOUT"
    )


def test_tensorflow_option_overrides_environment():
    found = limits(
        RankTimeouts({"HCCL_EXEC_TIMEOUT": "600"}, limits={"hccl_timeout": 2000.0}),
        framework="tensorflow 1.15",
    )
    assert seconds(found, "hccl_timeout") == 1972
    assert not any(each.name == "HCCL_EXEC_TIMEOUT" for each in found.sorted_limits)


@pytest.mark.parametrize(
    ("variables", "strikes"),
    [
        ({}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, True),
    ],
)
def test_nccl_limit_needs_error_handling(variables: dict[str, str], strikes: bool):
    found = limits(torch("nccl", 90, **variables), framework="torch 2.5.1", device="GPU")
    budget = found.find_tightest(3)
    assert (budget.limit_us if budget else None) == (90 * S if strikes else None)
    assert ("never applies" in source(found, PG)) is not strikes


@pytest.mark.parametrize(
    ("framework", "beat", "usual"),
    [("torch 2.5.0", 480, 600), ("torch 2.3.1", 600, 600), ("torch 2.1.0", 600, 1800)],
)
def test_nccl_defaults_depend_on_torch_version(framework: str, beat: int, usual: int):
    """Heartbeats are listed, but never used as the limit: they detect a stuck watchdog."""
    found = limits(RankTimeouts(), framework=framework, device="GPU")
    assert seconds(found, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC") == beat
    assert "not a late rank" in source(found, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    budget = found.find_tightest(1)
    assert budget
    assert (budget.name, budget.limit_us) == (PG, usual * S)
    off = limits(environment(TORCH_NCCL_ENABLE_MONITORING="0"), framework=framework, device="GPU")
    assert seconds(off, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC") == 0


def test_hccl_heartbeat_needs_monitoring():
    name = "TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC"
    quiet = limits(torch("hccl", 1800), framework="torch 2.1.0")
    assert seconds(quiet, name) == 0
    watched = torch("hccl", 1800, TORCH_HCCL_ENABLE_MONITORING="1")
    assert seconds(limits(watched, framework="torch 2.1.0"), name) == 600


def test_tightest_limit_names_its_ranks():
    found = limits(torch("gloo", 30), torch("gloo", 20), torch("gloo", 30), framework="torch 2.5.0")
    budget = found.find_tightest(5)
    assert budget
    assert (budget.limit_us, budget.ranks, budget.source) == (
        20 * S, (1,), "process group",
    )  # fmt: skip
    assert [each.ranks for each in found.sorted_limits] == [(1,), (0, 2)]


def test_gloo_limit_defaults_to_half_an_hour():
    found = limits(RankTimeouts(), framework="torch 2.5.0", device="CPU", group=PAIR)
    (limit,) = found.sorted_limits
    assert (limit.name, limit.limit_us, limit.source) == (
        "timeout of new_group", 1800 * S, "default of torch",
    )  # fmt: skip


def test_group_of_all_ranks_before_a_restart_with_fewer_was_made_by_init_process_group():
    before = ProcessGroup("0", tuple(range(len(WORLD.ranks) + 2)))
    found = limits(torch("gloo", 8), framework="torch 2.5.0", device="CPU", group=before)
    assert {each.name for each in found.sorted_limits} == {PG}


def test_ranks_without_reports_have_no_limits():
    assert collect_group_limits(WORLD, WORLD.ranks, JobFacts("j")).sorted_limits == ()
    assert limits(RankTimeouts(), framework="", device="CPU").find_tightest(1) is None


def test_declared_limits_are_used():
    found = limits(
        RankTimeouts(limits={"stream_sync_timeout": 50.0, "op_execute_timeout": 1.0}),
        framework="tf",
    )
    budget = found.find_tightest(1)
    assert budget
    assert (budget.name, budget.limit_us) == ("stream_sync_timeout", 50 * S)


@settings(deadline=None)
@given(
    variables=st.dictionaries(st.sampled_from(TIMEOUT_VARIABLES), st.text(max_size=12)),
    backend=st.sampled_from(["hccl", "nccl", "gloo", "mpi", ""]),
    framework=st.sampled_from(["torch 2.5.0", "torch", "torch x.y", "mindspore", ""]),
)
def test_any_variable_text_gives_valid_limits(
    variables: dict[str, str], backend: str, framework: str
):
    """With any text in the environment every limit is a number of zero or more."""
    timeouts = RankTimeouts(variables, (GroupTimeout("w", backend, 5 * S),))
    for limit in limits(timeouts, framework=framework).sorted_limits:
        assert limit.limit_us >= 0
        assert limit.source
        assert limit.ranks == (0, 1, 2)

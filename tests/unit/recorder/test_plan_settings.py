"""Settings of the recorder that follow from a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
    TriggerMode,
)
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.plan_settings import (
    compute_batch_rows,
    compute_row_buffer_bytes,
    is_copied_directly,
    is_shared_memory_wanted,
    is_statistics_only,
    join_operators,
    make_statistics_calculator,
    make_wait_policy,
)
from rankdump._recorder.tensor_statistics import MAX_WAITING_ROWS
from rankdump._transport.send_buffer import LinkState


def plan(*, trigger: TriggerMode = "always", **delivery) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(trigger=trigger),
        delivery=DeliverySettings(**delivery),
    )


@pytest.mark.parametrize(
    ("address", "shared_memory", "wanted"),
    [
        ("unix:/run/a.sock", True, True),
        ("unix:/run/a.sock", False, False),
        ("host:1234", True, False),
        ("dns:///host:1234", True, False),
    ],
)
def test_shared_memory_is_requested_only_from_an_agent_on_this_host(address, shared_memory, wanted):
    assert is_shared_memory_wanted(plan(shared_memory=shared_memory), address) is wanted


@pytest.mark.parametrize("trigger", ["always", "overflow", "exception"])
def test_records_are_copied_directly_only_with_trigger_always(trigger):
    assert is_copied_directly(plan(trigger=trigger)) is (trigger == "always")


@pytest.mark.parametrize(
    ("on_full", "trigger", "link", "busy", "left_s"),
    [
        ("block", "always", LinkState.UP, False, 7.0),
        ("block", "always", LinkState.AWAY, True, 7.0),
        ("block", "always", LinkState.STARTING, True, 7.0),
        ("block", "always", LinkState.ABSENT, True, 0.0),
        ("block", "always", LinkState.REJECTED, True, 0.0),
        ("drop", "always", LinkState.UP, True, 0.0),
        ("statistic", "always", LinkState.UP, True, 0.0),
        ("block", "overflow", LinkState.UP, True, 7.0),
        ("block", "overflow", LinkState.UP, False, 0.0),
    ],
)
def test_wait_policy_follows_plan_and_link(on_full, trigger, link, busy, left_s):
    """Law: only a blocking plan waits, and only if the agent can still release space."""
    the_plan = plan(on_full=on_full, trigger=trigger, block_timeout_s=10.0)
    policy = make_wait_policy(the_plan)
    left = policy.compute_remaining_s(link=link, has_tensors=busy, idle_s=3.0)
    assert max(left, 0.0) == left_s


@pytest.mark.parametrize(
    ("saved", "on_full", "measures", "share"),
    [
        ("statistic", "block", True, 1),
        ("statistic", "statistic", True, 1),
        ("full", "statistic", True, 16),
        ("tensor", "statistic", True, 16),
        ("tensor", "block", False, 16),
        ("tensor", "drop", False, 16),
    ],
)
def test_statistics_replace_elements_only_if_the_plan_says_so(saved, on_full, measures, share):
    """Law: rows have the whole buffer if only statistics are kept, else a small share."""
    the_plan = replace(
        plan(on_full=on_full, buffer_bytes=1 << 20), content=ContentSettings(saved=saved)
    )
    assert is_statistics_only(the_plan) is (saved == "statistic")
    assert (make_statistics_calculator(the_plan) is not None) is measures
    assert compute_row_buffer_bytes(the_plan) == (1 << 20) // share


@pytest.mark.parametrize(
    ("buffer_bytes", "rows"), [(1, 1), (1 << 12, 16), (1 << 30, MAX_WAITING_ROWS)]
)
def test_waiting_rows_fill_at_most_half_of_the_buffer(buffer_bytes, rows):
    the_plan = plan(buffer_bytes=buffer_bytes)
    assert compute_batch_rows(replace(the_plan, content=ContentSettings(saved="statistic"))) == rows


def test_statistics_of_degraded_tensors_are_computed_on_the_host():
    content = ContentSettings(statistics=("max", "min"), on_device=True)
    measure = make_statistics_calculator(replace(plan(on_full="statistic"), content=content))
    assert measure is not None
    large = np.arange(1 << 14, dtype="f4")
    assert measure.measure_tensor(ArraySource(large)) == "16383,0"


MORE = OperatorSelection(everything=False, names=("b", "c"))


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (TensorSelection(iterations=IterationSelection("none", ())), MORE),
        (TensorSelection(), OperatorSelection()),
        (
            TensorSelection(operators=OperatorSelection(False, ("a",), ("Conv",))),
            OperatorSelection(False, ("a", "b", "c"), ("Conv",)),
        ),
    ],
)
def test_operators_are_added_to_those_of_the_plan(selection, expected):
    assert join_operators(selection, MORE) == expected
    assert join_operators(selection, OperatorSelection()) == OperatorSelection()


@pytest.mark.parametrize(
    "selection",
    [
        TensorSelection(models=(("Net", MORE),)),
        TensorSelection(operators=OperatorSelection(marked=True)),
    ],
)
def test_operators_by_model_or_mark_cannot_be_joined(selection):
    assert join_operators(selection, MORE) == (
        "the plan selects operators by model, or those that the script marks"
    )

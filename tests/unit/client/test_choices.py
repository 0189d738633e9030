"""What a plan decides about the way of its tensors."""

from __future__ import annotations

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.plan import Content, Delivery, DumpPlan, Output, Selection, Trigger
from rankdump.pipeline.choices import goes_straight, patience_s, reduction_of, wants_slab
from rankdump.ship import Link


def plan(*, trigger: Trigger = "always", statistics=("max",), **delivery) -> DumpPlan:
    return DumpPlan(
        output=Output("/x"),
        selection=Selection(trigger=trigger),
        content=Content(statistics=statistics),
        delivery=Delivery(**delivery),
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
def test_only_an_agent_of_this_host_has_shared_memory(address, shared_memory, wanted):
    assert wants_slab(plan(shared_memory=shared_memory), address) is wanted


@pytest.mark.parametrize("trigger", ["always", "overflow", "exception"])
def test_only_a_known_fate_goes_straight(trigger):
    assert goes_straight(plan(trigger=trigger)) is (trigger == "always")


@pytest.mark.parametrize(
    ("on_full", "trigger", "link", "busy", "left_s"),
    [
        ("block", "always", Link.UP, False, 7.0),
        ("block", "always", Link.AWAY, True, 7.0),
        ("block", "always", Link.ABSENT, True, 0.0),
        ("block", "always", Link.REFUSED, True, 0.0),
        ("drop", "always", Link.UP, True, 0.0),
        ("statistic", "always", Link.UP, True, 0.0),
        ("block", "overflow", Link.UP, True, 7.0),
        ("block", "overflow", Link.UP, False, 0.0),
    ],
)
def test_who_waits_for_room(on_full, trigger, link, busy, left_s):
    """Law: only a plan that blocks waits, and only for what can still happen."""
    the_plan = plan(on_full=on_full, trigger=trigger, block_timeout_s=10.0)
    assert patience_s(the_plan, link=link, busy=busy, idle_s=3.0) == left_s


@pytest.mark.parametrize("on_full", ["block", "drop"])
def test_figures_take_the_place_of_elements_only_where_the_plan_says_so(on_full):
    assert reduction_of(plan(on_full=on_full)) is None


@pytest.mark.parametrize(
    ("array", "texts"),
    [(np.array([1, 5, 2], "f4"), ("5", "1")), (np.ones(3, "c8"), None)],
)
def test_figures_of_a_tensor_without_room(array, texts):
    """Law: the plan's figures, marked as all that is kept; None for what has none."""
    reduce = reduction_of(plan(on_full="statistic", statistics=("max", "min")))
    assert reduce is not None
    source = ArraySource(array)
    key = TensorKey(0, "Net", 0, 0, 1, "Add", "a", Side.INPUT, 0)
    record = reduce(RecordHead(key, source.dtype, source.shape, source.byte_count), source)
    if texts is None:
        assert record is None
    else:
        assert record is not None
        assert (record.head.figures, record.head.degraded) == (texts, True)
        assert (record.head.byte_count, len(record.data)) == (12, 0)

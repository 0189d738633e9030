"""Messages of the black box to values and back, and hostile ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.black_box_rings import make_details
from support.wire_round_trip import lines, sent, uint63

from rankdump._core.black_box import (
    MAX_STEP_ROWS,
    PULSE_ROW,
    FaultKind,
    FaultNotice,
    FreezeNotice,
    GroupCalls,
    StepCause,
    StepState,
)
from rankdump._core.record import TensorKind, TensorSide
from rankdump._wire.black_box_messages import (
    MAX_KINDS,
    check_new_kinds,
    fault_notice_from_wire,
    fault_notice_to_wire,
    freeze_notice_from_wire,
    freeze_notice_to_wire,
    step_state_from_wire,
    step_state_to_wire,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2

KIND = TensorKind(0, "Linear", "Default/fc", TensorSide.OUTPUT, 0, "float32", (2,), 8)
plain = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=20)


def rows_of(*kinds: int) -> bytes:
    rows = np.zeros(len(kinds), PULSE_ROW)
    rows["kind"] = kinds
    return rows.tobytes()


@given(
    st.builds(
        StepState,
        iteration=uint63,
        started_us=uint63,
        ended_us=uint63,
        rows=st.lists(st.integers(0, 9), min_size=2, max_size=4).map(lambda kinds: rows_of(*kinds)),
        cause=st.builds(
            StepCause,
            numbers=st.dictionaries(plain, st.floats(allow_nan=False), max_size=3),
            digests=st.dictionaries(plain, plain, max_size=3),
        ),
        skipped=uint63,
        left_out=uint63,
        unfinished=st.booleans(),
        stacks=st.lists(plain, max_size=2).map(tuple),
        notes=st.lists(lines, max_size=2).map(tuple),
        details=st.sampled_from([make_details(), make_details(1), make_details(0, 1)]),
        calls=st.lists(
            st.builds(
                GroupCalls,
                group=plain,
                ranks=st.lists(st.integers(0, 1 << 24), max_size=3).map(tuple),
                count=uint63,
                kind=plain,
                called_us=uint63,
            ),
            max_size=2,
        ).map(tuple),
    )
)
def test_step_round_trip(state):
    message = sent(step_state_to_wire(state, [b"a", b"b"], 3), agent_pb2.StepState)
    assert (message.first_kind, list(message.new_kinds)) == (3, [b"a", b"b"])
    assert step_state_from_wire(message, 10) == state


@given(st.sampled_from(FaultKind), uint63, lines, st.sampled_from([None, KIND]), plain)
def test_fault_round_trip(kind, iteration, text, tensor_kind, source):
    notice = FaultNotice(kind, iteration, text, tensor_kind, source)
    assert (
        fault_notice_from_wire(sent(fault_notice_to_wire(notice), agent_pb2.FaultNotice)) == notice
    )


def test_freeze_round_trip():
    notice = FreezeNotice(4, "frozen", wants_stacks=True)
    assert (
        freeze_notice_from_wire(sent(freeze_notice_to_wire(notice), agent_pb2.FreezeNotice))
        == notice
    )


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (agent_pb2.StepState(rows=b"x" * 41), "end within a row"),
        (agent_pb2.StepState(rows=rows_of(7)), "kind 7, there are 7"),
        (agent_pb2.StepState(rows=rows_of(0) * (MAX_STEP_ROWS + 1)), "rows of a step"),
        (agent_pb2.StepState(iteration=1 << 63), "the number"),
        (agent_pb2.StepState(skipped=1 << 63), "the number"),
        (agent_pb2.StepState(left_out=1 << 63), "the number"),
        (agent_pb2.StepState(stacks=["x"] * 257), "stacks"),
        (agent_pb2.StepState(details=b"x" * 301), "301 bytes of details"),
        (agent_pb2.StepState(details=make_details(0)), "not in the order of its 0 rows"),
        (agent_pb2.StepState(rows=rows_of(0, 0), details=make_details(0, 0)), "not in the order"),
        (agent_pb2.StepState(rows=rows_of(0, 0), details=make_details(1, 0)), "not in the order"),
        (agent_pb2.StepState(details=make_details(*range(4097))), "details of a step"),
        (agent_pb2.StepState(notes=["x"] * 65), "notes of a step"),
        (agent_pb2.StepState(calls=[agent_pb2.GroupCalls()] * 65), "groups of a step"),
        (agent_pb2.StepState(calls=[agent_pb2.GroupCalls(count=1 << 63)]), "the number"),
        (agent_pb2.StepState(calls=[agent_pb2.GroupCalls(group="x" * 300)]), "group of a step"),
        (agent_pb2.StepState(calls=[agent_pb2.GroupCalls(kind="x" * 300)]), "group of a step"),
        (agent_pb2.StepState(notes=["x" * 70_000]), "note of a step"),
        (agent_pb2.StepState(stacks=["x" * 70_000]), "stack of 70000 characters"),
        (
            agent_pb2.StepState(cause=agent_pb2.StepCause(numbers={str(n): 1 for n in range(300)})),
            "numbers and digests",
        ),
        (agent_pb2.StepState(cause=agent_pb2.StepCause(digests={"x" * 300: ""})), "cause"),
    ],
)
def test_hostile_step_is_rejected(message, fault):
    with pytest.raises(ProtocolError, match=fault):
        step_state_from_wire(message, 7)


def test_kinds_that_leave_a_gap_or_are_too_many_are_rejected():
    check_new_kinds(agent_pb2.StepState(first_kind=2, new_kinds=[b"a"]), 2)
    with pytest.raises(ProtocolError, match="from number 3, there are 2"):
        check_new_kinds(agent_pb2.StepState(first_kind=3, new_kinds=[b"a"]), 2)
    with pytest.raises(ProtocolError, match="kinds of tensors"):
        check_new_kinds(agent_pb2.StepState(first_kind=MAX_KINDS, new_kinds=[b"a"]), MAX_KINDS)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (agent_pb2.FaultNotice(kind="unheard"), "unknown kind 'unheard'"),
        (agent_pb2.FaultNotice(kind="jump", iteration=1 << 63), "the number"),
        (agent_pb2.FaultNotice(kind="jump", text="x" * 5000), "fault of 5000 characters"),
        (agent_pb2.FaultNotice(kind="jump", tensor_kind=b"\xff"), "kind"),
    ],
)
def test_hostile_fault_is_rejected(message, fault):
    with pytest.raises(ProtocolError, match=fault):
        fault_notice_from_wire(message)

"""Messages of the black box and frozen values, in both directions; bounds are checked on receipt.

The kinds of tensors have numbers that hold for the whole session. Each stream brings every kind
once, before the first row that refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankdump._core.black_box import (
    DETAIL_ROW,
    MAX_STEP_DETAILS,
    MAX_STEP_NOTES,
    MAX_STEP_ROWS,
    PULSE_ROW,
    FaultKind,
    FaultNotice,
    FreezeNotice,
    StepCause,
    StepState,
)
from rankdump._core.collective_calls import MAX_GROUP_CALLS, GroupCalls
from rankdump._wire.message_fields import (
    MAX_LINE_CHARACTERS,
    check_count,
    check_numbers,
    check_text,
    make_printable,
    make_sendable,
    replace_surrogates,
)
from rankdump._wire.session_messages import MAX_WORLD_SIZE, kind_from_wire, kind_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2

MAX_KINDS = 1 << 16
"""Most kinds of a session; a rank measures nothing else afterwards."""
_MAX_CAUSES = 256
_MAX_STACKS = 256
_MAX_STACK_CHARACTERS = 1 << 16


def step_state_to_wire(
    state: StepState, new_kinds: Sequence[bytes], first_kind: int
) -> agent_pb2.StepState:
    """Return the message of a step, with the kinds that its stream has not brought yet."""
    cause = state.cause
    return agent_pb2.StepState(
        iteration=state.iteration,
        started_us=state.started_us,
        ended_us=state.ended_us,
        first_kind=first_kind,
        new_kinds=new_kinds,
        rows=state.rows,
        cause=agent_pb2.StepCause(
            numbers={_make_name(name): number for name, number in cause.numbers.items()},
            digests={_make_name(name): digest for name, digest in cause.digests.items()},
        ),
        skipped=state.skipped,
        unfinished=state.unfinished,
        stacks=[make_sendable(replace_surrogates(s), _MAX_STACK_CHARACTERS) for s in state.stacks],
        notes=[make_sendable(replace_surrogates(note)) for note in state.notes],
        details=state.details,
        left_out=state.left_out,
        calls=[_group_calls_to_wire(calls) for calls in state.calls],
    )


def step_state_from_wire(message: agent_pb2.StepState, known_kinds: int) -> StepState:
    """Read a step; `known_kinds` is the number of kinds that its session has with this message.

    ProtocolError when a row is cut off, or refers to a kind that there is not.
    """
    check_numbers("step", (message.iteration, message.started_us, message.ended_us))
    check_numbers("step", (message.skipped, message.left_out))
    rows, rest = divmod(len(message.rows), PULSE_ROW.itemsize)
    if rest:
        raise ProtocolError(f"a step has {len(message.rows)} bytes of rows, which end within a row")
    check_count("rows of a step", rows, MAX_STEP_ROWS)
    highest = int(np.frombuffer(message.rows, PULSE_ROW)["kind"].max(initial=0))
    if rows and highest >= known_kinds:
        raise ProtocolError(f"a row of a step has the kind {highest}, there are {known_kinds}")
    _check_details(message.details, rows)
    check_count("stacks of a process", len(message.stacks), _MAX_STACKS)
    check_count("notes of a step", len(message.notes), MAX_STEP_NOTES)
    check_count("groups of a step", len(message.calls), MAX_GROUP_CALLS)
    return StepState(
        iteration=message.iteration,
        started_us=message.started_us,
        ended_us=message.ended_us,
        rows=message.rows,
        cause=_read_cause(message.cause),
        skipped=message.skipped,
        unfinished=message.unfinished,
        stacks=tuple(check_text("stack", each, _MAX_STACK_CHARACTERS) for each in message.stacks),
        notes=tuple(
            make_printable(check_text("note of a step", each), len(each)) for each in message.notes
        ),
        details=message.details,
        left_out=message.left_out,
        calls=tuple(map(_read_group_calls, message.calls)),
    )


def _group_calls_to_wire(calls: GroupCalls) -> agent_pb2.GroupCalls:
    return agent_pb2.GroupCalls(
        group=_make_name(calls.group),
        ranks=calls.ranks,
        count=calls.count,
        kind=calls.kind,
        called_us=calls.called_us,
    )


def _read_group_calls(message: agent_pb2.GroupCalls) -> GroupCalls:
    check_numbers("group of a step", (message.count, message.called_us))
    check_count("members of a group", len(message.ranks), MAX_WORLD_SIZE)
    for text in (message.group, message.kind):
        check_text("group of a step", text, MAX_LINE_CHARACTERS)
    return GroupCalls(
        message.group,
        tuple(message.ranks),
        message.count,
        make_printable(message.kind, len(message.kind)),
        message.called_us,
    )


def _check_details(details: bytes, rows: int) -> None:
    """Raise ProtocolError for details that are not those of some of so many rows."""
    count, rest = divmod(len(details), DETAIL_ROW.itemsize)
    if rest:
        raise ProtocolError(f"a step has {len(details)} bytes of details, which end within one")
    check_count("details of a step", count, MAX_STEP_DETAILS)
    of_rows = np.frombuffer(details, DETAIL_ROW)["row"].astype(np.int64)
    if count and (of_rows[-1] >= rows or (np.diff(of_rows) <= 0).any()):
        raise ProtocolError(f"the details of a step are not in the order of its {rows} rows")


def check_new_kinds(message: agent_pb2.StepState, known_kinds: int) -> None:
    """Raise ProtocolError when the kinds of a message leave a gap, or are too many."""
    first, count = message.first_kind, len(message.new_kinds)
    if first > known_kinds:
        raise ProtocolError(f"a step brings kinds from number {first}, there are {known_kinds}")
    check_count("kinds of tensors in a session", first + count, MAX_KINDS)


def fault_notice_to_wire(notice: FaultNotice) -> agent_pb2.FaultNotice:
    """Return the message of a fault."""
    kind = notice.tensor_kind
    return agent_pb2.FaultNotice(
        iteration=notice.iteration,
        kind=notice.kind.value,
        text=make_sendable(replace_surrogates(notice.text)),
        tensor_kind=b"" if kind is None else kind_to_wire(kind),
        source=make_sendable(replace_surrogates(notice.source)),
    )


def fault_notice_from_wire(message: agent_pb2.FaultNotice) -> FaultNotice:
    """Read a fault; ProtocolError for an unknown word."""
    check_numbers("fault", (message.iteration,))
    words = [each.value for each in FaultKind]
    if message.kind not in words:
        raise ProtocolError(f"a fault has the unknown kind {message.kind[:80]!r}")
    return FaultNotice(
        kind=FaultKind(message.kind),
        iteration=message.iteration,
        text=make_printable(check_text("fault", message.text), len(message.text)),
        tensor_kind=kind_from_wire(message.tensor_kind) if message.tensor_kind else None,
        source=make_printable(check_text("source of a fault", message.source), len(message.source)),
    )


def freeze_notice_to_wire(notice: FreezeNotice) -> agent_pb2.FreezeNotice:
    """Return the message of a freeze."""
    return agent_pb2.FreezeNotice(
        iteration=notice.iteration, text=notice.text, wants_stacks=notice.wants_stacks
    )


def freeze_notice_from_wire(message: agent_pb2.FreezeNotice) -> FreezeNotice:
    """Read a freeze."""
    return FreezeNotice(message.iteration, message.text, message.wants_stacks)


def _read_cause(message: agent_pb2.StepCause) -> StepCause:
    check_count("numbers and digests of a step", len(message.numbers), _MAX_CAUSES)
    check_count("numbers and digests of a step", len(message.digests), _MAX_CAUSES)
    for text in (*message.numbers, *message.digests, *message.digests.values()):
        check_text("cause of a step", text, MAX_LINE_CHARACTERS)
    return StepCause(dict(message.numbers), dict(message.digests))


def _make_name(name: str) -> str:
    return make_sendable(replace_surrogates(name), MAX_LINE_CHARACTERS)

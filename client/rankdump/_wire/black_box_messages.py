"""Conversion between messages of the black box and frozen values: steps, full tensors in pieces,
and faults between ranks and agents; freezes and finished steps between agents and coordinator.
Bounds are checked on receipt.

The kinds of tensors have numbers that are valid for the whole session. Each stream sends every kind
once, before the first row that refers to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from rankdump._core.black_box import (
    DETAIL_ROW,
    MAX_GROUP_CALLS,
    MAX_STEP_DETAILS,
    MAX_STEP_NOTES,
    MAX_STEP_ROWS,
    PULSE_ROW,
    FaultKind,
    FaultNotice,
    FreezeNotice,
    GroupCalls,
    RankStep,
    StepCause,
    StepState,
    StepTensor,
    compute_tensor_bytes,
)
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.freeze_record import (
    FreezeReach,
    FrozenCause,
    JobFreeze,
    RelayedFreeze,
    UnreachedAgent,
)
from rankdump._core.record import TensorKind
from rankdump._wire.message_fields import (
    MAX_LINE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    check_count,
    check_numbers,
    check_text,
    from_message,
    make_fields,
    make_printable,
    make_sendable,
)
from rankdump._wire.session_messages import (
    MAX_JOB_ID_CHARACTERS,
    MAX_WORLD_SIZE,
    check_rank,
    kind_from_wire,
    kind_to_wire,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, coordinator_pb2

MAX_KINDS = 1 << 16
"""Maximum number of kinds in a session; a rank measures no further kinds."""
FAULT_WORDS = frozenset(each.value for each in FaultKind)
"""Words of the kinds of faults that this version knows."""
_MAX_CAUSES = 256
_MAX_STACKS = 256
_MAX_STACK_CHARACTERS = 1 << 16


def step_state_to_wire(
    state: StepState, new_kinds: Sequence[bytes], first_kind: int
) -> agent_pb2.StepState:
    """Return the message of a step, with the kinds that its stream has not sent yet."""
    cause = state.cause
    return agent_pb2.StepState(
        **make_fields(state, "cause", "stacks", "notes", "calls"),
        first_kind=first_kind,
        new_kinds=new_kinds,
        cause=agent_pb2.StepCause(
            numbers={_make_name(name): number for name, number in cause.numbers.items()},
            digests={_make_name(name): digest for name, digest in cause.digests.items()},
        ),
        stacks=[make_sendable(stack, _MAX_STACK_CHARACTERS) for stack in state.stacks],
        notes=map(make_sendable, state.notes),
        calls=[
            agent_pb2.GroupCalls(**make_fields(calls, "group"), group=_make_name(calls.group))
            for calls in state.calls
        ],
    )


def step_state_from_wire(message: agent_pb2.StepState, known_kinds: int) -> StepState:
    """Convert the message of a step; `known_kinds` is the number of kinds that its session has,
    including those of this message.

    ProtocolError if a row is cut off, or refers to an unknown kind.
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
    return from_message(
        StepState,
        message,
        cause=_read_cause(message.cause),
        stacks=tuple(check_text("stack", each, _MAX_STACK_CHARACTERS) for each in message.stacks),
        notes=tuple(_read_text("note of a step", each) for each in message.notes),
        calls=tuple(map(_read_group_calls, message.calls)),
    )


def _read_group_calls(message: agent_pb2.GroupCalls) -> GroupCalls:
    check_numbers("group of a step", (message.count, message.called_us))
    check_count("members of a group", len(message.ranks), MAX_WORLD_SIZE)
    for text in (message.group, message.kind):
        check_text("group of a step", text, MAX_LINE_CHARACTERS)
    return from_message(GroupCalls, message, kind=make_printable(message.kind))


def _check_details(details: bytes, rows: int) -> None:
    """Raise ProtocolError unless the details belong to a step with `rows` rows."""
    count, rest = divmod(len(details), DETAIL_ROW.itemsize)
    if rest:
        raise ProtocolError(f"a step has {len(details)} bytes of details, which end within one")
    check_count("details of a step", count, MAX_STEP_DETAILS)
    of_rows = np.frombuffer(details, DETAIL_ROW)["row"].astype(np.int64)
    if count and (of_rows[-1] >= rows or (np.diff(of_rows) <= 0).any()):
        raise ProtocolError(f"the details of a step are not in the order of its {rows} rows")


def check_new_kinds(message: agent_pb2.StepState, known_kinds: int) -> None:
    """Raise ProtocolError if the kinds of a message leave a gap, or are too many."""
    first, count = message.first_kind, len(message.new_kinds)
    if first > known_kinds:
        raise ProtocolError(f"a step brings kinds from number {first}, there are {known_kinds}")
    check_count("kinds of tensors in a session", first + count, MAX_KINDS)


def fault_notice_to_wire(notice: FaultNotice) -> agent_pb2.FaultNotice:
    """Return the message of a fault."""
    kind = notice.tensor_kind
    return agent_pb2.FaultNotice(
        **make_fields(notice, "text", "tensor_kind", "source"),
        text=make_sendable(notice.text),
        tensor_kind=b"" if kind is None else kind_to_wire(kind),
        source=make_sendable(notice.source),
    )


def fault_notice_from_wire(message: agent_pb2.FaultNotice) -> FaultNotice:
    """Convert the message of a fault; ProtocolError for an unknown word."""
    check_numbers("fault", (message.iteration,))
    if message.kind not in FAULT_WORDS:
        raise ProtocolError(f"a fault has the unknown kind {message.kind[:80]!r}")
    return FaultNotice(
        kind=FaultKind(message.kind),
        iteration=message.iteration,
        text=_read_text("fault", message.text),
        tensor_kind=kind_from_wire(message.tensor_kind) if message.tensor_kind else None,
        source=_read_text("source of a fault", message.source),
    )


def freeze_notice_to_wire(notice: FreezeNotice) -> agent_pb2.FreezeNotice:
    """Return the message of a freeze."""
    return agent_pb2.FreezeNotice(**make_fields(notice))


freeze_notice_from_wire = partial(from_message, FreezeNotice)


def _read_cause(message: agent_pb2.StepCause) -> StepCause:
    check_count("numbers and digests of a step", len(message.numbers), _MAX_CAUSES)
    check_count("numbers and digests of a step", len(message.digests), _MAX_CAUSES)
    for text in (*message.numbers, *message.digests, *message.digests.values()):
        check_text("cause of a step", text, MAX_LINE_CHARACTERS)
    return StepCause(dict(message.numbers), dict(message.digests))


def _make_name(name: str) -> str:
    return make_sendable(name, MAX_LINE_CHARACTERS)


def _read_text(what: str, text: str) -> str:
    return make_printable(check_text(what, text), len(text))


PIECE_BYTES = 1 << 20
"""Maximum bytes of a piece of a tensor: while it is made, no other thread of the rank runs Python
code.
"""


def step_tensor_to_wire(tensor: StepTensor) -> Iterator[agent_pb2.StepTensor]:
    """Yield the pieces of a tensor as messages; each piece is made when it is requested."""
    view = memoryview(tensor.data)
    yield agent_pb2.StepTensor(
        iteration=tensor.iteration,
        tensor_kind=kind_to_wire(tensor.kind),
        row=tensor.row,
        about_fault=tensor.about_fault,
        data=bytes(view[:PIECE_BYTES]),
    )
    for begin in range(PIECE_BYTES, len(view), PIECE_BYTES):
        data = bytes(view[begin : begin + PIECE_BYTES])
        yield agent_pb2.StepTensor(iteration=tensor.iteration, begin=begin, data=data)


class StepTensorAssembler:
    """Joins the pieces of the tensors of one session; not for several threads.

    A first piece begins a new tensor, and discards the pieces of a tensor that a stream has not
    completed.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is the maximum size of a tensor."""
        self._max_bytes = max_bytes
        self._first: tuple[agent_pb2.StepTensor, TensorKind] | None = None
        self._data: bytearray | None = bytearray()
        """Bytes that have arrived of the present tensor; None if the tensor is skipped."""
        self._received = 0

    @property
    def byte_count(self) -> int:
        """Bytes held for a tensor that is not complete."""
        return len(self._data or b"")

    def skip(self) -> None:
        """Discard the tensor whose pieces are arriving."""
        self._data = None

    def feed(self, message: agent_pb2.StepTensor) -> StepTensor | None:
        """Return the tensor that a piece completes; None if more pieces follow or the tensor is
        skipped.

        ProtocolError if the piece contradicts itself or earlier pieces.
        """
        if not message.begin:
            self._begin(message)
        if self._first is None or message.begin != self._received:
            raise ProtocolError(
                f"a piece of a tensor begins at {message.begin}, after {self._received} bytes"
            )
        first, kind = self._first
        self._received += len(message.data)
        if self._received > kind.byte_count:
            raise ProtocolError(f"the pieces of a tensor have over {kind.byte_count} bytes")
        if self._data is not None:
            self._data += message.data
        if self._received < kind.byte_count:
            if not message.data:
                raise ProtocolError("a piece of a tensor is empty")
            return None
        data, self._data, self._first = self._data, bytearray(), None
        if data is None:
            return None
        row = first.row if first.HasField("row") else None
        return StepTensor(first.iteration, kind, data, row, first.about_fault)

    def _begin(self, message: agent_pb2.StepTensor) -> None:
        self._first, self._data, self._received = None, bytearray(), 0
        check_numbers("tensor of a step", (message.iteration,))
        kind = kind_from_wire(message.tensor_kind)
        if kind.dtype not in ELEMENT_TYPES:
            raise ProtocolError(f"a tensor of a step has the unknown type {kind.dtype[:60]!r}")
        if compute_tensor_bytes(kind.byte_count) > self._max_bytes:
            raise ProtocolError(
                f"a tensor of a step has {kind.byte_count} bytes, over rankdump.blackbox."
                f"tensor_bytes = {self._max_bytes}"
            )
        if message.HasField("row") and message.row >= MAX_STEP_ROWS:
            raise ProtocolError(f"a tensor of a step has the row {message.row}")
        self._first = message, kind


MAX_STEP_NUMBERS = 64
"""Maximum number of values of a step that are compared with those of other ranks."""
MAX_UNREACHED_AGENTS = 64
MAX_UNREACHED_RANKS = 1024
"""Maximum number of ranks that are listed for one agent that a freeze has not reached."""
MAX_LATER_CAUSES = 16
"""Maximum number of causes that a coordinator adds to one freeze."""
_TEXTS = ("text", "op_type", "op_name", "side", "argument", "source")


def job_freeze_to_wire(freeze: JobFreeze) -> coordinator_pb2.JobFreeze:
    """Return the message of a freeze."""
    return coordinator_pb2.JobFreeze(
        **make_fields(freeze, "cause", "refusal"),
        cause=_cause_to_wire(freeze.cause),
        refusal=make_sendable(freeze.refusal),
    )


def _cause_to_wire(cause: FrozenCause) -> coordinator_pb2.FreezeCause:
    fields = make_fields(cause)
    fields |= {name: make_sendable(fields[name]) for name in _TEXTS}
    return coordinator_pb2.FreezeCause(**fields)


def is_known_freeze(message: coordinator_pb2.JobFreeze) -> bool:
    """Return whether the kind of a freeze is known to this version.

    A freeze of an unknown kind comes from a later version and is left out; everything else in the
    message counts.
    """
    return message.cause.kind in FAULT_WORDS


def job_freeze_from_wire(message: coordinator_pb2.JobFreeze) -> JobFreeze:
    """Convert the message of a freeze; ProtocolError for an unknown word or a number that is too
    large.
    """
    _check_job("freeze", message.job_id)
    check_numbers("freeze", (message.iteration,))
    cause, refusal = _read_freeze_cause(message.cause), _read_freeze_text(message.refusal)
    return from_message(JobFreeze, message, cause=cause, refusal=refusal)


def _read_freeze_cause(cause: coordinator_pb2.FreezeCause) -> FrozenCause:
    check_numbers("freeze", (cause.iteration, cause.at_us))
    if cause.kind not in FAULT_WORDS:
        raise ProtocolError(f"a freeze has the unknown kind {cause.kind[:80]!r}")
    check_rank("freeze", cause.rank)
    texts = {name: _read_freeze_text(getattr(cause, name)) for name in _TEXTS}
    return from_message(FrozenCause, cause, kind=FaultKind(cause.kind), **texts)


def relayed_freeze_to_wire(relayed: RelayedFreeze) -> coordinator_pb2.RelayedFreeze:
    """Return the message with which a coordinator passes a freeze to the agents of its job."""
    reach = relayed.reach
    return coordinator_pb2.RelayedFreeze(
        freeze=job_freeze_to_wire(relayed.freeze),
        agents=reach.agents,
        frozen_agents=reach.frozen_agents,
        unreached=[coordinator_pb2.UnreachedAgent(**make_fields(each)) for each in reach.unreached],
        later_causes=map(_cause_to_wire, relayed.later_causes),
    )


def relayed_freeze_from_wire(message: coordinator_pb2.RelayedFreeze) -> RelayedFreeze:
    """Convert a freeze that a coordinator passes on; ProtocolError if it contradicts itself."""
    check_count(
        "agents that a freeze has not reached", len(message.unreached), MAX_UNREACHED_AGENTS
    )
    unreached = tuple(map(_read_unreached, message.unreached))
    reach = FreezeReach(message.agents, message.frozen_agents, unreached)
    check_count("later causes of a freeze", len(message.later_causes), MAX_LATER_CAUSES)
    # Causes of kinds that only a later version knows are left out, as freezes of such kinds are.
    later = (each for each in message.later_causes if each.kind in FAULT_WORDS)
    freeze = job_freeze_from_wire(message.freeze)
    return RelayedFreeze(freeze, reach, tuple(map(_read_freeze_cause, later)))


def rank_step_to_wire(step: RankStep) -> coordinator_pb2.RankStep:
    """Return the message of a step."""
    return coordinator_pb2.RankStep(**make_fields(step))


def rank_step_from_wire(message: coordinator_pb2.RankStep) -> RankStep:
    """Convert the message of a step; ProtocolError if it has too many numbers, or too
    long a name.
    """
    _check_job("step", message.job_id)
    check_numbers("step", (message.iteration,))
    check_count("numbers of a step", len(message.numbers), MAX_STEP_NUMBERS)
    for name in message.numbers:
        check_text("number of a step", name, MAX_LINE_CHARACTERS)
    check_rank("step", message.rank)
    return from_message(RankStep, message)


def _read_unreached(message: coordinator_pb2.UnreachedAgent) -> UnreachedAgent:
    check_count(
        "ranks of an agent that a freeze has not reached", len(message.ranks), MAX_UNREACHED_RANKS
    )
    for rank in message.ranks:
        check_rank("freeze", rank)
    reason = _read_freeze_text(message.reason)
    return from_message(UnreachedAgent, message, host=make_printable(message.host), reason=reason)


def _read_freeze_text(text: str) -> str:
    return make_printable(check_text("text of a freeze", text), MAX_NAME_CHARACTERS)


def _check_job(what: str, job_id: str) -> None:
    if not job_id:
        raise ProtocolError(f"a {what} without a job id")
    check_text(f"{what} with a job id", job_id, MAX_JOB_ID_CHARACTERS)

"""Conversion between messages of a session and frozen values: requests, grants, records, rows of
statistics and metadata. Every length and every number from the wire is checked here.

The kind of a record, which is the same in every step, is serialized, parsed and checked only once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from math import prod
from typing import Any

from google.protobuf.message import DecodeError

from rankdump._core import drop_reasons
from rankdump._core.bounded_cache import remember
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import NET_NAME_PATTERN, UNNAMED_MODEL, plan_from_json, plan_to_json
from rankdump._core.record import MAX_FRAME_ROWS, PASS_PHASES, StatisticRows, TensorKind, TensorSide
from rankdump._core.session_protocol import (
    ChangedPlan,
    IterationEnd,
    MetadataItem,
    RecordHead,
    SessionEnd,
    SessionGrant,
    SessionRequest,
)
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._core.tensor_layout import TensorLayout, find_layout_fault
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.message_fields import (
    ENUM_VALUES,
    LENGTH_DELIMITED,
    MAX_LINE_CHARACTERS,
    NUMBER_LIMIT,
    check_count,
    check_numbers,
    check_text,
    encode_varint,
    from_message,
    make_fields,
    make_notes_printable,
    make_printable,
    make_sendable,
    make_tag,
    parse_member,
)
from rankdump._wire.metadata_messages import (
    arguments_from_wire,
    events_from_wire,
    graph_part_from_wire,
    stacks_from_wire,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, events_pb2

MAX_TENSOR_DIMENSIONS = 64
MAX_ARGUMENT_CHARACTERS = 1024
MAX_TYPE_CHARACTERS = 64
_MAX_KIND_BYTES = 1 << 16
_NAME_INDEX = TensorKind._fields.index("op_name")
# These kinds take about 10 MB of the 100 MB that an idle agent may use.
_MAX_REMEMBERED_KINDS = 1 << 14
_MAX_REMEMBERED_BYTES = 1 << 10


def kind_to_wire(kind: TensorKind) -> bytes:
    """Return a kind as other messages contain it; equal kinds give equal bytes."""
    known = _serialized_kinds.get(id(kind))
    if known is not None and known[0] is kind:
        return known[1]
    # Serialized parts of a message can be concatenated. The name is a part of its own, because it
    # may occur in the few kinds of one call only, while the other fields occur in every call.
    return _serialize_nameless(*kind[:_NAME_INDEX], *kind[_NAME_INDEX + 1 :]) + _serialize_name(
        kind.op_name
    )


_serialized_kinds: dict[int, tuple[TensorKind, bytes]] = {}
"""Serialized kinds by the identity of the kind, which hashes fastest; the entry keeps the kind
alive.
"""


def remember_kind(kind: TensorKind) -> None:
    """Serialize a kind now, for all records and rows that will refer to this object.

    It is not used for kinds that occur once, because they are kept in memory.
    """
    entry = kind, kind_to_wire(kind)
    remember(_serialized_kinds, id(kind), entry, _MAX_REMEMBERED_KINDS)


def _serialize_name(op_name: str) -> bytes:
    """Return the serialized name of a kind; in an API dump every call has its own name."""
    spelled = make_sendable(op_name).encode()
    return _NAME_TAG + encode_varint(len(spelled)) + spelled if spelled else b""


_NAME_TAG = make_tag(agent_pb2.TensorKind(), "op_name", LENGTH_DELIMITED)


@lru_cache(maxsize=_MAX_REMEMBERED_KINDS)
def _serialize_nameless(
    graph: int,
    op_type: str,
    side: TensorSide,
    slot: int,
    dtype: str,
    shape: tuple[int, ...],
    byte_count: int,
    argument: str,
    constant: bool,
    model: str,
    layout: TensorLayout | None,
    microbatch: int | None,
    phase: str,
) -> bytes:
    """Return the serialized fields of a kind except its name."""
    return agent_pb2.TensorKind(
        graph=graph,
        op_type=make_sendable(op_type),
        side=ENUM_VALUES[TensorSide][side],
        slot=slot,
        dtype=make_sendable(dtype, MAX_TYPE_CHARACTERS),
        shape=shape,
        byte_count=byte_count,
        argument=make_sendable(argument, MAX_ARGUMENT_CHARACTERS),
        constant=constant,
        model=model,
        layout=None
        if layout is None
        else agent_pb2.TensorLayout(**make_fields(layout, replace=True)),
        microbatch=microbatch,
        phase=phase,
    ).SerializeToString(deterministic=True)


def kind_from_wire(data: bytes, model: str | None = None) -> TensorKind:
    """Parse a kind; ProtocolError if it contradicts itself or is too long.

    `model`, if given, is the name of the kind's model; if it is empty, the name in the kind is
    kept.
    """
    # Long kinds are not remembered: they are rare, unless a sender intends to fill this memory.
    read = _parse_remembered_kind if len(data) <= _MAX_REMEMBERED_BYTES else _parse_kind
    return read(data, model)


def _parse_kind(data: bytes, model: str | None) -> TensorKind:
    if len(data) > _MAX_KIND_BYTES:
        raise ProtocolError(
            f"the kind of a record has {len(data)} bytes, at most {_MAX_KIND_BYTES}"
        )
    try:
        message = agent_pb2.TensorKind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"a record has no valid kind: {error}") from None
    side = parse_member(TensorSide, message.side)
    shape = tuple(message.shape)
    if len(shape) > MAX_TENSOR_DIMENSIONS:
        raise ProtocolError(f"a record has {len(shape)} dimensions")
    if max((message.byte_count, *shape)) >= NUMBER_LIMIT:
        raise ProtocolError(f"a record has a number over {NUMBER_LIMIT - 1}")
    _check_kind_texts(message)
    if message.model and not NET_NAME_PATTERN.fullmatch(message.model):
        raise ProtocolError(
            f"a record has the model {message.model[:60]!r}, which cannot be the name of a folder"
        )
    element = ELEMENT_TYPES.get(message.dtype)
    if element and message.byte_count != prod(shape) * element.item_bytes:
        raise ProtocolError(
            f"a record declares {message.byte_count} bytes for {message.dtype} "
            f"of shape {list(shape)}"
        )
    return TensorKind(
        graph=message.graph,
        op_type=message.op_type,
        op_name=message.op_name,
        side=side,
        slot=message.slot,
        dtype=message.dtype,
        shape=shape,
        byte_count=message.byte_count,
        argument=message.argument,
        constant=message.constant,
        model=message.model if model is None else model or message.model or UNNAMED_MODEL,
        layout=_read_layout(message, shape) if message.HasField("layout") else None,
        microbatch=message.microbatch if message.HasField("microbatch") else None,
        phase=message.phase,
    )


def _read_layout(message: agent_pb2.TensorKind, shape: tuple[int, ...]) -> TensorLayout:
    layout = message.layout
    check_text("layout with a name", layout.logical_name)
    texts = (layout.mesh.name, *layout.mesh.dimension_names)
    for text in (*texts, *(each.reduction for each in layout.placements)):
        check_text("layout with a text", text, MAX_TYPE_CHARACTERS)
    check_numbers("layout", (*layout.global_shape, *layout.flat_range, layout.padding))
    found = from_message(TensorLayout, layout)
    fault = find_layout_fault(found, shape)
    if fault:
        raise ProtocolError(f"a record has a layout that contradicts itself: {fault}")
    return found


_parse_remembered_kind = lru_cache(maxsize=_MAX_REMEMBERED_KINDS)(_parse_kind)


def _check_kind_texts(message: agent_pb2.TensorKind) -> None:
    check_text("record with an op_type", message.op_type)
    check_text("record with an op_name", message.op_name)
    check_text("record with an element type", message.dtype, MAX_TYPE_CHARACTERS)
    check_text("record with an argument", message.argument, MAX_ARGUMENT_CHARACTERS)
    check_text("record with a model", message.model, MAX_LINE_CHARACTERS)
    if message.phase not in PASS_PHASES:
        raise ProtocolError(f"a record has the unknown phase {message.phase[:60]!r}")


MAX_WORLD_SIZE = 1 << 24
MAX_JOB_ID_CHARACTERS = 256
MAX_REASONS = 256
MAX_TIMEOUTS = 4096
_MAX_PLAN_BYTES = 4 << 20
_MAX_SOURCE_BYTES = 1 << 20
_SECRET_LENGTH_RANGE = (16, 64)


def check_rank(what: str, rank: int) -> None:
    """Raise ProtocolError if no job can have a rank with this number."""
    if rank >= MAX_WORLD_SIZE:
        raise ProtocolError(f"{what} of rank {rank}: at most {MAX_WORLD_SIZE} ranks")


def session_request_to_wire(request: SessionRequest) -> agent_pb2.OpenSessionRequest:
    """Return the message of a request for a session."""
    return agent_pb2.OpenSessionRequest(**make_fields(request))


def session_request_from_wire(message: agent_pb2.OpenSessionRequest) -> SessionRequest:
    """Convert a request for a session; ProtocolError if it contradicts itself."""
    if not message.session_id or not message.job_id:
        raise ProtocolError("a session needs a session id and a job id")
    if not 0 <= message.rank < message.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(
            f"rank {message.rank} of {message.world_size}: the rank must be below the world size"
        )
    numbers = message.pid, message.started_us, message.process_us
    check_numbers(f"session of rank {message.rank}", numbers)
    _check_job_id(message.job_id)
    check_text("session id", message.session_id, MAX_JOB_ID_CHARACTERS)
    check_count("bytes of a plan", len(message.plan_json), _MAX_PLAN_BYTES)
    check_count("bytes of a configuration", len(message.config_source), _MAX_SOURCE_BYTES)
    if (
        message.secret
        and not _SECRET_LENGTH_RANGE[0] <= len(message.secret) <= _SECRET_LENGTH_RANGE[1]
    ):
        raise ProtocolError(f"a session has a secret of {len(message.secret)} bytes")
    return from_message(
        SessionRequest,
        message,
        host=make_printable(message.host),
        framework=make_printable(message.framework),
        device_target=make_printable(message.device_target),
    )


def _check_job_id(job_id: str) -> None:
    check_text("job id", job_id, MAX_JOB_ID_CHARACTERS)
    if not job_id.isprintable():
        raise ProtocolError(f"job id {job_id!r}has characters that are not printable")


def session_grant_to_wire(grant: SessionGrant) -> agent_pb2.OpenSessionResponse:
    """Return the message of the agent's answer to a request for a session."""
    return agent_pb2.OpenSessionResponse(
        acknowledged_sequence=grant.acknowledged, **make_fields(grant, "acknowledged")
    )


def session_grant_from_wire(message: agent_pb2.OpenSessionResponse) -> SessionGrant:
    """Convert the agent's answer to a request for a session."""
    return from_message(SessionGrant, message, acknowledged=message.acknowledged_sequence)


def record_to_wire(head: RecordHead, data: bytes) -> agent_pb2.Record:
    """Return the message of a record with its first bytes."""
    return agent_pb2.Record(
        kind=kind_to_wire(head.kind),
        iteration=head.iteration,
        timestamp_us=head.timestamp_us,
        task=head.task,
        stream=head.stream,
        switched_on=head.switched_on,
        data=data,
    )


def record_from_wire(message: agent_pb2.Record, *, rank: int, net_name: str) -> RecordHead:
    """Convert the message of a record to its head; ProtocolError if it contradicts itself.

    `net_name` is that of the plan, which takes precedence over the name in the record.
    """
    iteration, timestamp_us = message.iteration, message.timestamp_us
    if iteration >= NUMBER_LIMIT or timestamp_us >= NUMBER_LIMIT:
        raise ProtocolError(f"a record has a number over {NUMBER_LIMIT - 1}")
    kind = kind_from_wire(message.kind, net_name)
    return RecordHead(
        kind, iteration, timestamp_us, rank, message.task, message.stream, message.switched_on
    )


def statistic_rows_to_wire(rows: StatisticRows) -> agent_pb2.FigureRows:
    """Return the message of rows of statistics."""
    return agent_pb2.FigureRows(
        iteration=rows.iteration,
        kinds=map(kind_to_wire, rows.kinds),
        timestamps_us=rows.timestamps_us,
        figures=rows.statistics,
        switched_on=rows.switched_on,
        degraded=bool(rows.degraded),
        degraded_reason=rows.degraded,
        fingerprints=rows.fingerprints,
    )


def statistic_rows_from_wire(message: agent_pb2.FigureRows) -> StatisticRows:
    """Convert the message of rows of statistics; ProtocolError if the columns differ in length or
    are too long.
    """
    lengths = {len(message.kinds), len(message.timestamps_us), len(message.figures)}
    if len(lengths) > 1 or max(lengths) > MAX_FRAME_ROWS:
        raise ProtocolError(
            f"columns of statistics have {sorted(lengths)} rows, at most {MAX_FRAME_ROWS}"
        )
    timestamps_us = tuple(message.timestamps_us)
    if max(message.iteration, *timestamps_us, 0) >= NUMBER_LIMIT:
        raise ProtocolError(f"a row of statistics has a number over {NUMBER_LIMIT - 1}")
    fingerprints = tuple(message.fingerprints)
    if fingerprints:
        _check_fingerprints(fingerprints, len(timestamps_us))
    return StatisticRows(
        iteration=message.iteration,
        kinds=_read_kinds(message.kinds),
        timestamps_us=timestamps_us,
        statistics=tuple(message.figures),
        switched_on=message.switched_on,
        degraded=drop_reasons.normalize_degrade_reason(message.degraded_reason)
        if message.degraded
        else "",
        fingerprints=fingerprints,
    )


def _check_fingerprints(fingerprints: Sequence[bytes], rows: int) -> None:
    if len(fingerprints) != rows:
        raise ProtocolError(f"{rows} rows of statistics have {len(fingerprints)} fingerprints")
    wrong = {len(each) for each in fingerprints}.difference((0, FINGERPRINT_BYTES))
    if wrong:
        raise ProtocolError(
            f"a fingerprint has {min(wrong)} bytes: none, or {FINGERPRINT_BYTES}, are allowed"
        )


def _read_kinds(kinds: Sequence[bytes]) -> tuple[TensorKind, ...]:
    # A step has thousands of kinds; `map` looks up each of them with one call of C.
    if max(map(len, kinds), default=0) <= _MAX_REMEMBERED_BYTES:
        return tuple(map(_parse_remembered_kind, kinds, repeat(None)))
    return tuple(map(kind_from_wire, kinds))


def timeouts_to_wire(timeouts: RankTimeouts) -> events_pb2.Timeouts:
    """Return the message of a rank's timeouts."""
    return events_pb2.Timeouts(**make_fields(timeouts))


def timeouts_from_wire(message: events_pb2.Timeouts) -> RankTimeouts:
    """Convert the message of a rank's timeouts; ProtocolError if they are too many, too long or not
    finite.
    """
    for each in (message.variables, message.groups, message.limits):
        check_count("limits of time", len(each), MAX_TIMEOUTS)
    named = (text for group in message.groups for text in (group.group, group.backend))
    for text in (*named, *message.variables, *message.variables.values(), *message.limits):
        check_text("limit of time with a text", text)
    check_numbers("limit of time", (group.timeout_us for group in message.groups))
    if not all(map(math.isfinite, message.limits.values())):
        raise ProtocolError("a timeout is not a number of seconds")
    return from_message(RankTimeouts, message)


def changed_plan_to_wire(changed: ChangedPlan) -> agent_pb2.ChangedPlan:
    """Return the message of a changed plan."""
    plan_json = plan_to_json(changed.plan)
    return agent_pb2.ChangedPlan(iteration=changed.iteration, plan_json=plan_json)


def changed_plan_from_wire(message: agent_pb2.ChangedPlan) -> ChangedPlan:
    """Convert the message of a changed plan; ProtocolError if it is not valid."""
    check_numbers("changed plan", (message.iteration,))
    check_count("bytes of a plan", len(message.plan_json), _MAX_PLAN_BYTES)
    return ChangedPlan(message.iteration, plan_from_json(message.plan_json))


def iteration_end_from_wire(message: agent_pb2.IterationEnd) -> IterationEnd:
    """Convert the message of the end of an iteration; unknown drop reasons are counted together."""
    return from_message(IterationEnd, message, dropped=reasons_from_wire(message.dropped))


def reasons_from_wire(dropped: Mapping[str, int]) -> dict[str, int]:
    """Convert counts of drops by reason; ProtocolError if there are too many reasons."""
    check_count("reasons of drops", len(dropped), MAX_REASONS)
    counted: Counter[str] = Counter()
    for reason, count in dropped.items():
        counted[drop_reasons.normalize_reason(reason)] += count
    check_numbers("drops", counted.values())
    return dict(counted)


_METADATA_READERS: Mapping[str, Callable[[Any], MetadataItem]] = {
    "events": events_from_wire,
    "figure_rows": statistic_rows_from_wire,
    "iteration_end": iteration_end_from_wire,
    "timeouts": timeouts_from_wire,
    "graph_part": graph_part_from_wire,
    "kernel_arguments": arguments_from_wire,
    "call_stacks": stacks_from_wire,
    "changed_plan": changed_plan_from_wire,
    "session_end": lambda end: from_message(SessionEnd, end, notes=make_notes_printable(end.notes)),
}


def metadata_from_wire(frame: agent_pb2.Frame) -> MetadataItem:
    """Convert a frame that is neither a record nor a chunk of one."""
    body = frame.WhichOneof("body")
    if body is None or body not in _METADATA_READERS:
        raise ProtocolError(f"frame {frame.sequence} has the unknown body {body}")
    return _METADATA_READERS[body](getattr(frame, body))

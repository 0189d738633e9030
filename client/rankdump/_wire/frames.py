"""Frames of a session: records in chunks of limited size, metadata frames, and batches in which
small frames share a message. In a slab a frame is not divided, and its data is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import xxhash
from google.protobuf.message import Message

from rankdump._core.events import EventColumns
from rankdump._core.graph import GraphPart
from rankdump._core.record import StatisticRows
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    KernelArguments,
    MetadataItem,
    RecordHead,
    SessionEnd,
)
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.message_fields import (
    LENGTH_DELIMITED,
    VARINT,
    encode_varint,
    make_fields,
    make_tag,
)
from rankdump._wire.metadata_messages import (
    arguments_to_wire,
    events_to_wire,
    graph_part_to_wire,
    stacks_to_wire,
)
from rankdump._wire.session_messages import (
    changed_plan_to_wire,
    kind_to_wire,
    record_to_wire,
    statistic_rows_to_wire,
    timeouts_to_wire,
)
from rankdump.wire.v1 import agent_pb2

# A Python gRPC stream is fastest at about this size of messages.
MAX_CHUNK_BYTES = 1 << 20


def make_record_frames(
    sequence: int, head: RecordHead, data: memoryview
) -> Iterator[agent_pb2.Frame]:
    """Yield the frames of a record: its head with the first bytes, then the remaining chunks."""
    frame = agent_pb2.Frame(sequence=sequence, record=record_to_wire(head, b""))
    return split_frame(frame, data[: head.byte_count])


def split_frame(
    frame: agent_pb2.Frame, data: memoryview, checksum: bytes = b""
) -> Iterator[agent_pb2.Frame]:
    """Yield a frame whose data was stored beside it, as in a slab, and the chunks after it.

    `checksum` is that of the data in the slab; if it is empty, it is computed.
    """
    if data:
        frame.record.checksum = frame.record.checksum or checksum or compute_checksum(data)
        frame.record.data = bytes(data[:MAX_CHUNK_BYTES])
    yield frame
    for offset in range(MAX_CHUNK_BYTES, len(data), MAX_CHUNK_BYTES):
        piece = bytes(data[offset : offset + MAX_CHUNK_BYTES])
        chunk = agent_pb2.Chunk(offset=offset, data=piece)
        yield agent_pb2.Frame(sequence=frame.sequence, chunk=chunk)


def compute_checksum(data: memoryview) -> bytes:
    """Return the checksum of a record's bytes on the wire: their xxh3-128."""
    return xxhash.xxh3_128_digest(data)


def serialize_record_body(head: RecordHead, checksum: bytes = b"") -> bytes:
    """Return the frame of a record for a slab, without its sequence number.

    A record in several entries has a checksum of all its data. The result equals the bytes of
    `Frame(record=record_to_wire(head, b""))` but is joined from parts, because creating the two
    messages would take five times as long, for every tensor.
    """
    kind, iteration, timestamp_us, _, task, stream, switched_on = head
    serialized = kind_to_wire(kind)
    record = (
        _KIND_TAG
        + encode_varint(len(serialized))
        + serialized
        + _serialize_numbers(iteration, task, stream, switched_on)
        + encode_varint(timestamp_us)
    )
    if checksum:
        record += agent_pb2.Record(checksum=checksum).SerializeToString()
    return _RECORD_TAG + encode_varint(len(record)) + record


@lru_cache(maxsize=64)
def _serialize_numbers(iteration: int, task: int, stream: int, switched_on: bool) -> bytes:
    """Return the serialized fields of a record that are equal within an iteration, followed by the
    tag of the time.

    The caller appends the time after that tag.
    """
    numbers = agent_pb2.Record(
        iteration=iteration, task=task, stream=stream, switched_on=switched_on
    )
    return numbers.SerializeToString() + _TIMESTAMP_TAG


def serialize_chunk_body(offset: int) -> bytes:
    """Return the frame of a later chunk of a record for a slab, without its sequence number."""
    return agent_pb2.Frame(chunk=agent_pb2.Chunk(offset=offset)).SerializeToString()


def add_sequence(sequence: int, body: bytes) -> bytes:
    """Return a serialized frame with its sequence number; fields of a message may come in any
    order.
    """
    return _SEQUENCE_TAG + encode_varint(sequence) + body


_RECORD_TAG = make_tag(agent_pb2.Frame(), "record", LENGTH_DELIMITED)
_SEQUENCE_TAG = make_tag(agent_pb2.Frame(), "sequence", VARINT)
_KIND_TAG = make_tag(agent_pb2.Record(), "kind", LENGTH_DELIMITED)
_TIMESTAMP_TAG = make_tag(agent_pb2.Record(), "timestamp_us", VARINT)


_METADATA_WRITERS: Mapping[type, tuple[str, Callable[[Any], Message]]] = {
    EventColumns: ("events", events_to_wire),
    StatisticRows: ("figure_rows", statistic_rows_to_wire),
    GraphPart: ("graph_part", graph_part_to_wire),
    KernelArguments: ("kernel_arguments", arguments_to_wire),
    CallStacks: ("call_stacks", stacks_to_wire),
    RankTimeouts: ("timeouts", timeouts_to_wire),
    IterationEnd: ("iteration_end", lambda end: agent_pb2.IterationEnd(**make_fields(end))),
    ChangedPlan: ("changed_plan", changed_plan_to_wire),
    SessionEnd: ("session_end", lambda end: agent_pb2.SessionEnd(**make_fields(end))),
}


def make_metadata_frame(sequence: int, declaration: MetadataItem) -> agent_pb2.Frame:
    """Return the frame of an item that is not a record."""
    body, write = _METADATA_WRITERS[type(declaration)]
    parts: dict[str, Any] = {body: write(declaration)}
    return agent_pb2.Frame(sequence=sequence, **parts)


def batch_frames(frames: Iterable[agent_pb2.Frame]) -> Iterator[agent_pb2.PushRequest]:
    """Yield messages of about the size of a chunk, in which small frames share one write."""
    held: list[agent_pb2.Frame] = []
    size = 0
    for frame in frames:
        held.append(frame)
        size += frame.ByteSize()
        if size >= MAX_CHUNK_BYTES:
            yield agent_pb2.PushRequest(batch=agent_pb2.FrameBatch(frames=held))
            held, size = [], 0
    if held:
        yield agent_pb2.PushRequest(batch=agent_pb2.FrameBatch(frames=held))

"""Protobuf form of the header of a `bin` file (CANN, `dump_data.proto`). This is the only module of
the package that uses protobuf.

Two bytes can be the entry of a whole tensor, and a parsed value takes a hundred times as much
memory. So fields are counted, and a header with too many fields is rejected before it is parsed.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rankdump._binfile.header_parts import (
    DimRange,
    DumpData,
    OpAttr,
    OpBuffer,
    OpInput,
    OpOutput,
    OriginalOp,
    Shape,
    Workspace,
)
from rankdump.dumpdata.v1 import dump_data_pb2
from rankdump.errors import CorruptedError

MAX_HEADER_FIELDS = 1 << 18
"""Maximum number of fields and extents in a header; an operator with a thousand tensors has about
ten thousand.
"""
_UNCOUNTED_BYTES = 64 << 10
"""Size in bytes up to which headers are not counted, because they hold few fields."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


def check_field_count(data: memoryview, description: Any) -> None:
    """Raise CorruptedError for a message with more fields than any operator has.

    The count ends at bytes that are no message; parsing them will fail anyway.
    """
    if len(data) > _UNCOUNTED_BYTES and _count_remaining(data, description, MAX_HEADER_FIELDS) < 0:
        raise CorruptedError(
            f"damaged: its header of {len(data)} bytes has more than {MAX_HEADER_FIELDS} fields"
        )


def _count_remaining(data: memoryview, description: Any, allowed: int) -> int:
    """Return how many more fields are allowed; a negative number if there are too many."""
    at = 0
    while at < len(data) and allowed >= 0:
        tag, at = _read_varint(data, at)
        wire = tag & 7
        allowed -= 1
        if wire == _BYTES:
            length, at = _read_varint(data, at)
            field = description.fields_by_number.get(tag >> 3)
            allowed = _count_remaining_inside(data[at : at + length], field, allowed)
            at += length
        elif wire == _VARINT:
            _, at = _read_varint(data, at)
        else:
            # A group has no length, so its fields are counted as if they were outside of it.
            at += _FIXED_BYTES.get(wire, 0)
    return allowed


def _count_remaining_inside(data: memoryview, field: Any, allowed: int) -> int:
    if field is None:
        return allowed
    if field.message_type is not None:
        return _count_remaining(data, field.message_type, allowed)
    # Each packed number takes at least one byte.
    return allowed - len(data) if field.type == field.TYPE_UINT64 else allowed


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    return 0, len(data)


_VALUE_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Shape,
        OriginalOp,
        DimRange,
        OpInput,
        OpOutput,
        OpBuffer,
        OpAttr,
        Workspace,
        DumpData,
    )
}
_EXTRA_FIELD = "extra"


def serialize_bin_header(data: DumpData) -> bytes:
    """Return the serialized header; equal values give equal bytes."""
    return _make_message(data).SerializeToString(deterministic=True)


def parse_bin_header(data: bytes | memoryview) -> DumpData:
    """Parse a header; CorruptedError if the bytes are not one."""
    check_field_count(memoryview(data), dump_data_pb2.DumpData.DESCRIPTOR)
    message = dump_data_pb2.DumpData()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise CorruptedError(
            f"damaged: its header of {len(data)} bytes is not a protobuf message: {error}"
        ) from None
    return _make_value(message)


def _make_message(value: Any) -> Message:
    kind = cast("Any", type(value))
    message: Any = getattr(dump_data_pb2, kind.__name__)()
    for name in _list_field_names(kind):
        held = getattr(value, name)
        if is_dataclass(held):
            getattr(message, name).CopyFrom(_make_message(held))
        elif name in _list_repeated_fields(kind):
            items = (_make_message(each) if is_dataclass(each) else each for each in held)
            getattr(message, name).extend(items)
        elif held is not None:
            setattr(message, name, held)
    if value.extra:
        message.MergeFromString(value.extra)
    return message


def _make_value(message: Any) -> Any:
    kind = _VALUE_CLASSES[message.DESCRIPTOR.name]
    found = {name: _read_field(message, name, kind) for name in _list_field_names(kind)}
    return kind(**found, extra=_serialize_unknown_fields(message))


def _read_field(message: Any, name: str, kind: type) -> Any:
    held = getattr(message, name)
    if name in _list_repeated_fields(kind):
        return tuple(each if isinstance(each, int) else _make_value(each) for each in held)
    if isinstance(held, Message):
        return _make_value(held) if message.HasField(name) else None
    return held


def _serialize_unknown_fields(message: Any) -> bytes:
    """Return the bytes of the fields that this description does not know, as they were read."""
    if not len(UnknownFieldSet(message)):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString(deterministic=True)


@cache
def _list_field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != _EXTRA_FIELD)


@cache
def _list_repeated_fields(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if field.default == ())

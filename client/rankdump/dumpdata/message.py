"""CANN's header as a message and as frozen values; protobuf ends here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from rankdump.contract import dumpdata as values
from rankdump.contract.errors import DamagedError
from rankdump.dumpdata.v1 import dump_data_pb2
from rankdump.dumpdata.weight import refuse_heavy

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        values.Shape,
        values.OriginalOp,
        values.DimRange,
        values.OpInput,
        values.OpOutput,
        values.OpBuffer,
        values.OpAttr,
        values.Workspace,
        values.DumpData,
    )
}
_EXTRA = "extra"


def to_bytes(data: values.DumpData) -> bytes:
    """Return the serialised header; the same values give the same bytes."""
    return _message_of(data).SerializeToString(deterministic=True)


def from_bytes(data: bytes | memoryview) -> values.DumpData:
    """Read a header; DamagedError when it is none."""
    refuse_heavy(memoryview(data), dump_data_pb2.DumpData.DESCRIPTOR)
    message = dump_data_pb2.DumpData()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise DamagedError(
            f"damaged: its header of {len(data)} bytes is no message: {error}"
        ) from None
    return _value_of(message)


def _message_of(value: Any) -> Message:
    kind = cast("Any", type(value))
    message: Any = getattr(dump_data_pb2, kind.__name__)()
    for name in _names(kind):
        held = getattr(value, name)
        if is_dataclass(held):
            getattr(message, name).CopyFrom(_message_of(held))
        elif name in _repeated(kind):
            items = (_message_of(each) if is_dataclass(each) else each for each in held)
            getattr(message, name).extend(items)
        elif held is not None:
            setattr(message, name, held)
    if value.extra:
        message.MergeFromString(value.extra)
    return message


def _value_of(message: Any) -> Any:
    kind = _KINDS[message.DESCRIPTOR.name]
    found = {name: _held(message, name, kind) for name in _names(kind)}
    return kind(**found, extra=_unknown(message))


def _held(message: Any, name: str, kind: type) -> Any:
    held = getattr(message, name)
    if name in _repeated(kind):
        return tuple(each if isinstance(each, int) else _value_of(each) for each in held)
    if isinstance(held, Message):
        return _value_of(held) if message.HasField(name) else None
    return held


def _unknown(message: Any) -> bytes:
    """Return the fields that this description does not know, as they came."""
    if not len(UnknownFieldSet(message)):
        return b""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString(deterministic=True)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != _EXTRA)


@cache
def _repeated(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind) if field.default == ())

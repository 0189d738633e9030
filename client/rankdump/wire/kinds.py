"""What records have in common from step to step, as bytes: made once, read and checked once."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from google.protobuf.message import DecodeError

from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import ProtocolError
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side
from rankdump.contract.plan import NET_NAME
from rankdump.wire.fields import utf8
from rankdump.wire.limits import LIMIT, MAX_LINE, check_text, sendable
from rankdump.wire.v1 import agent_pb2

_SIDES = {Side.INPUT: agent_pb2.SIDE_INPUT, Side.OUTPUT: agent_pb2.SIDE_OUTPUT}
_SIDES_BACK = {number: side for side, number in _SIDES.items()}
MAX_DIMENSIONS = 64
MAX_ARGUMENT = 1024
MAX_TYPE = 64
_MOST_BYTES = 1 << 16
_NAME = TensorKind._fields.index("op_name")
# Some 10 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 14
_MOST_REMEMBERED_BYTES = 1 << 10


def kind_to_wire(kind: TensorKind) -> bytes:
    """Return a kind as other messages hold it; equal ones are equal bytes."""
    # Parts of a message may stand one after the other. A name may never come again, but in the few
    # kinds of its call; what else a kind says comes in every call.
    return _nameless(*kind[:_NAME], *kind[_NAME + 1 :]) + _named(kind.op_name)


@lru_cache(maxsize=_REMEMBERED)
def _named(op_name: str) -> bytes:
    """Return the part of a kind that is its name."""
    return agent_pb2.TensorKind(op_name=sendable(utf8(op_name))).SerializeToString()


@lru_cache(maxsize=_REMEMBERED)
def _nameless(
    graph: int,
    op_type: str,
    side: Side,
    slot: int,
    dtype: str,
    shape: tuple[int, ...],
    byte_count: int,
    argument: str,
    constant: bool,
    model: str,
) -> bytes:
    """Return the other part."""
    return agent_pb2.TensorKind(
        graph=graph,
        op_type=sendable(utf8(op_type)),
        side=_SIDES[side],
        slot=slot,
        dtype=sendable(dtype, MAX_TYPE),
        shape=shape,
        byte_count=byte_count,
        argument=sendable(utf8(argument), MAX_ARGUMENT),
        constant=constant,
        model=model,
    ).SerializeToString(deterministic=True)


def kind_from_wire(data: bytes) -> TensorKind:
    """Read a kind; ProtocolError when it contradicts itself, or is longer than any is."""
    # Long ones are few, unless somebody wants this memory.
    return _remembered(data) if len(data) <= _MOST_REMEMBERED_BYTES else _read(data)


def _read(data: bytes) -> TensorKind:
    if len(data) > _MOST_BYTES:
        raise ProtocolError(f"record of a kind of {len(data)} bytes, at most {_MOST_BYTES}")
    try:
        message = agent_pb2.TensorKind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"record of no kind: {error}") from None
    side = _SIDES_BACK.get(message.side)
    if side is None:
        raise ProtocolError(f"record with side {message.side}")
    shape = tuple(message.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"record with {len(shape)} dimensions")
    if max((message.byte_count, *shape)) >= LIMIT:
        raise ProtocolError(f"record with a number over {LIMIT - 1}")
    _check_texts(message)
    if message.model and not NET_NAME.fullmatch(message.model):
        raise ProtocolError(
            f"record of model {message.model[:60]!r}, which no folder may be called"
        )
    element = ELEMENT_TYPES.get(message.dtype)
    if element and message.byte_count != prod(shape) * element.item_bytes:
        raise ProtocolError(
            f"record declares {message.byte_count} bytes for {message.dtype} of shape {list(shape)}"
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
        model=message.model,
    )


_remembered = lru_cache(maxsize=_REMEMBERED)(_read)


def _check_texts(message: agent_pb2.TensorKind) -> None:
    check_text("record with an op_type", message.op_type)
    check_text("record with an op_name", message.op_name)
    check_text("record with an element type", message.dtype, MAX_TYPE)
    check_text("record with an argument", message.argument, MAX_ARGUMENT)
    check_text("record with a model", message.model, MAX_LINE)

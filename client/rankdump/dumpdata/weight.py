"""How many values a header makes, counted before any is made. Pure.

Two bytes can be a whole tensor's entry, and a value takes a hundred times as much; so a header that
is made of little else is refused before it is read.
"""

from __future__ import annotations

from typing import Any

from rankdump.contract.errors import DamagedError

MAX_FIELDS = 1 << 18
"""Most fields and extents of a header; an operator of a thousand tensors has some ten thousand."""
_LIGHT_BYTES = 64 << 10
"""Headers up to here are not counted: whatever they hold is small."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10


def refuse_heavy(data: memoryview, description: Any) -> None:
    """Raise DamagedError for a message with more fields than any operator has.

    Where the bytes are no message the count ends: so will the reading.
    """
    if len(data) > _LIGHT_BYTES and _left(data, description, MAX_FIELDS) < 0:
        raise DamagedError(
            f"damaged: its header of {len(data)} bytes has more than {MAX_FIELDS} fields, the most "
            f"that are allowed"
        )


def _left(data: memoryview, description: Any, allowed: int) -> int:
    """Return how many fields are allowed behind these; below 0 when these are too many."""
    at = 0
    while at < len(data) and allowed >= 0:
        tag, at = _varint(data, at)
        wire = tag & 7
        allowed -= 1
        if wire == _BYTES:
            length, at = _varint(data, at)
            field = description.fields_by_number.get(tag >> 3)
            allowed = _inside(data[at : at + length], field, allowed)
            at += length
        elif wire == _VARINT:
            _, at = _varint(data, at)
        else:
            # A group has no length: what is in it is counted as if it stood beside it.
            at += _FIXED.get(wire, 0)
    return allowed


def _inside(data: memoryview, field: Any, allowed: int) -> int:
    if field is None:
        return allowed
    if field.message_type is not None:
        return _left(data, field.message_type, allowed)
    # Numbers that are packed take a byte each at least.
    return allowed - len(data) if field.type == field.TYPE_UINT64 else allowed


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for count, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    return 0, len(data)

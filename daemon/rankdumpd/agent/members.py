"""Tensors of one operator that are written one by one and joined into one file later: values."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.key import Side
from rankdump.contract.layout.place import Place


@dataclass(frozen=True, slots=True)
class Membership:
    """What a tensor is to its operator."""

    member: str
    """Side and slot, `input.0`."""
    whole: Place | None = None
    """The operator's file, into which the tensor's own is joined; None where there is none."""
    head_bytes: int = 0
    """How much of the tensor's own file stands before its elements."""


@dataclass(frozen=True, slots=True)
class BinTensor:
    """A tensor as the header of a `bin` file describes it."""

    side: Side
    slot: int
    dtype: str
    shape: tuple[int, ...]
    byte_count: int


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor with a `bin` file of its own, as the ledger gives it back."""

    sequence: int
    path: str
    """Of its own file, relative to the root of the tree; it is gone when the tensor is joined."""
    whole: Place
    head_bytes: int
    bytes_stored: int
    joined: bool
    """The operator's file holds it."""
    timestamp_us: int
    op_name: str
    tensor: BinTensor


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor that its operator's file holds now."""

    sequence: int
    bytes_stored: int
    """Its share of that file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The end of a file."""

    path: str
    """Relative to the root of the tree."""
    start: int
    length: int


def member_text(side: Side, slot: int) -> str:
    """Return the word for one tensor of an operator."""
    return f"{side.value}.{slot}"


def member_place(text: str) -> tuple[Side, int]:
    """Return the side and slot that such a word says."""
    side, _, slot = text.partition(".")
    return Side(side), int(slot)

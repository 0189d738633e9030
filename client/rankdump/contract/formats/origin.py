"""What a header says of a tensor beside its bytes, as conversions need it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.errors import DamagedError

CUBE = 16
"""Rows of a block, and C0 of elements that have more than one byte on the device."""
CUBE_OF_BYTES = 32
"""C0 of elements of one byte."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor was before the device laid it out."""

    shape: tuple[int, ...] = ()
    """In the format that the tensor is converted to, as msaccucmp takes it; empty: not known."""
    groups: int = 0
    """Of a grouped convolution; 0 and 1 are none."""
    c0: int = 0
    """Elements of a block; 0: what the shape says, or what is usual for the element's size."""


def named_extents(letters: str, origin: Origin) -> dict[str, int]:
    """Return the original extents by their letters; DamagedError when there are not as many."""
    if len(origin.shape) != len(letters) or 0 in origin.shape:
        raise DamagedError(
            f"the original shape is {origin.shape}; as {letters} it has {len(letters)} extents "
            "above 0, and this format cannot be read without it"
        )
    return dict(zip(letters, origin.shape, strict=True))


def block_of(shape: tuple[int, ...], origin: Origin, source: str) -> int:
    """Return C0, the last extent; DamagedError when the header contradicts itself."""
    c0 = shape[-1]
    if c0 == 0 or origin.c0 not in (0, c0):
        said = f", its format word says {origin.c0}" if origin.c0 else ""
        raise DamagedError(f"{source} of shape {shape} has blocks of {c0}{said}")
    return c0


def usual_block(item_bytes: int, origin: Origin) -> int:
    """Return C0 for a tensor that is to be laid out (GE's rule)."""
    return origin.c0 or (CUBE_OF_BYTES if item_bytes == 1 else CUBE)


def check_rank(shape: tuple[int, ...], rank: int, source: str) -> None:
    """Refuse a shape that has another number of extents than its format."""
    if len(shape) != rank:
        raise DamagedError(f"{source} has {rank} extents, the shape is {shape}")

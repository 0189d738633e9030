"""Fingerprint of a record: the digest of its elements and the sketch as float32, over their global
indices in the logical tensor where the layout of the record says them, else over the tensor's own.
Statistics are computed in the same pass. With the file of the fingerprints of an iteration. Pure.

The fingerprints of shards add up to that of the whole (`_kernels/shard_fingerprint.py`): digests
modulo 2**64, sketches but for the rounding to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._core.npy_format import format_row_header
from rankdump._core.statistics import compute_statistic_row
from rankdump._core.tensor_layout import TensorLayout, find_block_ranges, find_layout_fault
from rankdump._kernels.element_moments import ELEMENT_CODES, find_address
from rankdump._kernels.kernel_functions import KERNELS
from rankdump._kernels.shard_fingerprint import SKETCH_BUCKETS, ShardPlacement, place_shard
from rankdump.errors import CorruptedError

_ROW_FIELDS = (("record", "<u4"), ("fingerprint", "<u8"), ("sketch", "<f4", (SKETCH_BUCKETS,)))
"""A row of the file: the number of the record in its manifest, and its fingerprint."""
_ROW_TYPE = np.dtype([*_ROW_FIELDS])
_FINGERPRINT = Struct(f"<Q{SKETCH_BUCKETS}f")
FINGERPRINT_BYTES = _FINGERPRINT.size
"""Of the digest and the sketch, little endian."""
_WIDE_SKETCH = Struct(f"{SKETCH_BUCKETS}d")
_NO_ELEMENTS = bytes(FINGERPRINT_BYTES)
_REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
_MAX_REMEMBERED_PLACEMENTS = 1 << 13
_RECORD_BYTES = 4


class MeasuredTensor(NamedTuple):
    """What is kept of a tensor beside its elements, or in their place."""

    statistics: str
    """Texts joined by commas."""
    fingerprint: bytes
    """Of FINGERPRINT_BYTES; empty for a tensor that has none."""


class FingerprintPlacement(NamedTuple):
    """How a kernel goes through the elements of a tensor."""

    code: int
    """Of the element type."""
    indices: ShardPlacement
    has_elements: bool
    covers_all: bool
    """Whether its moments are those of the tensor: not of complex elements, nor beside padding."""


@lru_cache(maxsize=_MAX_REMEMBERED_PLACEMENTS)
def place_fingerprint(
    dtype: str, shape: tuple[int, ...], layout: TensorLayout | None
) -> FingerprintPlacement | None:
    """Return how the fingerprint of a tensor is computed; None where it has none.

    That is a type without a kernel, or a shard that is at no single place of its tensor.
    """
    code = ELEMENT_CODES.get(_REAL_PARTS.get(dtype, dtype))
    place = _find_place(shape, layout)
    if code is None or place is None:
        return None
    return _make_placement(code, dtype, place, covers_all=prod(place[0]) == prod(shape))


class HeadPlacement(NamedTuple):
    """Where the part that a rank has of the head of a tensor lies: first in the local tensor."""

    fingerprint: FingerprintPlacement
    elements: int
    """Number of elements of the local tensor, from the first one on, that belong to the head."""
    part: str
    """`0:2/4,0:8/8`: which of the head a rank has, by dimension; empty for all of it."""


@lru_cache(maxsize=_MAX_REMEMBERED_PLACEMENTS)
def place_head(
    dtype: str, shape: tuple[int, ...], layout: TensorLayout | None, most: int
) -> HeadPlacement | None:
    """Return where the head of a tensor lies; None where `place_fingerprint` returns None.

    The head has the first rows of the logical tensor that have at most so many elements, or the
    first elements of one row that has more. It depends on the logical shape alone, so heads of
    shards add up to that of the whole.
    """
    code = ELEMENT_CODES.get(_REAL_PARTS.get(dtype, dtype))
    place = _find_place(shape, layout)
    if code is None or place is None:
        return None
    held, whole, offset = place
    head = _find_head(shape if layout is None else layout.global_shape, most)
    if len(whole) != len(head):  # of a tensor that was flattened first
        head = (prod(head),)
    stops = tuple(
        max(0, min(at + extent, end)) - at if at < end else 0
        for at, extent, end in zip(offset, held, head, strict=True)
    )
    bounds = zip(offset, stops, head, strict=True)
    part = "" if stops == head else ",".join(f"{at}:{at + n}/{end}" for at, n, end in bounds)
    placement = _make_placement(code, dtype, (stops, whole, offset), covers_all=False)
    return HeadPlacement(placement, prod(stops), part)


def _find_head(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    extents: list[int] = []
    for dimension, extent in enumerate(shape):
        inner = prod(shape[dimension + 1 :])
        kept = min(extent, max(1, most // max(1, inner)))
        extents.append(kept)
        if inner <= most:
            return (*extents, *shape[dimension + 1 :])
    return tuple(extents)


_Place: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]"
"""Shape of a part, shape of the whole, and offset in it."""


def _make_placement(
    code: int, dtype: str, place: _Place, *, covers_all: bool
) -> FingerprintPlacement:
    held, whole, offset = place
    is_complex = dtype in _REAL_PARTS
    if is_complex:
        held, whole, offset = (*held, 2), (*whole, 2), (*offset, 0)
    indices = place_shard(held, whole, offset)
    return FingerprintPlacement(code, indices, prod(held) > 0, covers_all and not is_complex)


def _find_place(shape: tuple[int, ...], layout: TensorLayout | None) -> _Place | None:
    """Return the place of a tensor; None where it is not known."""
    if layout is None:
        return shape, shape, (0,) * len(shape)
    if find_layout_fault(layout, shape):
        return None
    if layout.flat_range:
        begin, end = layout.flat_range
        return (end - begin,), (prod(layout.global_shape),), (begin,)
    if layout.padding or any(len(each) > 1 for each in find_block_ranges(layout, shape)):
        return None
    return shape, layout.global_shape, layout.global_offset


def measure_with_fingerprint(
    items: tuple[str, ...],
    dtype: str,
    data: bytes | memoryview,
    placement: FingerprintPlacement | None,
    *,
    exact: bool = False,
) -> MeasuredTensor:
    """Return the statistics and the fingerprint of raw elements, C order, little endian.

    UnsupportedError for statistics of a complex type.
    """
    if placement is None or not placement.has_elements:
        row = compute_statistic_row(items, dtype, data, exact=exact) if items else ""
        return MeasuredTensor(row, b"" if placement is None else _NO_ELEMENTS)
    address = find_address(np.frombuffer(data, np.uint8))
    digest, sketch, moments = KERNELS.functions.fingerprint_shard(
        address, placement.code, *placement.indices
    )
    found = moments if placement.covers_all else None
    row = compute_statistic_row(items, dtype, data, exact=exact, found=found) if items else ""
    return MeasuredTensor(row, _pack_fingerprint(digest, sketch))


def compute_fingerprint(address: int, placement: FingerprintPlacement) -> bytes:
    """Return the fingerprint of elements at an address, in C order."""
    if not placement.has_elements:
        return _NO_ELEMENTS
    digest, sketch, _ = KERNELS.functions.fingerprint_shard(
        address, placement.code, *placement.indices
    )
    return _pack_fingerprint(digest, sketch)


def compute_digest(address: int, placement: FingerprintPlacement) -> int:
    """Return the digest alone of elements at an address, which adds up modulo 2**64."""
    if not placement.has_elements:
        return 0
    return KERNELS.functions.fingerprint_shard(address, placement.code, *placement.indices)[0]


def _pack_fingerprint(digest: int, sketch: bytes) -> bytes:
    try:
        # A third of the time of numpy, and there is one for each small tensor.
        return _FINGERPRINT.pack(digest, *_WIDE_SKETCH.unpack(sketch))
    except OverflowError:
        with np.errstate(over="ignore"):  # beyond float32 a sum is infinite
            narrow = np.frombuffer(sketch).astype("<f4")
        return digest.to_bytes(8, "little") + narrow.tobytes()


def format_fingerprint_file(fingerprints: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the npy file of fingerprints, each with the number of its record, which rise."""
    rows = [
        piece
        for record, fingerprint in fingerprints
        for piece in (record.to_bytes(_RECORD_BYTES, "little"), fingerprint)
    ]
    return b"".join((format_row_header(_ROW_FIELDS, len(fingerprints)), *rows))


def parse_fingerprint_file(data: bytes | memoryview, records: int) -> npt.NDArray[Any]:
    """Return the rows of such a file, of a manifest with so many records.

    CorruptedError for any other file. Its header can only be the one that has this length, so it
    is compared and never parsed.
    """
    head = len(format_row_header(_ROW_FIELDS, 0))
    rows = max(0, len(data) - head) // _ROW_TYPE.itemsize
    header = format_row_header(_ROW_FIELDS, rows)
    if bytes(data[: len(header)]) != header:
        raise CorruptedError(
            "not a file of fingerprints: its npy header is not that of so many bytes"
        )
    if len(data) != len(header) + rows * _ROW_TYPE.itemsize:
        raise CorruptedError(f"its last row is incomplete: {len(data)} bytes for {rows} rows")
    found = np.frombuffer(data, _ROW_TYPE, offset=len(header))
    numbers = found["record"].astype(np.int64)
    if (np.diff(numbers) <= 0).any():
        raise CorruptedError("the numbers of its records do not rise")
    if rows and numbers[-1] >= records:
        raise CorruptedError(f"it has record {numbers[-1]}, and its manifest has {records}")
    return found

"""Fingerprint of a record: the digest of its elements and their sketch as float32. Both use the
global indices of the elements in the logical tensor if the record's layout tells them, else the
tensor's own. Statistics are computed in the same pass. Also the file format of an iteration's
fingerprints. Pure.

The fingerprints of shards add up to that of the whole tensor (`_kernels/shard_fingerprint.py`):
digests modulo 2**64, sketches except for the rounding to float32.
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
"""Fields of a row of the fingerprint file: the number of the record in its manifest, and its
fingerprint.
"""
_ROW_TYPE = np.dtype([*_ROW_FIELDS])
_FINGERPRINT = Struct(f"<Q{SKETCH_BUCKETS}f")
FINGERPRINT_BYTES = _FINGERPRINT.size
"""Bytes of a fingerprint: digest and sketch, little endian."""
_WIDE_SKETCH = Struct(f"{SKETCH_BUCKETS}d")
_NO_ELEMENTS = bytes(FINGERPRINT_BYTES)
_REAL_PARTS = {"complex64": "float32", "complex128": "float64"}
_MAX_REMEMBERED_PLACEMENTS = 1 << 13
_RECORD_BYTES = 4


class MeasuredTensor(NamedTuple):
    """Statistics and fingerprint of a tensor, which are kept beside its elements or in
    their place.
    """

    statistics: str
    """Texts of the statistics, joined by commas."""
    fingerprint: bytes
    """Fingerprint of FINGERPRINT_BYTES bytes; empty for a tensor that has none."""


class FingerprintPlacement(NamedTuple):
    """Order and indices in which a kernel reads the elements of a tensor."""

    code: int
    """Kernel code of the element type."""
    indices: ShardPlacement
    has_elements: bool
    covers_all: bool
    """Whether the kernel's moments are those of the tensor; they are not if elements are complex or
    there is padding.
    """


@lru_cache(maxsize=_MAX_REMEMBERED_PLACEMENTS)
def place_fingerprint(
    dtype: str, shape: tuple[int, ...], layout: TensorLayout | None
) -> FingerprintPlacement | None:
    """Return how the fingerprint of a tensor is computed; None if the tensor has none.

    A tensor has no fingerprint if its type has no kernel, or if it is a shard without a single
    place in its logical tensor.
    """
    code = ELEMENT_CODES.get(_REAL_PARTS.get(dtype, dtype))
    place = _find_place(shape, layout)
    if code is None or place is None:
        return None
    return _make_placement(code, dtype, place, covers_all=prod(place[0]) == prod(shape))


class HeadPlacement(NamedTuple):
    """Place of a rank's part of the head of a tensor; the part comes first in the local tensor."""

    fingerprint: FingerprintPlacement
    elements: int
    """Number of first elements of the local tensor that belong to the head."""
    part: str
    """Part of the head that the rank has, by dimension, such as `0:2/4,0:8/8`; empty for all of the
    head.
    """


@lru_cache(maxsize=_MAX_REMEMBERED_PLACEMENTS)
def place_head(
    dtype: str, shape: tuple[int, ...], layout: TensorLayout | None, most: int
) -> HeadPlacement | None:
    """Return the place of the head of a tensor; None if `place_fingerprint` returns None.

    The head consists of the first rows of the logical tensor that have at most `most` elements
    together, or of the first `most` elements if one row has more. It depends on the logical shape
    alone, so the digests of the heads of shards add up to that of the whole tensor's head.
    """
    code = ELEMENT_CODES.get(_REAL_PARTS.get(dtype, dtype))
    place = _find_place(shape, layout)
    if code is None or place is None:
        return None
    held, whole, offset = place
    head = _find_head(shape if layout is None else layout.global_shape, most)
    if len(whole) != len(head):  # the tensor was flattened before it was sharded
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
"""Shape of a part, shape of the whole tensor, and offset of the part in it."""


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
    """Return the place of a tensor in its logical tensor; None if it is not known."""
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
    """Return the statistics and the fingerprint of raw elements (C order, little endian).

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
    """Return the fingerprint of the elements at an address, in C order."""
    if not placement.has_elements:
        return _NO_ELEMENTS
    digest, sketch, _ = KERNELS.functions.fingerprint_shard(
        address, placement.code, *placement.indices
    )
    return _pack_fingerprint(digest, sketch)


def compute_digest(address: int, placement: FingerprintPlacement) -> int:
    """Return only the digest of the elements at an address; it adds up modulo 2**64."""
    if not placement.has_elements:
        return 0
    return KERNELS.functions.fingerprint_shard(address, placement.code, *placement.indices)[0]


def _pack_fingerprint(digest: int, sketch: bytes) -> bytes:
    try:
        # This takes a third of numpy's time, and there is a fingerprint for each small tensor.
        return _FINGERPRINT.pack(digest, *_WIDE_SKETCH.unpack(sketch))
    except OverflowError:
        with np.errstate(over="ignore"):  # a sum beyond the range of float32 becomes infinite
            narrow = np.frombuffer(sketch).astype("<f4")
        return digest.to_bytes(8, "little") + narrow.tobytes()


def format_fingerprint_file(fingerprints: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the npy file of an iteration's fingerprints, each with its record's number, in
    ascending order.
    """
    rows = [
        piece
        for record, fingerprint in fingerprints
        for piece in (record.to_bytes(_RECORD_BYTES, "little"), fingerprint)
    ]
    return b"".join((format_row_header(_ROW_FIELDS, len(fingerprints)), *rows))


def parse_fingerprint_file(data: bytes | memoryview, records: int) -> npt.NDArray[Any]:
    """Return the rows of a fingerprint file that belongs to a manifest with `records` records.

    CorruptedError for any other file. Only one header is possible for a file of this length, so the
    header is compared and never parsed.
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

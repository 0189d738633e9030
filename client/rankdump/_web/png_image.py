"""Pictures of numbers: colours for cells, and PNG files with a palette (W3C, Portable Network
Graphics). Pure.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

_LEVELS = 125
"""Number of colours on either side of the middle colour."""
NAN_INDEX, INFINITE_INDEX, EMPTY_INDEX = 251, 252, 253
_MIDDLE = (246, 246, 244)
_POSITIVE, _NEGATIVE = (12, 74, 150), (170, 36, 36)
_SPECIAL = {NAN_INDEX: (214, 0, 160), INFINITE_INDEX: (255, 138, 0), EMPTY_INDEX: (200, 200, 200)}


def make_palette() -> bytes:
    """Return 256 colours: from the lowest value over the middle to the highest, then the special
    ones.
    """
    colors = np.zeros((256, 3), np.uint8)
    middle = np.array(_MIDDLE)
    for level in range(-_LEVELS, _LEVELS + 1):
        end = np.array(_POSITIVE if level > 0 else _NEGATIVE)
        share = (abs(level) / _LEVELS) ** 0.8
        colors[level + _LEVELS] = middle + (end - middle) * share
    for index, color in _SPECIAL.items():
        colors[index] = color
    return colors.tobytes()


def color_cells(values: npt.NDArray[np.float64], *, is_log: bool = False) -> npt.NDArray[np.uint8]:
    """Return the index into the palette for each value; 0 is in the middle.

    With `is_log`, colours follow the logarithm of the magnitudes.
    """
    finite = np.isfinite(values)
    sizes = np.abs(np.where(finite, values, 0.0))
    largest = float(sizes.max()) if sizes.size else 0.0
    if not largest:
        shares = np.zeros_like(sizes)
    elif is_log:
        smallest = float(sizes[sizes > 0].min())
        span = np.log(largest / smallest) or 1.0
        with np.errstate(divide="ignore"):
            shares = np.where(sizes > 0, 0.1 + 0.9 * np.log(sizes / smallest) / span, 0.0)
    else:
        shares = sizes / largest
    levels = np.rint(np.sign(np.where(finite, values, 0.0)) * shares * _LEVELS)
    indices = (levels + _LEVELS).astype(np.uint8)
    indices[np.isnan(values)] = NAN_INDEX
    indices[np.isinf(values)] = INFINITE_INDEX
    return indices


def encode_png(indices: npt.NDArray[np.uint8]) -> bytes:
    """Return a picture with one pixel for each index into the palette; if there are no cells, a
    single pixel.
    """
    if not indices.size:
        indices = np.full((1, 1), EMPTY_INDEX, np.uint8)
    height, width = indices.shape
    # each line begins with a filter byte, 0 for no filter
    lines = np.zeros((height, width + 1), np.uint8)
    lines[:, 1:] = indices
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", make_palette()),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_make_chunk(*part) for part in parts)


def _make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

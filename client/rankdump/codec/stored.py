"""A zstd frame whose content is left as it is: for bytes that packing does not make smaller.

Facts: RFC 8878, 3.1.1 (frame and header) and 3.1.1.2 (blocks).
"""

from __future__ import annotations

from collections.abc import Sequence

from rankdump.codec import Buffer

_MAGIC = bytes.fromhex("28b52ffd")
_EIGHT_BYTES_OF_SIZE = 3 << 6
_WINDOW_OF_128_KIB = 7 << 3
_BLOCK_BYTES = 128 << 10
"""Largest that a block may be; the window is as large, so that no reader refuses it."""


def stored_frame(part: Buffer) -> Sequence[Buffer]:
    """Return the frame of these bytes in parts, which are views of them; it has no checksum."""
    view = memoryview(part)
    size = len(view)
    head = bytes((_EIGHT_BYTES_OF_SIZE, _WINDOW_OF_128_KIB))
    frame: list[Buffer] = [_MAGIC + head + size.to_bytes(8, "little")]
    for start in range(0, max(size, 1), _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]
        last = start + len(block) >= size
        frame += [(len(block) << 3 | last).to_bytes(3, "little"), block]
    return frame

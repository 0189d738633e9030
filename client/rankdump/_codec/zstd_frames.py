"""Frames of zstd files: finds where each frame begins and ends without unpacking, and makes frames
whose content is stored as it is. Pure. The format is that of RFC 8878.

The blocks of a frame tell their length and the maximum that they can hold, so a frame that declares
more is rejected before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import zstandard

from rankdump.errors import CorruptedError

ByteBuffer: TypeAlias = "bytes | bytearray | memoryview"
RangeReader: TypeAlias = "Callable[[int, int], ByteBuffer]"
"""Reads a number of bytes at an offset of a packed file; returns fewer at the end of the file."""

MAX_ZSTD_FRAMES = 1 << 16
MAX_EXPANSION = 1 << 15
"""Maximum number of bytes that one byte of a frame can stand for: a block of 128 KiB takes four."""
_BLOCK_BYTES = 128 << 10
_MAX_HEAD_BYTES = 18
"""Maximum number of bytes before the first block of a frame."""
_BLOCK_HEAD_BYTES, _CHECKSUM_BYTES, _SKIPPED_HEAD_BYTES = 3, 4, 8
_SKIPPED_MAGIC = 0x184D2A5
_RAW, _RLE, _RESERVED = 0, 1, 3
_UNREADABLE_FRAME = "damaged: zstd frame cannot be read"


@dataclass(frozen=True, slots=True)
class ZstdFrame:
    """One frame: its place in the packed file, and the place of its content in the plain file."""

    start: int
    end: int
    content_offset: int
    content_bytes: int

    @property
    def content_end(self) -> int:
        """Offset in the plain file after the frame's content."""
        return self.content_offset + self.content_bytes


def make_memory_reader(data: ByteBuffer) -> RangeReader:
    """Return a reader of bytes in memory, which copies nothing."""
    view = memoryview(data)
    return lambda at, count: view[at : at + count]


def iterate_zstd_frames(read: RangeReader, size: int, *, limit_bytes: int) -> Iterator[ZstdFrame]:
    """Yield the frames of a file of this size; CorruptedError if a frame is invalid or cut off.

    Each frame must declare its size, and all frames together must not exceed the limit. Skippable
    frames are skipped.
    """
    at = offset = count = skipped = 0
    while at < size:
        if count + skipped > MAX_ZSTD_FRAMES:
            raise CorruptedError(f"damaged: it has more than {MAX_ZSTD_FRAMES} zstd frames")
        head = bytes(read(at, _MAX_HEAD_BYTES))
        if int.from_bytes(head[:4], "little") >> 4 == _SKIPPED_MAGIC:
            at, skipped = _skip_frame(head, at), skipped + 1
            if at > size:
                raise CorruptedError(
                    f"{_UNREADABLE_FRAME}: a skippable frame ends after the {size} bytes"
                )
            continue
        frame = _parse_frame(read, head, at, offset, limit_bytes)
        if frame.end > size:
            raise CorruptedError(
                f"{_UNREADABLE_FRAME}: it is cut off and ends after the {size} bytes"
            )
        yield frame
        at, offset, count = frame.end, frame.content_end, count + 1
    if not count:
        raise CorruptedError(f"damaged: no zstd frame in {size} bytes")


def _skip_frame(head: bytes, at: int) -> int:
    if len(head) < _SKIPPED_HEAD_BYTES:
        raise CorruptedError(f"{_UNREADABLE_FRAME}: a skippable frame is cut off")
    return at + _SKIPPED_HEAD_BYTES + int.from_bytes(head[4:8], "little")


def _parse_frame(
    read: RangeReader, head: bytes, at: int, offset: int, limit_bytes: int
) -> ZstdFrame:
    try:
        facts = zstandard.get_frame_parameters(head)
        blocks = at + zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise CorruptedError(f"{_UNREADABLE_FRAME}: {error}") from None
    declared = facts.content_size
    if declared == zstandard.CONTENTSIZE_UNKNOWN:
        raise CorruptedError(f"{_UNREADABLE_FRAME}: it does not declare its size")
    if offset + declared > limit_bytes:
        already = f"after {offset} bytes " if offset else ""
        raise CorruptedError(
            f"damaged: {already}zstd frame declares {declared} bytes, at most {limit_bytes} are "
            f"allowed"
        )
    end, capacity = _scan_blocks(read, blocks, min(facts.window_size, _BLOCK_BYTES))
    if declared > capacity:
        raise CorruptedError(
            f"damaged: zstd frame declares {declared} bytes, its blocks hold {capacity} at most"
        )
    return ZstdFrame(at, end + _CHECKSUM_BYTES * facts.has_checksum, offset, declared)


def _scan_blocks(read: RangeReader, at: int, largest: int) -> tuple[int, int]:
    """Return the offset after the last block, and the maximum number of bytes that the blocks can
    hold.
    """
    capacity = 0
    while True:
        head = read(at, _BLOCK_HEAD_BYTES)
        if len(head) < _BLOCK_HEAD_BYTES:
            raise CorruptedError(f"{_UNREADABLE_FRAME}: it is cut off: a block is missing")
        word = int.from_bytes(head, "little")
        kind, length = word >> 1 & 3, word >> 3
        if kind == _RESERVED or length > _BLOCK_BYTES:
            raise CorruptedError(
                f"{_UNREADABLE_FRAME}: it has a block of kind {kind} and {length} bytes"
            )
        capacity += length if kind in (_RAW, _RLE) else largest
        at += _BLOCK_HEAD_BYTES + (1 if kind == _RLE else length)
        if word & 1:
            return at, capacity


_ZSTD_MAGIC = bytes.fromhex("28b52ffd")
_EIGHT_BYTES_OF_SIZE = 3 << 6
_WINDOW_OF_128_KIB = 7 << 3
_STORED_START = _ZSTD_MAGIC + bytes((_EIGHT_BYTES_OF_SIZE, _WINDOW_OF_128_KIB))
"""Start of a stored frame; compressors write the size and the window of their frames in another
way.
"""
STORED_HEAD_BYTES = len(_STORED_START) + 8


def make_stored_frame(parts: Sequence[ByteBuffer]) -> Sequence[ByteBuffer]:
    """Return a frame that stores the parts as they are, as views of them; it has no checksum.

    Each part begins in a new block, so the bytes of the frame depend on the parts alone.
    """
    size = sum(map(len, parts))
    frame: list[ByteBuffer] = [_STORED_START + size.to_bytes(8, "little")]
    blocks = [block for part in parts for block in _split_blocks(memoryview(part))]
    for number, block in enumerate(blocks or [memoryview(b"")], start=1):
        last = number >= len(blocks)
        frame += [(len(block) << 3 | last).to_bytes(_BLOCK_HEAD_BYTES, "little"), block]
    return frame


def compute_stored_bytes(part_sizes: Iterable[int]) -> int:
    """Return the size of the frame that stores parts of these sizes."""
    size = STORED_HEAD_BYTES
    blocks = 0
    for part_bytes in part_sizes:
        size += part_bytes
        blocks += -(-part_bytes // _BLOCK_BYTES)
    return size + _BLOCK_HEAD_BYTES * max(1, blocks)


def is_stored_frame(start: ByteBuffer) -> bool:
    """Return whether a file with these first STORED_HEAD_BYTES is a stored frame."""
    return bytes(start[: len(_STORED_START)]) == _STORED_START


def read_stored_size(start: ByteBuffer) -> int:
    """Return the size of the content of a stored frame, given its first STORED_HEAD_BYTES."""
    return int.from_bytes(start[len(_STORED_START) : STORED_HEAD_BYTES], "little")


def iterate_stored_blocks(read: RangeReader, size: int) -> Iterator[ByteBuffer]:
    """Yield block by block the content of a file of this size, which is one stored frame.

    CorruptedError if it is not a stored frame.
    """
    at, last, found = STORED_HEAD_BYTES, 0, 0
    while not last:
        head = read(at, _BLOCK_HEAD_BYTES)
        word = int.from_bytes(head, "little")
        last, kind, length = word & 1, word >> 1 & 3, word >> 3
        at += _BLOCK_HEAD_BYTES
        block = read(at, length) if len(head) == _BLOCK_HEAD_BYTES and kind == _RAW else b""
        at += length
        if len(head) < _BLOCK_HEAD_BYTES or kind != _RAW or len(block) < length:
            raise CorruptedError(f"{_UNREADABLE_FRAME}: its block before {at} is not stored whole")
        found += length
        yield block
    declared = read_stored_size(read(0, STORED_HEAD_BYTES))
    if (at, found) != (size, declared):
        raise CorruptedError(
            f"{_UNREADABLE_FRAME}: {found} bytes in {at}, where {declared} in {size} are declared"
        )


def _split_blocks(part: memoryview) -> Iterator[memoryview]:
    return (part[start : start + _BLOCK_BYTES] for start in range(0, len(part), _BLOCK_BYTES))

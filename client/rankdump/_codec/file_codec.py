"""Codecs of files, which are named by the file's suffix, and the rule that decides whether packing
a file is worthwhile.

`none` leaves the file as it is. `zstd` wraps it in plain zstd frames with checksums, which the
`zstd` command unpacks: an npy file in one frame, a bin file in one frame for its header and one for
each payload. Only this package imports zstandard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from rankdump._codec.zstd_frames import (
    ByteBuffer,
    ZstdFrame,
    iterate_zstd_frames,
    make_memory_reader,
    make_stored_frame,
)
from rankdump.errors import CorruptedError, UnsupportedError

_MAX_JOINED_BYTES = 16 << 20
"""Maximum number of bytes that are joined for one call, which is a tenth faster than a stream."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileCodec:
    """Packs the parts of a file, and unpacks whole files; this base class leaves the bytes as they
    are.
    """

    name: str = "none"
    """Name of the codec in a plan."""
    suffix: str = ""
    """Text that the codec appends to `.npy`."""
    is_deferrable: bool = False
    """Whether files may be packed some time after they were written."""

    def encode(self, parts: Sequence[ByteBuffer]) -> Sequence[ByteBuffer]:
        """Return the bytes of the packed file in parts; safe to call from several threads."""
        return parts

    def encode_blocks(self, blocks: Iterable[ByteBuffer], size: int) -> Iterable[ByteBuffer]:
        """Return the bytes of the packed file, given consecutive blocks that have `size` bytes
        together.
        """
        return blocks

    def decode(self, data: ByteBuffer, *, limit_bytes: int) -> ByteBuffer:
        """Return the bytes of the plain file; CorruptedError if the data is damaged or exceeds the
        limit.
        """
        if len(data) > limit_bytes:
            raise CorruptedError(f"damaged: {len(data)} bytes, at most {limit_bytes} are allowed")
        return data


class _ThreadCompressor(threading.local):
    """Compressor of one thread; it is kept because it reuses its window for the next frame."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdCompressor(level=1, write_checksum=True)


_compressor = _ThreadCompressor()


@dataclass(frozen=True, slots=True)
class ZstdCodec(FileCodec):
    """zstd frames with content size and checksum: writes one frame, reads all frames of a file."""

    name: str = "zstd"
    suffix: str = ".zst"
    is_deferrable: bool = True

    def encode(self, parts: Sequence[ByteBuffer]) -> Sequence[ByteBuffer]:
        """Return the frame in parts; zstandard releases the GIL while it works."""
        return (*self.encode_blocks(parts, _count_bytes(parts)),)

    def encode_blocks(self, blocks: Iterable[ByteBuffer], size: int) -> Iterable[ByteBuffer]:
        """Yield the frame; it does not depend on where a block ends."""
        if size <= _MAX_JOINED_BYTES:
            yield _compressor.zstd.compress(b"".join(blocks))
            return
        stream = _compressor.zstd.compressobj(size=size)
        for block in blocks:
            if packed := stream.compress(block):
                yield packed
        yield stream.flush()

    def decode(self, data: ByteBuffer, *, limit_bytes: int) -> ByteBuffer:
        """Return the content of all frames; each must declare its size, all within the limit."""
        found = tuple(
            iterate_zstd_frames(make_memory_reader(data), len(data), limit_bytes=limit_bytes)
        )
        view = memoryview(data)
        if len(found) == 1:
            return decompress_frame(found[0], view[found[0].start : found[0].end])
        whole = bytearray(found[-1].content_end)
        for frame in found:
            part = decompress_frame(frame, view[frame.start : frame.end])
            whole[frame.content_offset : frame.content_end] = part
        return memoryview(whole).toreadonly()


def decompress_frame(frame: ZstdFrame, packed: ByteBuffer) -> bytes:
    """Return the content of one frame; CorruptedError if its checksum is wrong."""
    try:
        if frame.content_bytes:
            return zstandard.ZstdDecompressor().decompress(packed)
        # This is checked here because zstandard does not check the size that an empty frame
        # declares.
        reader = zstandard.ZstdDecompressor().decompressobj()
        if not reader.decompress(packed) and reader.eof:
            return b""
    except zstandard.ZstdError as error:
        raise CorruptedError(f"damaged: zstd frame cannot be read: {error}") from None
    raise CorruptedError("damaged: zstd frame declares 0 bytes, but is not an empty frame")


def decompress_start(packed: BinaryIO, count: int) -> bytes:
    """Return the first `count` bytes of a frame's content, without unpacking the rest.

    The bytes are not verified, because the checksum is that of the whole frame.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, closefd=False) as stream:
            return stream.read(count)
    except zstandard.ZstdError as error:
        raise CorruptedError(f"damaged: zstd frame cannot be read: {error}") from None


def unpack_stream(packed: BinaryIO, write: Callable[[bytes], object], *, limit_bytes: int) -> None:
    """Unpack all frames of a file in pieces; CorruptedError if a frame is damaged or the limit
    exceeded.

    If the last frame ends early, there is no error: only the reader of the content can see that it
    is too short.
    """
    done = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(
            packed, read_across_frames=True, closefd=False
        ) as stream:
            while piece := stream.read(_PIECE_BYTES):
                done += len(piece)
                if done > limit_bytes:
                    raise CorruptedError(f"damaged: over {limit_bytes} bytes, as many are allowed")
                write(piece)
    except zstandard.ZstdError as error:
        raise CorruptedError(f"damaged: zstd frame cannot be read: {error}") from None


CODECS: dict[str, FileCodec] = {
    codec.name: codec
    for codec in (FileCodec(), ZstdCodec(), ZstdCodec(name="zstd-always", is_deferrable=False))
}


def get_codec(name: str) -> FileCodec:
    """Return the codec with this name in a plan; UnsupportedError names the known codecs."""
    try:
        return CODECS[name]
    except KeyError:
        raise UnsupportedError(f"unknown codec {name!r}; known: {', '.join(CODECS)}") from None


def select_codec(file_name: str) -> FileCodec:
    """Return the codec that a file's suffix names."""
    return CODECS["zstd"] if file_name.endswith(".zst") else CODECS["none"]


MAX_PACKED_SHARE = 0.875
"""A file is packed only if that makes it smaller than this share of the plain file, as ZFS does for
blocks.

Measured with zstd at level 1: random bits stay at 1.000, normal float64 comes to 0.958, float32
to 0.924 and bfloat16 to 0.777; a sample differs from the whole by less than 0.005. The 8 % of
float32 cost a core as long as the training step that wrote them.
"""
BLOCK_BYTES = 4 << 10
"""Size in bytes up to which files stay plain: they take one block of a disk, packed or not, and
packing one takes as long as writing it.
"""
SMALL_FILE_BYTES = 64 << 10
"""Size in bytes up to which files are packed without taking a sample, because a frame costs hardly
more.
"""
_SAMPLES = 8
_SAMPLE_BYTES = 2 << 10
"""Bytes of each piece of a sample; all pieces together are a quarter of a small file."""


def pack_file(
    codec: FileCodec, parts: Sequence[ByteBuffer], *, later: bool = False
) -> Sequence[ByteBuffer]:
    """Return the bytes of a file, packed if that saves enough, else `parts` itself.

    A packed file's name has the codec's suffix; whether it has one depends only on `parts` and
    `codec`. A codec that may defer packing leaves a file of one block plain for good. With `later`,
    a large file that packing would make smaller is stored unpacked in a frame of the codec, so that
    it can be packed later under the same name.
    """
    size = _count_bytes(parts)
    if not codec.suffix or (codec.is_deferrable and size <= BLOCK_BYTES):
        return parts
    if size <= SMALL_FILE_BYTES:
        packed = codec.encode(parts)
        return packed if is_worthwhile(packed, size) else parts
    if not _is_sample_worthwhile(codec, max(parts, key=len)):
        return parts
    stored = make_stored_frame(parts)
    # The sample decided on the name, also if packing does not make the whole file smaller.
    return stored if later else min(codec.encode(parts), stored, key=_count_bytes)


def pack_part(codec: FileCodec, part: ByteBuffer) -> Sequence[ByteBuffer]:
    """Return one part of a file as a frame of its own, packed or stored, in pieces.

    Parts of several files can be joined without unpacking them. An empty part has no frame, and
    without a codec the part stays as it is. The name of the file has the codec's suffix.
    """
    if not len(part):
        return ()
    if not codec.suffix:
        return (part,)
    if len(part) > SMALL_FILE_BYTES and not _is_sample_worthwhile(codec, part):
        return make_stored_frame((part,))
    return codec.encode((part,))


def _is_sample_worthwhile(codec: FileCodec, part: ByteBuffer) -> bool:
    sample = _take_sample(part)
    return is_worthwhile(codec.encode((sample,)), len(sample))


def is_worthwhile(packed: Sequence[ByteBuffer], plain_bytes: int) -> bool:
    """Return whether packing makes a file small enough to be worthwhile."""
    return _count_bytes(packed) <= MAX_PACKED_SHARE * plain_bytes


def _count_bytes(parts: Iterable[ByteBuffer]) -> int:
    return sum(map(len, parts))


def _take_sample(part: ByteBuffer) -> bytes:
    """Return pieces of a part that are evenly spread from its beginning to its end."""
    step = max(len(part) - _SAMPLE_BYTES, 0) // (_SAMPLES - 1)
    starts = range(0, _SAMPLES * step, step) if step else (0,)
    return b"".join(memoryview(part)[at : at + _SAMPLE_BYTES] for at in starts)

"""How a file's bytes are packed; a codec names itself in the file's suffix.

The only room that knows zstandard. `none` leaves the file as it is, `zstd` wraps it in plain zstd
frames with their checksums, so that the `zstd` command gives the same bytes back: an npy file in
one, a bin file in one for its header and one for each payload.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import zstandard

from rankdump.codec.frames import Buffer, Frame, frames, from_memory
from rankdump.contract.errors import DamagedError, UnsupportedError

__all__ = [
    "CODECS",
    "Buffer",
    "Codec",
    "NoneCodec",
    "ZstdCodec",
    "codec_named",
    "codec_of",
    "unpacked",
    "unpacked_start",
]

_JOINED_BYTES = 16 << 20
"""One call over joined parts is a tenth faster than a stream, and needs a copy of them."""


class Codec(Protocol):
    """Packs the parts of one file, and unpacks the whole."""

    @property
    def name(self) -> str:
        """What a plan calls it."""
        ...

    @property
    def suffix(self) -> str:
        """What it appends to `.npy`."""
        ...

    def encode(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the file's bytes in parts; safe to call from several threads."""
        ...

    def decode(self, data: Buffer, *, limit_bytes: int) -> Buffer:
        """Return the bytes before encoding; DamagedError when damaged or over the limit."""
        ...


@dataclass(frozen=True, slots=True)
class NoneCodec:
    """Leaves the bytes as they are."""

    name: str = "none"
    suffix: str = ""

    def encode(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the parts themselves."""
        return parts

    def decode(self, data: Buffer, *, limit_bytes: int) -> Buffer:
        """Return the data itself."""
        if len(data) > limit_bytes:
            raise DamagedError(f"damaged: {len(data)} bytes, at most {limit_bytes} are allowed")
        return data


class _Compressors(threading.local):
    """A context keeps its window between frames, and must not serve two threads at once."""

    def __init__(self) -> None:
        self.by_level: dict[int, zstandard.ZstdCompressor] = {}


_compressors = _Compressors()


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """zstd frames with content size and checksum: writes one, reads all of a file."""

    level: int = 1
    name: str = "zstd"
    suffix: str = ".zst"

    def encode(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the frame in parts; zstandard releases the GIL while it works."""
        size = sum(map(len, parts))
        if size <= _JOINED_BYTES:
            return [self._compressor().compress(b"".join(parts))]
        stream = self._compressor().compressobj(size=size)
        packed = [stream.compress(part) for part in parts]
        packed.append(stream.flush())
        return [part for part in packed if part]

    def decode(self, data: Buffer, *, limit_bytes: int) -> Buffer:
        """Return the content of all frames; each must declare its size, all within the limit."""
        found = tuple(frames(from_memory(data), len(data), limit_bytes=limit_bytes))
        view = memoryview(data)
        if len(found) == 1:
            return unpacked(found[0], view[found[0].start : found[0].end])
        whole = bytearray(found[-1].content_end)
        for frame in found:
            part = unpacked(frame, view[frame.start : frame.end])
            whole[frame.offset : frame.content_end] = part
        return memoryview(whole).toreadonly()

    def _compressor(self) -> zstandard.ZstdCompressor:
        made = _compressors.by_level
        if self.level not in made:
            made[self.level] = zstandard.ZstdCompressor(level=self.level, write_checksum=True)
        return made[self.level]


def unpacked(frame: Frame, packed: Buffer) -> bytes:
    """Return the content of one frame from its bytes; its checksum has to be right."""
    try:
        if frame.content_bytes:
            return zstandard.ZstdDecompressor().decompress(packed)
        # Of an empty frame's size zstandard would believe anything.
        reader = zstandard.ZstdDecompressor().decompressobj()
        if not reader.decompress(packed) and reader.eof:
            return b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"damaged: zstd frame cannot be read: {error}") from None
    raise DamagedError("damaged: zstd frame declares 0 bytes, and is not the frame of none")


def unpacked_start(packed: BinaryIO, count: int) -> bytes:
    """Return so many bytes from the start of a frame, without unpacking the rest of it.

    Nothing checks them: the checksum stands behind the whole.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, closefd=False) as stream:
            return stream.read(count)
    except zstandard.ZstdError as error:
        raise DamagedError(f"damaged: zstd frame cannot be read: {error}") from None


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoneCodec(), ZstdCodec())}


def codec_named(name: str) -> Codec:
    """Return the codec a plan asks for; UnsupportedError names the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise UnsupportedError(f"codec {name!r}; known: {', '.join(CODECS)}") from None


def codec_of(file_name: str) -> Codec:
    """Return the codec that a file's suffix names."""
    return CODECS["zstd"] if file_name.endswith(".zst") else CODECS["none"]

"""How a file's bytes are packed; a codec names itself in the file's suffix.

The only room that knows zstandard. `none` leaves the npy file as it is, `zstd` wraps it in one
plain zstd frame with its checksum, so that the `zstd` command gives the same bytes back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import zstandard

from rankdump.contract.errors import DamagedError, UnsupportedError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

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
            raise DamagedError(f"{len(data)} bytes, at most {limit_bytes} expected")
        return data


class _Compressors(threading.local):
    """A context keeps its window between frames, and must not serve two threads at once."""

    def __init__(self) -> None:
        self.by_level: dict[int, zstandard.ZstdCompressor] = {}


_compressors = _Compressors()


@dataclass(frozen=True, slots=True)
class ZstdCodec:
    """One zstd frame with content size and checksum."""

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
        """Return the frame's content, whose size it must declare, within the limit."""
        try:
            declared = zstandard.frame_content_size(data)
            if not 0 <= declared <= limit_bytes:
                raise DamagedError(
                    f"zstd frame declares {declared} bytes, at most {limit_bytes} expected"
                )
            return zstandard.ZstdDecompressor().decompress(data) if declared else _nothing(data)
        except zstandard.ZstdError as error:
            raise DamagedError(f"zstd frame cannot be read: {error}") from None

    def _compressor(self) -> zstandard.ZstdCompressor:
        made = _compressors.by_level
        if self.level not in made:
            made[self.level] = zstandard.ZstdCompressor(level=self.level, write_checksum=True)
        return made[self.level]


def _nothing(frame: Buffer) -> bytes:
    """Return what an empty frame holds; of its size of 0 zstandard would believe anything."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    if reader.decompress(frame) or not reader.eof:
        raise DamagedError("zstd frame declares 0 bytes, and is not the frame of none")
    return b""


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

"""Where everything in a `bin` file stands; no size in it is believed before it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rankdump.codec import codec_of
from rankdump.contract.dumpdata import DumpData, OpBuffer, OpInput, OpOutput, Workspace
from rankdump.contract.errors import DamagedError
from rankdump.dumpdata.message import from_bytes, to_bytes

LENGTH_BYTES = 8
LIMIT_BYTES = 64 << 30
"""Most a packed file may unpack to."""

Part = OpInput | OpOutput | OpBuffer | Workspace


@dataclass(frozen=True, slots=True)
class Payload:
    """One tensor, buffer or workspace, and where its bytes stand."""

    kind: str
    """`input`, `output`, `l1buffer` or `space`: the words of converted files' names."""
    index: int
    part: Part
    offset: int
    """From the start of the plain file."""

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.offset + self.part.size


@dataclass(frozen=True, slots=True)
class BinFile:
    """A whole file, its bytes as they lie in memory or on disk."""

    header: DumpData
    payloads: tuple[Payload, ...]
    data: memoryview

    def bytes_of(self, payload: Payload) -> memoryview:
        """Return the bytes of a payload."""
        return self.data[payload.offset : payload.end]


def head(header: DumpData) -> bytes:
    """Return the bytes in front of the payloads."""
    body = to_bytes(header)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def open_bin(path: Path) -> BinFile:
    """Read a file, packed or not; DamagedError says what is wrong with it."""
    try:
        data = codec_of(path.name).decode(path.read_bytes(), limit_bytes=LIMIT_BYTES)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None
    try:
        return parse(memoryview(data))
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None


def parse(data: memoryview) -> BinFile:
    """Return what stands where in a plain file; DamagedError when its lengths do not add up."""
    if len(data) <= LENGTH_BYTES:
        raise DamagedError(f"{len(data)} bytes are no bin file: the header's length alone takes 8")
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    first = LENGTH_BYTES + length
    if first > len(data):
        raise DamagedError(f"header of {length} bytes in a file of {len(data)}")
    header = from_bytes(data[LENGTH_BYTES:first])
    payloads: list[Payload] = []
    at = first
    for kind, index, part in _parts(header):
        payloads.append(Payload(kind, index, part, at))
        at += part.size
    if at > len(data):
        raise DamagedError(f"payloads of {at - first} bytes, {len(data) - first} are there")
    return BinFile(header, tuple(payloads), data)


def _parts(header: DumpData) -> Iterator[tuple[str, int, Part]]:
    groups = (
        ("input", header.input),
        ("output", header.output),
        ("l1buffer", header.buffer),
        ("space", header.space),
    )
    return chain.from_iterable(
        ((kind, index, part) for index, part in enumerate(parts)) for kind, parts in groups
    )

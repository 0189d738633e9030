"""Where everything in a `bin` file stands; no size in it is believed before it is checked."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rankdump.contract.dumpdata import DumpData, OpBuffer, OpInput, OpOutput, Workspace
from rankdump.contract.errors import DamagedError, EmptyFileError
from rankdump.dumpdata.message import from_bytes, to_bytes
from rankdump.dumpdata.source import Memory, Source, source_of, start_of

LENGTH_BYTES = 8

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
    """A file's header, and its payloads, which are read when they are asked for."""

    header: DumpData
    payloads: tuple[Payload, ...]
    """Inputs, outputs, buffers, workspaces: as they lie in the file."""
    source: Source
    path: Path | None = None
    """Where it was opened."""

    def bytes_of(self, payload: Payload) -> memoryview:
        """Return the bytes of a payload, unpacked; DamagedError when they cannot be read."""
        if not payload.part.size:
            return memoryview(b"")
        with _damage_named(self.path):
            return self.source.read(payload.offset, payload.end)


def head(header: DumpData) -> bytes:
    """Return the bytes in front of the payloads."""
    body = to_bytes(header)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def open_bin(path: Path) -> BinFile:
    """Open a file, packed or not; DamagedError says what is wrong with it.

    Reads the header and, in a packed file, where its frames begin. Payloads are read when asked
    for, each alone.
    """
    with _damage_named(path):
        return _parsed(source_of(path), path)


def open_header(path: Path) -> DumpData:
    """Read the header only: the first bytes, or the first frame of a packed file.

    The sizes in it are checked as `open_bin` checks them, but those of a packed file only against
    the most that the rest of it can hold.
    """
    with _damage_named(path):
        source = start_of(path)
        part = source.held < source.size
        if part and (source.held <= LENGTH_BYTES or source.held < _header_end(source)):
            source = source_of(path)
        return _parsed(source, path).header


def parse(data: memoryview) -> BinFile:
    """Return what stands where in a plain file; DamagedError when its lengths do not add up."""
    return _parsed(Memory(data), None)


def _parsed(source: Source, path: Path | None) -> BinFile:
    at = _header_end(source)
    header = from_bytes(source.read(LENGTH_BYTES, at))
    payloads: list[Payload] = []
    for kind, index, part in _parts(header):
        payloads.append(Payload(kind, index, part, at))
        at += part.size
        if at > source.size:
            raise DamagedError(
                f"damaged: by its header {kind} {index} of {part.size} bytes ends at byte {at}, "
                f"the file has {source.size}"
            )
    return BinFile(header, tuple(payloads), source, path)


def _header_end(source: Source) -> int:
    if source.size <= LENGTH_BYTES:
        raise EmptyFileError(f"empty: {source.size} bytes, the header's length alone takes 8")
    length = int.from_bytes(source.read(0, LENGTH_BYTES), "little")
    if LENGTH_BYTES + length > source.size:
        raise DamagedError(
            f"damaged, or no bin file: its first {LENGTH_BYTES} bytes say that a header of "
            f"{length} bytes follows, at most {source.size - LENGTH_BYTES} are there"
        )
    return LENGTH_BYTES + length


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


@contextmanager
def _damage_named(path: Path | None) -> Generator[None, None, None]:
    """Say of which file the damage is; a file that cannot be read is damage, too."""
    where = f"{path}: " if path else ""
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{where}cannot be read: {error.strerror}") from None
    except DamagedError as error:
        raise type(error)(f"{where}{error}") from None

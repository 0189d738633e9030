"""Raw files of freezes in the state folder of an agent: they keep the content of the rings until it
is in a tree.

A file is written under a hidden name, synced and renamed, so that an agent that is killed can write
the tree after its restart. The file has a header line, then pieces that are each preceded by their
length in four bytes: the record of the freeze, and for each of its ranks the request of the
session, a step without rows that has all kinds of tensors, and the steps, each followed by its full
tensors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from google.protobuf.message import DecodeError

from rankdump._core.black_box import StepState, StepTensor
from rankdump._core.freeze_record import FreezeRecord, format_freeze_record, parse_freeze_record
from rankdump._core.plan import MAX_TENSOR_BYTES
from rankdump._core.record import TensorKind
from rankdump._core.session_protocol import SessionRequest
from rankdump._wire.black_box_messages import (
    StepTensorAssembler,
    step_state_from_wire,
    step_state_to_wire,
    step_tensor_to_wire,
)
from rankdump._wire.session_messages import (
    kind_from_wire,
    session_request_from_wire,
    session_request_to_wire,
)
from rankdump.errors import CorruptedError, ProtocolError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.records import FileDescriptor
from rankdumpd.agent.storage.folders import LIST_FLAGS

RAW_SUFFIX = ".freeze"
DAMAGED_SUFFIX = ".damaged"
_MAGIC = b"rankdump freeze 1\n"
_LENGTH = struct.Struct("<I")
_FOLDER_MODE = 0o750


@dataclass(frozen=True, slots=True)
class FrozenRing:
    """The ring of one rank at the time of the freeze."""

    request: SessionRequest
    kinds: tuple[bytes, ...]
    steps: tuple[StepState, ...]
    tensors: Mapping[int, tuple[StepTensor, ...]] = field(
        default_factory=dict[int, tuple[StepTensor, ...]]
    )
    """Full tensors by the iteration of their step."""


class RawStep(NamedTuple):
    """A step with its full tensors, as read from a raw file."""

    state: StepState
    tensors: tuple[StepTensor, ...]


@dataclass(frozen=True, slots=True)
class RawRing:
    """The ring of one rank, as read from a raw file."""

    request: SessionRequest
    kinds: tuple[TensorKind, ...]
    steps: Iterator[RawStep]
    """Steps, which must be read to the end before the next ring is read."""


class RawFreezeFolder:
    """The folder of an agent's raw files; for one thread."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "blackbox"

    def write(
        self, record: FreezeRecord, rings: Iterable[FrozenRing], before: Path | None = None
    ) -> Path:
        """Write the raw file of a freeze, replacing the file `before` if it has one; return its
        path.

        `rings` are in the order of the ranks in the record.
        """
        self.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        # The name is random, because nothing in a record identifies a freeze among those of all
        # workers, and a worker adopts files of others.
        path = before or self.folder / f"{secrets.token_hex(8)}{RAW_SUFFIX}"
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(_MAGIC)
                for piece in _list_pieces(record, rings):
                    file.write(_LENGTH.pack(len(piece)))
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            self._sync()
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return path

    def list_files(self) -> list[Path]:
        """Return the raw files in the folder, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = self.folder.glob(f"*{RAW_SUFFIX}")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def remove_drafts(self) -> None:
        """Remove incomplete files of an agent that was killed."""
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)

    def adopt(self, path: Path) -> None:
        """Move a raw file here from another agent process with the same state folder."""
        self.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        path.replace(self.folder / path.name)
        self._sync()

    def remove(self, path: Path) -> None:
        """Remove a raw file whose tree is written."""
        path.unlink(missing_ok=True)
        self._sync()

    def set_aside(self, path: Path) -> Path:
        """Rename a file that cannot be read, so that it is not tried again; return its new path."""
        return path.replace(path.with_suffix(DAMAGED_SUFFIX))

    def _sync(self) -> None:
        folder = FileDescriptor(os.open(self.folder, LIST_FLAGS))
        os.fsync(folder.number)


def _list_pieces(record: FreezeRecord, rings: Iterable[FrozenRing]) -> Iterator[bytes]:
    yield format_freeze_record(record)
    for ring in rings:
        yield session_request_to_wire(ring.request).SerializeToString()
        yield agent_pb2.StepState(new_kinds=ring.kinds).SerializeToString()
        for state in ring.steps:
            message = step_state_to_wire(state, (), 0)
            tensors = ring.tensors.get(state.iteration, ())
            message.tensors = len(tensors)
            yield message.SerializeToString()
            for tensor in tensors:
                yield from (piece.SerializeToString() for piece in step_tensor_to_wire(tensor))


def read_raw_record(file: BinaryIO) -> FreezeRecord:
    """Read the record at the beginning of a raw file; CorruptedError when the file is damaged."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise CorruptedError("not a raw file of a freeze")
    return parse_freeze_record(_read_piece(file))


def read_raw_ring(file: BinaryIO, step_count: int) -> RawRing:
    """Return the next ring of a raw file, whose steps are read on demand; CorruptedError when the
    file is damaged.
    """
    with _explain_damage():
        request = session_request_from_wire(
            agent_pb2.OpenSessionRequest.FromString(_read_piece(file))
        )
        kinds = agent_pb2.StepState.FromString(_read_piece(file)).new_kinds
        known = tuple(map(kind_from_wire, kinds))
    return RawRing(request, known, _read_steps(file, step_count, len(known)))


def _read_steps(file: BinaryIO, count: int, known_kinds: int) -> Iterator[RawStep]:
    for _ in range(count):
        with _explain_damage():
            message = agent_pb2.StepState.FromString(_read_piece(file))
            state = step_state_from_wire(message, known_kinds)
            tensors = tuple(_read_tensor(file) for _ in range(message.tensors))
        yield RawStep(state, tensors)


def _read_tensor(file: BinaryIO) -> StepTensor:
    assembler = StepTensorAssembler(MAX_TENSOR_BYTES)
    while True:
        tensor = assembler.feed(agent_pb2.StepTensor.FromString(_read_piece(file)))
        if tensor is not None:
            return tensor


def _read_piece(file: BinaryIO) -> bytes:
    head = file.read(_LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    piece = file.read(max(0, length))
    if len(piece) != length:
        raise CorruptedError("a raw file of a freeze ends early")
    return piece


@contextlib.contextmanager
def _explain_damage() -> Generator[None]:
    try:
        yield
    except (DecodeError, ProtocolError) as error:
        raise CorruptedError(f"a raw file of a freeze is damaged: {error}") from None

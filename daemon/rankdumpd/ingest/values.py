"""What passes between the rooms of an ingest. Frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rankdump.codec import Buffer
from rankdump.contract.hold import FOLDER
from rankdumpd.agent.values import Stamp

STATE_FOLDER = FOLDER
"""Hidden folder of a tree that holds what an ingest remembers."""


class Kind(str, Enum):
    """What a file is taken as."""

    NPY = "npy"
    BIN = "bin"
    """CANN's, with all tensors of an operator."""
    PACKED = "packed"
    """Packed by whoever wrote it; copied as it is."""
    PLAIN = "plain"
    """Anything else, and all that may still be appended to; copied as it is."""

    @property
    def tensors(self) -> bool:
        """Whether its writer is done with it once it is closed."""
        return self is not Kind.PLAIN


class Why(str, Enum):
    """Why a file could not be taken now."""

    WRITTEN = "written"
    """Somebody has it open for writing, or changed it while it was read."""
    YOUNG = "young"
    """Nobody can tell whether it is still being written: it has to stay the same for a while."""
    GONE = "gone"
    DAMAGED = "damaged"
    FAILED = "failed"
    """It could not be read or written."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is wanted of an ingest."""

    source: Path
    tree: Path
    delete: bool = False
    """Tensors are removed from the source, each behind the commit of its copy."""
    clear: bool = False
    """At the end, so is all that may be appended to, and folders that are empty then."""
    codec: str = "zstd"
    threads: int = 1
    queue_bytes: int = 512 << 20
    """Bytes that are read and packed at once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that may be there for the taking."""

    path: str
    """Relative to the folder that is taken over, with `/`."""
    closed: bool = False
    """Its writer was seen closing it."""
    aged: bool = False
    """It has stayed the same for as long as one waits where nobody can tell."""


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a file, as a manifest will tell it."""

    name: str
    """Side and slot, `input.0`, in a file that holds several; else empty."""
    op_name: str
    """Raw where the file itself says it; else empty, and the file's name does."""
    dtype: str
    shape: tuple[int, ...]
    bytes_in: int
    digest: str


@dataclass(frozen=True, slots=True)
class Content:
    """What a file was found to hold."""

    kind: Kind
    digest: str
    """Of the whole file."""
    frames: Sequence[Buffer]
    """The file in the pieces that are packed each for itself."""
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """A file that stands in the tree."""

    path: str
    kind: Kind
    source: Stamp
    digest: str
    target: str
    """Relative to the tree."""
    stored: Stamp
    linked: bool
    """Stored as one more name of a file with the same bytes."""
    members: tuple[Member, ...]
    removed: bool = False
    """Its source was removed, behind the commit."""


@dataclass(frozen=True, slots=True)
class Left:
    """A file that was not taken."""

    path: str
    why: Why
    text: str = ""
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How an ingest stands; what this run did."""

    files: int = 0
    """Taken."""
    bytes_in: int = 0
    bytes_stored: int = 0
    linked: int = 0
    skipped: int = 0
    """Taken by an earlier run, or links that lead to files that are taken themselves."""
    failed: int = 0
    removed: int = 0
    """Sources that were removed."""
    found: int = 0
    """Files there were at the beginning; 0 where that is not the end of it."""

"""What a walk finds: tensor files, tables of statistics, and the tree as a whole. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankdump.codec import codec_of
from rankdump.contract.key import TensorKey
from rankdump.contract.manifest import Manifest, ManifestRecord


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor file."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    key: TensorKey
    """As the file's name says it; `op_name` below is the raw one where it is known."""
    stored_bytes: int
    record: ManifestRecord | None = None
    """What the manifest says; None for a file that no manifest names."""

    @property
    def path(self) -> Path:
        """Where the file stands."""
        return self.root / self.relative

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the root."""
        return self.relative.rpartition("/")[0]

    @property
    def codec(self) -> str:
        """Name of the codec that packed the file."""
        return codec_of(self.relative).name

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where a manifest knows it."""
        return self.record.op_type if self.record else self.key.op_type

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where a manifest knows it."""
        return self.record.op_name if self.record else self.key.op_name

    @property
    def taken_bytes(self) -> int:
        """Room the file takes; by the manifests, a link to identical bytes takes none."""
        return self.record.bytes_stored if self.record else self.stored_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """One `statistic.csv`."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    rank: int
    net_name: str
    graph: int
    iteration: int
    """0 for the table of a graph's constants, which belong to none."""
    constant: bool = False

    @property
    def when(self) -> int | None:
        """Iteration of its rows; None for constants."""
        return None if self.constant else self.iteration

    @property
    def path(self) -> Path:
        """Where the file stands."""
        return self.root / self.relative

    @property
    def folder(self) -> str:
        """Folder of the file, relative to the root."""
        return self.relative.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything a walk found."""

    root: Path
    ranks: tuple[int, ...]
    """Ranks that have a folder, with or without tensors."""
    entries: tuple[Entry, ...]
    """Sorted by rank, iteration and time; the constants of a rank stand first."""
    manifests: tuple[Manifest, ...]
    tables: tuple[Table, ...] = ()
    """Sorted by rank and iteration; those of constants stand first."""
    foreign: int = 0
    """Files among the tensors that are none; half-written hidden ones are not counted."""
    problems: tuple[str, ...] = ()
    """What could not be read, or is not there although a manifest names it."""

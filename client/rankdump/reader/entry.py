"""What a walk finds: tensors, tables of statistics, and the tree as a whole. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankdump.codec import codec_of
from rankdump.contract.key import TensorKey
from rankdump.contract.layout.file_name import FileName
from rankdump.contract.manifest import Manifest, ManifestRecord
from rankdump.contract.retired import Retired

if TYPE_CHECKING:
    from rankdump.reader.columns import Entries


@dataclass(frozen=True, slots=True)
class Described:
    """What the header of a bin file says of one of its tensors."""

    op_name: str
    """Full scope name, raw."""
    dtype: str
    shape: tuple[int, ...]
    """As it lay on the device."""
    tensor_format: str
    """Of that shape."""
    original_shape: tuple[int, ...]
    """In the format that the operator itself speaks; empty where the header does not say it."""
    data_bytes: int
    groups: int = 0
    """Of a grouped convolution."""
    c0: int = 0
    """Elements of a block of the format, where its number says it."""


class Entry(NamedTuple):
    """One tensor: a file, or a member of a bin file."""

    root: Path
    relative: str
    """Path of the file below the root, with `/`."""
    key: TensorKey
    """As the file's name says it; `op_name` below is the raw one where it is known.

    The rank is the device's number where no rank folder and no manifest says better.
    """
    stored_bytes: int
    """Size of the file, or the share of a member in it."""
    record: ManifestRecord | None = None
    """What the manifest says; None for a file that no manifest names."""
    member: str = ""
    """Which tensor of a bin file, `input.0`; empty where the file is the tensor."""
    described: Described | None = None
    """What the header says; None where a manifest said enough to leave the file unopened."""

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
        """Scope name of the operator, raw where a manifest or the file itself knows it."""
        if self.record is not None:
            return self.record.op_name
        raw = self.described.op_name if self.described is not None else ""
        return raw or self.key.op_name

    @property
    def bytes_in(self) -> int | None:
        """Bytes of the elements as the framework held them; None where only the file knows."""
        if self.record is not None:
            return self.record.bytes_in
        return self.described.data_bytes if self.described is not None else None

    @property
    def taken_bytes(self) -> int:
        """Room the file takes; by the manifests, a link to identical bytes takes none."""
        return self.record.bytes_stored if self.record else self.stored_bytes


@dataclass(frozen=True, slots=True)
class Table:
    """One `statistic.csv`, the table of one operator, or the info file of a dump of APIs."""

    root: Path
    relative: str
    """Path below the root, with `/`."""
    rank: int
    net_name: str
    graph: int
    iteration: int
    """0 for the table of a graph's constants, which belong to none."""
    constant: bool = False
    dated: bool = True
    """Without this the folder does not say the iteration, but perhaps a manifest of each row."""
    operator: FileName | None = None
    """The operator whose table it is; None for those of a whole folder."""
    info: bool = False
    """The info file of a dump of APIs: rows of every iteration, and of tensors with a file."""

    @property
    def stored_bytes(self) -> int:
        """Size of the file; 0 when it is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

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
    """What a walk found."""

    root: Path
    ranks: tuple[int, ...]
    """Ranks that have a folder, with or without tensors; devices where there are no ranks."""
    entries: Entries
    """Sorted by rank, iteration and time; the constants of a rank stand first."""
    manifests: tuple[Manifest, ...]
    """Without their records: those of files are the entries'."""
    tables: tuple[Table, ...] = ()
    """Sorted by rank, iteration and time; those of constants stand first."""
    foreign: int = 0
    """Files among the tensors that are none; half-written hidden ones are not counted."""
    problems: tuple[str, ...] = ()
    """What could not be read, or is not there although a manifest names it."""
    by_device: bool = False
    """The ranks are the numbers of devices: no folder of a rank is there."""
    retired: frozenset[Retired] = frozenset()
    """What was removed on purpose, of ranks that have a folder."""
    whole: bool = True
    """Without this only some ranks, graphs or iterations were asked for, and only those read."""
    job_id: str = ""
    """Of this job only, of several; what its manifests do not name is left out of tables too."""

    @property
    def gone(self) -> set[tuple[int, int]]:
        """Ranks with iterations that were removed, and did not come again."""
        there = {(m.status.rank, m.status.iteration) for m in self.manifests}
        return {(each.rank, each.iteration) for each in self.retired} - there

    @property
    def unit(self) -> str:
        """What the numbers of `ranks` count."""
        return "device" if self.by_device else "rank"

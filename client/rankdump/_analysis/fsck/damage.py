"""Values of a check: entries of a tree, expected content of files, damage and the report. Pure: no
disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankdump._core.manifest import Manifest, ManifestRecord
from rankdump._layout.dump_folders import DumpFolder


class DamageKind(str, Enum):
    """Kind of damage to a file; reports show the value."""

    TORN = "torn"
    MISSING = "missing"
    FOREIGN = "foreign"
    DUPLICATE = "duplicate"
    LEFTOVER = "leftover"
    UNMANIFESTED = "unmanifested"
    UNBALANCED = "unbalanced"
    MANIFEST = "manifest"


DAMAGE_ADVICE: Mapping[DamageKind, str] = {
    DamageKind.TORN: "the content is not reliable: restore the file from a copy of the tree, or "
    "dump the iteration again",
    DamageKind.MISSING: "restore the file from a copy of the tree, or dump the iteration again",
    DamageKind.FOREIGN: "the file does not belong to a dump: move it out of the tree",
    DamageKind.DUPLICATE: "--repair removes a tensor that its operator's file contains as well; "
    "otherwise keep the file that the manifest names",
    DamageKind.LEFTOVER: "--repair removes the file",
    DamageKind.UNMANIFESTED: "no manifest confirms the content: the iteration did not complete, "
    "or its manifest is missing",
    DamageKind.UNBALANCED: "tensors of the iteration are lost and not counted: report this as a "
    "bug",
    DamageKind.MANIFEST: "restore the file from a copy of the tree: without it, the tensors can "
    "be read but not checked",
}
"""Advice for each kind of damage."""


@dataclass(frozen=True, slots=True)
class FileDamage:
    """Damage to one file."""

    kind: DamageKind
    path: str
    """Path relative to the root of the tree."""
    text: str
    mendable: bool = False
    """Whether the damaged file can be removed without losing a tensor."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check."""

    looked_at: int = 0
    """Number of files found in the tree."""
    manifests: int = 0
    files: int = 0
    """Number of files that manifests name and that were read completely; hard links count once."""
    names: int = 0
    """Number of names that these files have in the tree."""
    bytes_read: int = 0
    digests: int = 0
    """Number of tensors whose elements have the digest that their manifest names."""
    damages: tuple[FileDamage, ...] = ()
    mended: tuple[FileDamage, ...] = ()
    unchecked: tuple[str, ...] = ()
    """One sentence for everything that could not be checked."""
    retired: tuple[str, ...] = ()
    """Sentences about retired iterations, whose files do not count as missing."""
    table: tuple[str, ...] = ()
    """Sentences about the table of statistics: what it lacks, or why it was not checked."""

    @property
    def is_verifiable(self) -> bool:
        """Whether the tree has manifests to check against, or all of its iterations are retired."""
        return bool(self.manifests or self.retired)


@dataclass(frozen=True, slots=True)
class TreeItem:
    """A file, link or other entry in a folder of the tree."""

    path: str
    """Path relative to the root of the tree."""
    is_regular: bool
    is_link: bool
    size_bytes: int = 0
    inode: tuple[int, int] = (0, 0)
    """Device and inode number."""
    folder: DumpFolder | None = None
    """The dump folder that contains it; None in a folder without dumped files."""
    full_name: str = ""
    """The full name if the name is shortened, else the name itself."""

    @property
    def folder_path(self) -> str:
        """Path of the folder that contains it."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Name on disk."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest with the file that it was read from."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class FileCheck:
    """One file with all of its names and its expected content."""

    paths: tuple[str, ...]
    records: tuple[ManifestRecord, ...]
    """The tensors in the file, as the manifest for one of its names lists them."""
    stored_bytes: int
    """Size according to the manifests; 0 for a link to another file with the same bytes."""
    size_bytes: int
    agent_wrote: bool
    """Whether an agent wrote the file; if so, every byte of its format is known."""

    @property
    def plain_bytes(self) -> int:
        """Number of bytes of the elements, without headers."""
        return sum(record.bytes_in for record in self.records)


@dataclass(frozen=True, slots=True)
class FileCheckResult:
    """Result of the check of one file."""

    job: FileCheck
    damage_text: str = ""
    digests: int = 0
    undecided: int = 0
    """Number of tensors that have no digest, or whose NaN codes were lost in a wider type."""

"""The manifests of a tree, and what they say of a file, of a row and of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import Folder, folder_at
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER
from rankdump.contract.manifest import Manifest, ManifestRecord
from rankdump.contract.status import IterationStatus

Said: TypeAlias = "tuple[IterationStatus, ManifestRecord]"
"""The balance of an iteration, and one tensor of it."""


class Manifested:
    """What manifests say, found by the path of a file; remembers what nobody asked for."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self._files: defaultdict[str, dict[str, Said]] = defaultdict(dict)
        self._bases: defaultdict[str, set[int]] = defaultdict(set)
        self._devices: defaultdict[int, set[int]] = defaultdict(set)
        for manifest in manifests:
            status = manifest.status
            self._devices[manifest.device].add(status.rank)
            parents: set[str] = set()
            for record in manifest.records:
                path = record.path
                # A record without a path is a row of a table: there is no file to miss.
                if path:
                    self._files[path][record.member] = status, record
                    parents.add(path.rpartition("/")[0])
            for parent in parents:
                self._bases[_base_of(parent)].add(status.rank)
        self._asked: set[str] = set()

    def of(self, path: str) -> dict[str, Said]:
        """Return what is said of a file: by member, or under no name of a whole file."""
        self._asked.add(path)
        return self._files.get(path, {})

    def rank_of(self, folder: Folder) -> int:
        """Return the rank whose files are in a folder: of a device, the one it has here."""
        if not folder.device:
            return folder.rank
        ranks = self._bases.get(folder.base) or self._devices.get(folder.rank) or {folder.rank}
        return next(iter(ranks)) if len(ranks) == 1 else folder.rank

    @property
    def known(self) -> bool:
        """Whether there is any manifest."""
        return bool(self._devices)

    @property
    def missed(self) -> list[str]:
        """Paths that nobody asked for: their files are not there."""
        return [path for path in self._files if path not in self._asked]


def read_manifests(
    root: Path, ranks: Iterable[str], problems: list[str], *, pattern: str = "*.json"
) -> list[Manifest]:
    """Return the manifests of the folders of ranks; what cannot be read is a problem."""
    found: list[Manifest] = []
    for rank in ranks:
        for path in sorted((root / rank / MANIFEST_FOLDER).glob(pattern)):
            if not path.name.startswith("."):
                try:
                    found.append(Manifest.from_json(path.read_bytes()))
                except OSError as error:
                    problems.append(f"{path}: cannot be read: {error.strerror}")
                except DamagedError as error:
                    problems.append(f"{path}: {error}")
    return found


def _base_of(parent: str) -> str:
    folder = folder_at(parent)
    return folder.base if folder is not None else ""

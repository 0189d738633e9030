"""The manifests of a tree, and what they say of a file, of a row and of a device."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.file_name import NUMBER
from rankdump.contract.layout.folders import Folder, folder_at
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER
from rankdump.contract.manifest import Manifest, ManifestRecord
from rankdump.contract.status import IterationStatus

Said: TypeAlias = "tuple[IterationStatus, ManifestRecord]"
"""The balance of an iteration, and one tensor of it."""
_NAME = re.compile(rf"iteration_({NUMBER})\.(.*)\.json", re.S)


class Manifested:
    """What manifests say, found by the path of a file; remembers what nobody asked for."""

    def __init__(self, manifests: Iterable[Manifest] = ()) -> None:
        self._files: defaultdict[str, dict[str, Said]] = defaultdict(dict)
        self._bases: defaultdict[str, set[int]] = defaultdict(set)
        self._devices: defaultdict[int, set[int]] = defaultdict(set)
        self._asked: set[str] = set()
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        """Remember what one more says."""
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

    def names(self, path: str) -> bool:
        """Return whether anything is said of a file."""
        return path in self._files

    def constants_of(self, other: Manifested) -> None:
        """Take over what another one says of constants, which may be those of any iteration."""
        for path in other.missed:
            if _is_constant(path):
                other._asked.add(path)
                self._files[path] |= other._files[path]

    @property
    def missed(self) -> list[str]:
        """Paths that nobody asked for: their files are not there."""
        return [path for path in self._files if path not in self._asked]


def ranks_with_manifests(root: Path) -> list[str]:
    """Return the folders of ranks that have a folder for manifests."""
    return sorted(path.parents[1].name for path in root.glob(f"rank*/{MANIFEST_FOLDER}"))


class ManifestFile(NamedTuple):
    """A manifest by its name."""

    path: Path
    iteration: int | None
    """None where the name does not say it."""
    session: tuple[str, str]
    """Folder of the rank, and what the name says of the session; where it does not, the name."""


def manifest_files(root: Path, rank: str, problems: list[str]) -> list[ManifestFile]:
    """Return the manifests of the folder of a rank, by iteration."""
    folder = root / rank / MANIFEST_FOLDER
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder}: cannot be read: {error.strerror}")
        return []
    found = [
        ManifestFile(folder / name, int(said[1]), (rank, said[2]))
        if (said := _NAME.fullmatch(name))
        else ManifestFile(folder / name, None, (rank, name))
        for name in names
        if name.endswith(".json") and not name.startswith(".")
    ]
    return sorted(found, key=lambda file: (file.iteration is not None, file.iteration, file.path))


def read_manifests(
    files: Iterable[ManifestFile], problems: list[str], *, balances_only: bool = False
) -> Iterator[Manifest]:
    """Yield manifests one after the other; what cannot be read is a problem.

    With `balances_only` they have no records, and these are not read.
    """
    for path, *_ in files:
        try:
            with path.open("rb") as file:
                head = Manifest.head(file.readline()) if balances_only else None
                yield head or Manifest.from_json(path.read_bytes())
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
        except DamagedError as error:
            problems.append(f"{path}: {error}")


def _base_of(parent: str) -> str:
    folder = folder_at(parent)
    return folder.base if folder is not None else ""


def _is_constant(path: str) -> bool:
    folder = folder_at(path.rpartition("/")[0])
    return folder is not None and folder.constant

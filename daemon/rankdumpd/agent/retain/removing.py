"""Removes one rank's part of an iteration from its tree, in steps that may be taken twice.

Its line is in the tree before its manifest is hidden, and the hidden manifest, which names the
files, goes after them: whatever step is the last one of a process, the next finds what is left.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.file_name import FileKind
from rankdump.contract.layout.folders import folder_at
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.contract.layout.place import MAPPING_FILE, Stand
from rankdump.contract.layout.reading import file_in
from rankdump.contract.manifest import Manifest, manifest_name
from rankdump.contract.retired import RETIRED_FILE, Retired
from rankdumpd.agent.tree import Tree

FILES_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be removed, and where."""

    tree: Tree
    layout: Layout
    stand: Stand
    retired: Retired

    @property
    def rank_folder(self) -> str:
        """Folder of what is written of the rank beside its tensors."""
        return self.layout.rank_folder(self.retired.rank)

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return manifest_name(self.retired.iteration, self.retired.session_id)

    @property
    def hidden(self) -> str:
        """Name of its manifest while files are removed: no reader takes it for one."""
        return f".{self.manifest}"


def files_of(part: Part) -> list[str]:
    """Return the paths of its tensors' files; none when its manifest is gone.

    OSError and DamagedError when the manifest cannot be read.
    """
    for name in (part.manifest, part.hidden):
        with suppress(FileNotFoundError):
            data = (part.tree.root / part.rank_folder / MANIFEST_FOLDER / name).read_bytes()
            named = (record.path for record in Manifest.from_json(data).records)
            return list(dict.fromkeys(filter(None, named)))
    return []


def room_of(parts: Iterable[tuple[Path, Sequence[str]]]) -> list[int]:
    """Return the bytes that removing the files of each part frees, when all parts go.

    A file that has other names too frees nothing.
    """
    left: Counter[tuple[int, int]] = Counter()
    freed: list[int] = []
    for root, paths in parts:
        freed.append(0)
        for path in paths:
            with suppress(OSError):
                facts = os.lstat(root / path)
                which = (facts.st_dev, facts.st_ino)
                left[which] += 1
                if left[which] == facts.st_nlink:
                    freed[-1] += facts.st_size
    return freed


def remove(part: Part, *, shared: bool) -> Iterator[None]:
    """Remove it step by step; `shared` where somebody else may write to the same folders.

    OSError leaves the rest to another time.
    """
    paths = files_of(part)
    tree, manifests = part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}"
    line = part.retired.to_line()
    tree.append_lines(f"{part.rank_folder}/{METADATA_FOLDER}", RETIRED_FILE, (line,))
    yield
    if tree.has(manifests, part.manifest):
        tree.move(f"{manifests}/{part.manifest}", part.hidden)
    yield
    for start in range(0, len(paths), FILES_AT_ONCE):
        tree.remove(paths[start : start + FILES_AT_ONCE])
        yield
    if not shared and not _others(part):
        for folder in own_folders(part):
            _clear(part, folder)
            yield
    tree.remove((f"{manifests}/{part.hidden}",))
    yield


def own_folders(part: Part) -> list[str]:
    """Return the folders that hold this iteration of the rank and nothing else."""
    pattern, _ = _pattern(part)
    found = [""] if pattern else []
    for name in pattern:
        found = [below for folder in found for below in _below(part.tree.root, folder, name)]
    return found


def _pattern(part: Part) -> tuple[list[str | None], int]:
    """Return the names on the way to the iteration's folders, None for any, and how many stay.

    No names where tensors of several iterations are in one folder.
    """
    rank, iteration = part.retired.rank, part.retired.iteration

    def way(net_name: str, graph: int, iteration: int) -> list[str]:
        folder = part.layout.folder_of(
            part.stand,
            rank=rank,
            net_name=net_name,
            graph=graph,
            iteration=iteration,
            constant=False,
        )
        return folder.split("/")

    own, other, next_one = (
        way("a", 1, iteration),
        way("b", 2, iteration),
        way("a", 1, iteration + 1),
    )
    if own == next_one:
        return [], 0
    stay = next(at for at, names in enumerate(zip(own, next_one, strict=True)) if len({*names}) > 1)
    return [a if a == b else None for a, b in zip(own, other, strict=True)], stay


def _below(root: Path, folder: str, name: str | None) -> list[str]:
    where = f"{folder}/" if folder else ""
    try:
        with os.scandir(root / folder) as items:
            return [
                f"{where}{item.name}"
                for item in items
                if name in (None, item.name)
                and not item.name.startswith(".")
                and item.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _others(part: Part) -> bool:
    """Return whether another session has this iteration of the rank as well."""
    manifests = part.tree.root / part.rank_folder / MANIFEST_FOLDER
    return any(manifests.glob(f"iteration_{part.retired.iteration}.*.json"))


def _clear(part: Part, folder: str) -> None:
    """Remove a folder with the tables in it; it stays where anything else is in it."""
    root = part.tree.root
    with os.scandir(root / folder) as items:
        names = sorted(item.name for item in items)
    if not all(_is_table(folder, name) for name in names):
        return
    # Names that were too long are found until nothing is left that has one.
    part.tree.remove(f"{folder}/{name}" for name in names if name != MAPPING_FILE)
    part.tree.remove(f"{folder}/{name}" for name in names if name == MAPPING_FILE)
    _, stay = _pattern(part)
    while folder.count("/") >= stay:
        try:
            (root / folder).rmdir()
        except OSError:
            return
        folder = folder.rpartition("/")[0]


def _is_table(path: str, name: str) -> bool:
    if name == MAPPING_FILE or statistic_csv.TABLE.fullmatch(name):
        return True
    folder = folder_at(path)
    says = file_in(folder, name) if folder is not None else None
    return says is not None and says.kind is FileKind.TABLE

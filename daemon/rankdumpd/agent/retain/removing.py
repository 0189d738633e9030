"""Removes one rank's part of an iteration from its tree, in steps that may be taken twice.

Its line is in the tree before its manifest is hidden, and the hidden manifest, which names the
files, goes after them: whatever step is the last one of a process, the next finds what is left.
Everything is done by descriptors of folders: what a link leads to is not of the tree, and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.file_name import FileKind
from rankdump.contract.layout.folders import folder_at
from rankdump.contract.layout.layouts import Layout
from rankdump.contract.layout.mindspore_sync import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.contract.layout.place import MAPPING_FILE, Stand
from rankdump.contract.layout.reading import file_in
from rankdump.contract.manifest import Manifest, manifest_name
from rankdump.contract.retired import RETIRED_FILE, Retired
from rankdumpd.agent.folders import OutsideRootError
from rankdumpd.agent.holds import Hold
from rankdumpd.agent.tree import Tree

FILES_AT_ONCE = 512
_NOT_THERE = (FileNotFoundError, NotADirectoryError, OutsideRootError)
"""What is said of a folder that is not in the tree, or no longer."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be removed, and where."""

    tree: Tree
    hold: Hold
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
            data = part.tree.read(f"{part.rank_folder}/{MANIFEST_FOLDER}", name)
            named = (record.path for record in Manifest.from_json(data).records)
            return list(dict.fromkeys(filter(None, named)))
    return []


def room_of(parts: Iterable[tuple[Tree, Sequence[str]]]) -> list[int]:
    """Return the bytes that removing the files of each part frees, when all parts go.

    A file that has other names too frees nothing.
    """
    left: Counter[tuple[int, int]] = Counter()
    freed: list[int] = []
    for tree, paths in parts:
        freed.append(0)
        for path in paths:
            with suppress(OSError):
                facts = tree.facts(path)
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
        _remove_files(tree, paths[start : start + FILES_AT_ONCE])
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
        found = [below for folder in found for below in _below(part.tree, folder, name)]
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


def _below(tree: Tree, folder: str, name: str | None) -> list[str]:
    where = f"{folder}/" if folder else ""
    return [
        f"{where}{each}"
        for each, is_folder in _listing(tree, folder).items()
        if is_folder and name in (None, each) and not each.startswith(".")
    ]


def _listing(tree: Tree, folder: str) -> dict[str, bool]:
    """Return what is in a folder of the tree; nothing where there is none, or a link."""
    with suppress(*_NOT_THERE):
        return tree.listing(folder)
    return {}


def _remove_files(tree: Tree, paths: Sequence[str]) -> None:
    """Remove files; those whose folder leads out of the tree by now are not of it."""
    for _, some in groupby(paths, key=lambda path: path.rpartition("/")[0]):
        with suppress(*_NOT_THERE):
            tree.remove(some)


def _others(part: Part) -> bool:
    """Return whether another session has this iteration of the rank as well."""
    begins = f"iteration_{part.retired.iteration}."
    names = _listing(part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}")
    return any(name.startswith(begins) and name.endswith(".json") for name in names)


def _clear(part: Part, folder: str) -> None:
    """Remove a folder with the tables in it; it stays where anything else is in it."""
    names = _listing(part.tree, folder)
    if not all(_is_table(folder, name) for name in names):
        return
    # Names that were too long are found until nothing is left that has one.
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name != MAPPING_FILE])
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name == MAPPING_FILE])
    _, stay = _pattern(part)
    while folder.count("/") >= stay:
        try:
            part.tree.remove_folder(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]


def _is_table(path: str, name: str) -> bool:
    if name == MAPPING_FILE or statistic_csv.TABLE.fullmatch(name):
        return True
    folder = folder_at(path)
    says = file_in(folder, name) if folder is not None else None
    return says is not None and says.kind is FileKind.TABLE

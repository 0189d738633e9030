"""Removal of one rank's part of an iteration from its tree, in steps that may be repeated.

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

from rankdump._core.manifest import RETIRED_FILE, Manifest, RetiredIteration, make_manifest_name
from rankdump._layout import statistic_tables
from rankdump._layout.dump_folders import find_folder, parse_name_in_folder
from rankdump._layout.file_name import FileKind
from rankdump._layout.tree_layouts import Layout
from rankdump._layout.tree_paths import MANIFEST_FOLDER, MAPPING_FILE, METADATA_FOLDER, TreeContext
from rankdumpd.agent.storage.folders import OutsideRootError
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.agent.storage.tree_lock import TreeLock

MAX_BATCH_FILES = 512
_ABSENT_ERRORS = (FileNotFoundError, NotADirectoryError, OutsideRootError)
"""What is said of a folder that is not in the tree, or no longer."""


@dataclass(frozen=True, slots=True)
class IterationPart:
    """What is to be removed, and where."""

    tree: DumpTree
    lock: TreeLock
    layout: Layout
    context: TreeContext
    retired: RetiredIteration

    @property
    def rank_folder(self) -> str:
        """Folder of what is written of the rank beside its tensors."""
        return self.layout.rank_folder(self.retired.rank)

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return make_manifest_name(self.retired.iteration, self.retired.session_id)

    @property
    def hidden(self) -> str:
        """Name of its manifest while files are removed: no reader takes it for one."""
        return f".{self.manifest}"


def list_tensor_files(part: IterationPart) -> list[str]:
    """Return the paths of its tensors' files; none when its manifest is gone.

    OSError and CorruptedError when the manifest cannot be read.
    """
    for name in (part.manifest, part.hidden):
        with suppress(FileNotFoundError):
            data = part.tree.read(f"{part.rank_folder}/{MANIFEST_FOLDER}", name)
            named = (record.path for record in Manifest.from_json(data).records)
            return list(dict.fromkeys(filter(None, named)))
    return []


def compute_freed_bytes(parts: Iterable[tuple[DumpTree, Sequence[str]]]) -> list[int]:
    """Return the bytes that removing the files of each part frees, when all parts go.

    A file that has other names too frees nothing.
    """
    left: Counter[tuple[int, int]] = Counter()
    freed: list[int] = []
    for tree, paths in parts:
        freed.append(0)
        for path in paths:
            with suppress(OSError):
                status = tree.stat(path)
                which = (status.st_dev, status.st_ino)
                left[which] += 1
                if left[which] == status.st_nlink:
                    freed[-1] += status.st_size
    return freed


def remove_part(part: IterationPart, *, shared: bool) -> Iterator[None]:
    """Remove it step by step; `shared` where somebody else may write to the same folders.

    OSError leaves the rest to another time.
    """
    paths = list_tensor_files(part)
    tree, manifests = part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}"
    line = part.retired.to_line()
    tree.append_lines(f"{part.rank_folder}/{METADATA_FOLDER}", RETIRED_FILE, (line,))
    yield
    if tree.has(manifests, part.manifest):
        tree.move(f"{manifests}/{part.manifest}", part.hidden)
    yield
    for start in range(0, len(paths), MAX_BATCH_FILES):
        _remove_files(tree, paths[start : start + MAX_BATCH_FILES])
        yield
    if not shared and not _has_other_sessions(part):
        for folder in list_own_folders(part):
            _remove_tables(part, folder)
            yield
    tree.remove((f"{manifests}/{part.hidden}",))
    yield


def list_own_folders(part: IterationPart) -> list[str]:
    """Return the folders that hold this iteration of the rank and nothing else."""
    pattern, _ = _make_pattern(part)
    found = [""] if pattern else []
    for name in pattern:
        found = [below for folder in found for below in _list_below(part.tree, folder, name)]
    return found


def _make_pattern(part: IterationPart) -> tuple[list[str | None], int]:
    """Return the names on the way to the iteration's folders, None for any, and how many stay.

    No names where tensors of several iterations are in one folder.
    """
    rank, iteration = part.retired.rank, part.retired.iteration

    def way(net_name: str, graph: int, iteration: int) -> list[str]:
        folder = part.layout.make_folder(
            part.context,
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


def _list_below(tree: DumpTree, folder: str, name: str | None) -> list[str]:
    where = f"{folder}/" if folder else ""
    return [
        f"{where}{each}"
        for each, is_folder in _list_folder(tree, folder).items()
        if is_folder and name in (None, each) and not each.startswith(".")
    ]


def _list_folder(tree: DumpTree, folder: str) -> dict[str, bool]:
    """Return what is in a folder of the tree; nothing where there is none, or a link."""
    with suppress(*_ABSENT_ERRORS):
        return tree.listing(folder)
    return {}


def _remove_files(tree: DumpTree, paths: Sequence[str]) -> None:
    """Remove files; those whose folder leads out of the tree by now are not of it."""
    for _, some in groupby(paths, key=lambda path: path.rpartition("/")[0]):
        with suppress(*_ABSENT_ERRORS):
            tree.remove(some)


def _has_other_sessions(part: IterationPart) -> bool:
    """Return whether another session has this iteration of the rank as well."""
    begins = f"iteration_{part.retired.iteration}."
    names = _list_folder(part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}")
    return any(name.startswith(begins) and name.endswith(".json") for name in names)


def _remove_tables(part: IterationPart, folder: str) -> None:
    """Remove a folder with the tables in it; it stays where anything else is in it."""
    names = _list_folder(part.tree, folder)
    if not all(_is_table(folder, name) for name in names):
        return
    # Names that were too long are found until nothing is left that has one.
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name != MAPPING_FILE])
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name == MAPPING_FILE])
    _, stay = _make_pattern(part)
    while folder.count("/") >= stay:
        try:
            part.tree.remove_folder(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]


def _is_table(path: str, name: str) -> bool:
    if name == MAPPING_FILE or statistic_tables.STATISTIC_TABLE_NAME.fullmatch(name):
        return True
    folder = find_folder(path)
    says = parse_name_in_folder(folder, name) if folder is not None else None
    return says is not None and says.kind is FileKind.TABLE

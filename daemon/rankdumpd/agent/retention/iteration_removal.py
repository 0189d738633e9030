"""Removal of one rank's part of an iteration from its tree, in steps that may be repeated.

The line about the removal is written before the manifest is hidden, and the hidden manifest, which
lists the files, is removed after them: whatever the last step of a process was, the next process
can finish the removal. All access is through descriptors of folders: targets of links are outside
the tree and stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from rankdump._core.manifest import (
    RETIRED_FILE,
    Manifest,
    RetiredIteration,
    make_fingerprint_name,
    make_manifest_name,
)
from rankdump._layout import statistic_tables
from rankdump._layout.dump_folders import find_folder, parse_name_in_folder
from rankdump._layout.file_name import FileKind
from rankdump._layout.tree_layouts import GraphPlace
from rankdump._layout.tree_paths import (
    FINGERPRINT_FOLDER,
    MANIFEST_FOLDER,
    MAPPING_FILE,
    METADATA_FOLDER,
)
from rankdumpd.agent.storage.folders import ABSENT_ERRORS
from rankdumpd.agent.storage.session_storage import SessionStorage
from rankdumpd.agent.storage.tree import DumpTree

MAX_BATCH_FILES = 512


@dataclass(frozen=True, slots=True)
class IterationPart:
    """One rank's part of an iteration, with its place in a tree."""

    storage: SessionStorage
    retired: RetiredIteration

    @property
    def tree(self) -> DumpTree:
        """Its tree."""
        return self.storage.tree

    @property
    def rank_folder(self) -> str:
        """Folder of the rank's metadata."""
        return self.storage.layout.rank_folder(self.retired.rank)

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return make_manifest_name(self.retired.iteration, self.retired.session_id)

    @property
    def hidden(self) -> str:
        """Name of its manifest while files are removed: readers ignore it."""
        return f".{self.manifest}"


def list_tensor_files(part: IterationPart) -> list[str]:
    """Return the paths of its tensors' files; none when its manifest is removed.

    OSError and CorruptedError when the manifest cannot be read.
    """
    for name in (part.manifest, part.hidden):
        with suppress(FileNotFoundError):
            data = part.tree.read(f"{part.rank_folder}/{MANIFEST_FOLDER}", name)
            records = Manifest.from_json(data).records
            named = (record.path for record in records if not record.same_as)
            return list(dict.fromkeys(filter(None, named)))
    return []


def compute_freed_bytes(parts: Iterable[tuple[DumpTree, Sequence[str]]]) -> list[int]:
    """Return the bytes that the files of each part free when all parts are removed.

    A file with other links frees nothing.
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
    """Remove a part step by step; `shared` when another job may write to the same folders.

    After an OSError the rest can be removed later.
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
    fingerprints = f"{part.rank_folder}/{FINGERPRINT_FOLDER}"
    _remove_files(tree, [f"{fingerprints}/{make_fingerprint_name(part.manifest)}"])
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
    """Return the path components of the iteration's folders, None for any, and how many stay.

    No components where tensors of several iterations are in one folder.
    """
    rank, iteration = part.retired.rank, part.retired.iteration

    def split_path(net_name: str, graph: int, iteration: int) -> list[str]:
        place = GraphPlace(rank, net_name, graph, iteration)
        return part.storage.layout.make_folder(part.storage.context, place).split("/")

    own, other, next_one = (
        split_path("a", 1, iteration),
        split_path("b", 2, iteration),
        split_path("a", 1, iteration + 1),
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
    """Return the items of a folder of the tree; none when it does not exist or is a link."""
    with suppress(*ABSENT_ERRORS):
        return tree.listing(folder)
    return {}


def _remove_files(tree: DumpTree, paths: Sequence[str]) -> None:
    """Remove files, except those whose folder was replaced by a link out of the tree."""
    for _, some in groupby(paths, key=lambda path: path.rpartition("/")[0]):
        with suppress(*ABSENT_ERRORS):
            tree.remove(some)


def _has_other_sessions(part: IterationPart) -> bool:
    """Return whether another session has this iteration of the rank as well."""
    begins = f"iteration_{part.retired.iteration}."
    names = _list_folder(part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}")
    return any(name.startswith(begins) and name.endswith(".json") for name in names)


def _remove_tables(part: IterationPart, folder: str) -> None:
    """Remove a folder with its tables, unless it has other items."""
    names = _list_folder(part.tree, folder)
    if not all(_is_table(folder, name) for name in names):
        return
    # The mapping of long names is removed last, when no file with a short name is left.
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
    parsed = parse_name_in_folder(folder, name) if folder is not None else None
    return parsed is not None and parsed.kind is FileKind.TABLE

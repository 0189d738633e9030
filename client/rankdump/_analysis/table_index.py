"""Creates the tensor table of a tree that has none, and adds rows that the table lacks. Windows of
manifests are read and written by several processes; after an interruption, the next run continues
with the windows that have no file yet. Needs pyarrow.

A file whose sources have changed is removed before its rows are written again, so a reader may miss
a row in the meantime, but never finds one twice.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from rankdump._analysis.reader.indexed_manifests import make_path_prefix
from rankdump._analysis.reader.manifest_columns import (
    make_iteration_table,
    read_manifest_columns,
)
from rankdump._analysis.reader.manifests import (
    ManifestFileName,
    list_tree_manifests,
    read_manifests,
)
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tensor_columns import (
    make_columns_of_manifests,
    make_columns_of_tree,
)
from rankdump._analysis.reader.tree_files import FolderIndex
from rankdump._analysis.reader.tree_walk import collector_paused, walk
from rankdump._analysis.table.table_files import (
    TableFile,
    TableSource,
    list_table,
    lock_table,
    remove_table_files,
    write_table_file,
)
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.manifest import Manifest, is_intact
from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._layout.dump_folders import ROOT_FORMS, find_folder
from rankdump.errors import CorruptedError, ExhaustedError

_RECORD_BYTES = 280
"""Usual size in bytes of a record in a manifest."""
WINDOW_ROWS = 125_000
WINDOW_BYTES = WINDOW_ROWS * _RECORD_BYTES
"""Size in bytes of the manifests in a window."""
SMALL_FILE_BYTES = 2 << 20
_MAX_CHECKED_BYTES = 8 << 20
"""New manifests with at most this many bytes are read to find out whether they are damaged."""
MAX_SMALL_FILES = 16
"""Number of small files above which they are rewritten as few files."""
_LOCK_PATIENCE_S = 5.0
"""Seconds to wait for the lock; an agent holds it only while it renames files."""


@dataclass(frozen=True, slots=True)
class TableLag:
    """Difference between a table and its tree."""

    missing: int
    """Number of manifests, or files, that are new or changed."""
    removed: int
    """Number of manifests, or files, that the table has and the tree does not have any more."""
    damages: tuple[str, ...] = ()
    """Sentences about manifests that cannot be read, and therefore not be added."""

    def __str__(self) -> str:
        """Return a text about rows that the table lacks or should not have; empty if it is up to
        date.
        """
        parts = {
            "lacks {} new or changed {}": self.missing,
            "has rows of {} removed {}": self.removed,
        }
        return " and ".join(
            text.format(count, "file" if count == 1 else "files")
            for text, count in parts.items()
            if count
        )


OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class IndexWindow:
    """Part of a tree whose rows are written to one file."""

    sources: tuple[TableSource, ...]
    rank: int | None = None
    """The rank whose folders are read; None for all ranks."""
    is_walked: bool = False
    """Whether the files themselves are read, because there are no manifests."""


@dataclass(slots=True)
class IndexReport:
    """Result of a run."""

    rows: int = 0
    """Number of rows of tensors that were written."""
    files: int = 0
    kept_files: int = 0
    """Number of files of earlier runs that are still valid."""
    problems: list[str] = field(default_factory=list[str])


def index_tree(
    root: Path, *, processes: int = 0, on_progress: OnProgress = lambda done, total: None
) -> IndexReport:
    """Write the rows that the table of a tree lacks; return a report.

    `on_progress` is called with the number of windows that are done, and of all windows.
    UnavailableError when another process indexes the tree, CorruptedError when the folder is no
    dump tree, OSError if the tree cannot be written.
    """
    windows = find_windows(root)
    if not windows:
        raise CorruptedError(f"{root}: not a dump tree: no folder {ROOT_FORMS} in it")
    with lock_table(LocalTree(root), patience_s=_LOCK_PATIENCE_S):
        report = IndexReport()
        missing = _remove_outdated(root, windows, report)
        _write_windows(root, _join_windows(missing), processes, on_progress, report)
    return report


def find_windows(root: Path) -> list[IndexWindow]:
    """Return the smallest parts of a tree that can be indexed, by iteration and rank."""
    manifests = [
        (file.iteration if file.iteration is not None else -1, file.rank, file.path)
        for file in list_tree_manifests(root)
        if file.rank is not None
    ]
    if manifests:
        sources = (_make_source(root, path) for *_, path in sorted(manifests))
        return [IndexWindow((source,)) for source in sources if source is not None]
    return _find_walked_windows(root)


def _find_walked_windows(root: Path) -> list[IndexWindow]:
    places = FolderIndex(root, sized=False)
    places.find_folders()
    tables = [path for _, path, _ in places.tables] + [path for _, path in places.info_files]
    is_by_device = any(folder.device for folder in places.folders.values())
    paths = {leaf.path for leaf in places.leaves} | {file.folder_path for file in places.files}
    for leaf in places.leaves:
        with suppress(OSError), os.scandir(root / leaf.path) as found:
            tables += [f"{leaf.path}/{each.name}" for each in found if ".csv" in each.name]
    by_rank: dict[int | None, list[TableSource]] = {}
    for path in sorted([*paths, *tables]):
        folder = find_folder(path if path in paths else path.rpartition("/")[0])
        source = _make_source(root, root / path)
        if source is not None and folder is not None:
            by_rank.setdefault(None if is_by_device else folder.rank, []).append(source)
    return [IndexWindow(tuple(sources), rank, is_walked=True) for rank, sources in by_rank.items()]


def _make_source(root: Path, path: Path) -> TableSource | None:
    """Return the present size and time of a file or folder; None if it was removed after it was
    listed.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    # Sliced, because `relative_to` takes longer than reading the status of the file.
    name = str(path)[len(make_path_prefix(root)) :]
    return TableSource(name, found.st_size, found.st_mtime_ns)


def _remove_outdated(
    root: Path, windows: Sequence[IndexWindow], report: IndexReport
) -> list[IndexWindow]:
    """Remove table files that are damaged, outdated or too small; return the windows that are
    missing.
    """
    access, problems = LocalTree(root), list[str]()
    current = {source for window in windows for source in window.sources}
    listing = list_table(access, problems, now_s=time.time())
    report.problems += [f"{each}; it is made again" for each in problems]
    access.remove(listing.remains)
    kept = [file for file in listing.files if file.sources <= current]
    small = [file for file in kept if file.size_bytes < SMALL_FILE_BYTES]
    if len(small) > MAX_SMALL_FILES:
        kept = [file for file in kept if file not in small]
    missing = _find_missing(windows, kept)
    while shared := _find_shared(missing, kept):
        kept = [file for file in kept if file not in shared]
        missing = _find_missing(windows, kept)
    removed = [file for file in listing.files if file not in kept]
    remove_table_files(access, [*listing.damaged, *removed])
    report.kept_files = len(kept)
    return missing


def _find_missing(windows: Iterable[IndexWindow], files: Iterable[TableFile]) -> list[IndexWindow]:
    known = {source for file in files for source in file.sources}
    return [window for window in windows if not known.issuperset(window.sources)]


def _find_shared(windows: Iterable[IndexWindow], files: Iterable[TableFile]) -> list[TableFile]:
    """Return files with rows of the windows to be written; a window without manifests may be there
    in part.
    """
    written = {source for window in windows for source in window.sources}
    return [file for file in files if not written.isdisjoint(file.sources)]


def _join_windows(windows: Sequence[IndexWindow]) -> list[IndexWindow]:
    """Return windows of about WINDOW_ROWS rows; a window without manifests stays separate."""
    walked = [window for window in windows if window.is_walked]
    sources = [each for window in windows if not window.is_walked for each in window.sources]
    return [*walked, *(IndexWindow(tuple(own)) for own in split_windows(sources))]


def split_windows(sources: Iterable[TableSource]) -> list[list[TableSource]]:
    """Return manifests in windows of about WINDOW_ROWS rows."""
    windows: list[list[TableSource]] = []
    size = WINDOW_BYTES
    for source in sources:
        if size >= WINDOW_BYTES:
            windows.append([])
            size = 0
        windows[-1].append(source)
        size += source.size
    return windows


def _write_windows(
    root: Path,
    windows: Sequence[IndexWindow],
    processes: int,
    on_progress: OnProgress,
    report: IndexReport,
) -> None:
    count = min(len(windows), processes or os.cpu_count() or 1)
    if count <= 1:
        for done, window in enumerate(windows, 1):
            _add_window(report, write_window(root, window))
            on_progress(done, len(windows))
        return
    # The other processes are spawned, because threads of Arrow must not be forked.
    with ProcessPoolExecutor(
        count - 1, mp_context=get_context("spawn"), initializer=leave_pandas_out
    ) as pool:
        running = [(pool.submit(write_window, root, window), window) for window in windows]
        try:
            for done, written in enumerate(_share_windows(root, running), 1):
                _add_window(report, written)
                on_progress(done, len(windows))
        except BrokenProcessPool:
            raise ExhaustedError(
                f"{root}: a process that indexed the tree was killed, as where memory is used up; "
                "the next run goes on, and needs less memory with --processes 1"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _share_windows(
    root: Path, running: Sequence[tuple[Future[tuple[int, list[str]]], IndexWindow]]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the result of each window. This process writes windows that no other process has begun,
    the last ones first, because the others are still starting.
    """
    for future, window in reversed(running):
        if future.cancel():
            yield write_window(root, window)
    for future in as_completed([future for future, _ in running if not future.cancelled()]):
        yield future.result()


def _add_window(report: IndexReport, written: tuple[int, list[str]]) -> None:
    rows, problems = written
    report.rows += rows
    report.files += 1
    report.problems += problems


@collector_paused()
def write_window(root: Path, window: IndexWindow) -> tuple[int, list[str]]:
    """Write the file of a window; return its number of rows, and problems that were found."""
    access, problems = LocalTree(root), list[str]()
    sources = window.sources
    if window.is_walked:
        tree = walk(root, *([] if window.rank is None else [Query(rank=window.rank)]))
        problems += tree.problems
        tensors = make_columns_of_tree(tree, problems)
        iterations = make_iteration_table(tree.manifests)
    else:
        paths = [source.path for source in window.sources]
        read = read_manifest_columns(access, paths, problems)
        tensors = make_columns_of_manifests(access, read, problems)
        iterations = make_iteration_table(read.manifests)
        # Manifests that could not be read are tried and reported again by the next run.
        sources = tuple(each for each in sources if each.path not in read.unread_paths)
    if sources:
        write_table_file(access, tensors, iterations, sources)
    return len(tensors), problems


def compare_with_tree(root: Path) -> TableLag:
    """Return how a tree has changed since its table was written."""
    files = list_table(LocalTree(root), []).files
    known = {source for file in files for source in file.sources}
    windows = find_windows(root)
    current = {source for window in windows for source in window.sources}
    paths = {source.path for source in current}
    absent = current - known
    is_walked = any(window.is_walked for window in windows)
    damages = [] if is_walked else _list_damages(root, absent)
    removed = sum(each.path not in paths for each in known)
    return TableLag(len(absent) - len(damages), removed, tuple(damages))


def _list_damages(root: Path, absent: Iterable[TableSource]) -> list[str]:
    """Return sentences about new or changed manifests that cannot be read.

    Only if there are few new ones; if there are many, `index` reports it.
    """
    paths = sorted(root / each.path for each in absent)
    damages: list[str] = []
    if sum(each.size for each in absent) <= _MAX_CHECKED_BYTES:
        files = (ManifestFileName(path, None, ("", "")) for path in paths)
        deque(read_manifests(files, damages, _read_whole), maxlen=0)
    return damages


def _read_whole(path: Path) -> Manifest:
    data = path.read_bytes()
    if not is_intact(data):
        raise CorruptedError("manifest cannot be read: its checksum is wrong")
    return Manifest.from_json(data)

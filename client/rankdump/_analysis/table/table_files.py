"""Files of the tensor table of a tree: names, sources and writing. Needs pyarrow.

.rankdump/table/tensors.{first iteration}-{last}.{first rank}-{last}.{digest}.parquet
.rankdump/table/iterations.{first iteration}-{last}.{first rank}-{last}.{digest}.parquet

A pair of files is written for a window of iterations, the file of iterations first. The metadata of
the tensor file name its sources with their size and time: manifests, or the files of a tree that
has no manifests. They also name the files that this pair replaces: these are not valid from then
on, and are removed after the pair was written. A file has its final name only when it is complete;
page checksums (Apache Parquet format, `crc` of a page) show damage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rankdump._analysis.table.table_schema import SORT_COLUMNS, TABLE_VERSION
from rankdump._analysis.table.tree_access import LocalTree, TreeAccess
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump.errors import CorruptedError, UnavailableError

TABLE_FOLDER = f"{STATE_FOLDER}/table"
_LOCK_FILE = ".lock"
"""Lock file, locked by a process that changes which files are valid."""
_LOCK_POLL_S = 0.05
_TENSORS, _ITERATIONS, _SUFFIX = "tensors.", "iterations.", ".parquet"
_DRAFT_PATTERN = re.compile(r"\.table-.*\.tmp")
_NAME_PATTERN = re.compile(
    r"(?:tensors|iterations)\.(?:(\d{1,19})-(\d{1,19}))\.(?:(\d{1,10})-(\d{1,10}))\.[0-9a-f]{16}"
    r"\.parquet"
)
_ROWS_PER_GROUP = 1 << 16
_MIN_ROWS_PER_GROUP = 1 << 14
_LAST = (1 << 31) - 1
_VERSION_KEY, _SOURCES_KEY = b"rankdump.version", b"rankdump.sources"
_REPLACES_KEY = b"rankdump.replaces"
_MAX_SOURCES_BYTES = 64 << 20
_DRAFT_AGE_S = 3600.0
"""Age in seconds at which a draft was left by a process that was killed."""


class TableSource(NamedTuple):
    """A file whose content is in the table, with its size and time when it was read."""

    path: str
    """Path relative to the root of the tree."""
    size: int
    modified_ns: int

    @property
    def is_manifest(self) -> bool:
        """Return whether the source is a manifest of rankdump."""
        return f"/{MANIFEST_FOLDER}/" in self.path


class NumberRange(NamedTuple):
    """A range of whole numbers, including its first and last number."""

    first: int
    last: int

    def overlaps(self, other: NumberRange) -> bool:
        """Return whether both ranges have a number in common."""
        return self.first <= other.last and other.first <= self.last

    def join(self, other: NumberRange) -> NumberRange:
        """Return the smallest range that contains both ranges."""
        return NumberRange(min(self.first, other.first), max(self.last, other.last))

    def contains(self, other: NumberRange) -> bool:
        """Return whether all numbers of the other range are in this one."""
        return self.first <= other.first and other.last <= self.last


class TableExtent(NamedTuple):
    """Ranges of iterations and ranks that a file may have rows of."""

    iterations: NumberRange
    ranks: NumberRange

    @staticmethod
    def parse(name: str) -> TableExtent | None:
        """Return the extent that the name of a file states; None for the name of another file."""
        found = _NAME_PATTERN.fullmatch(name)
        if found is None:
            return None
        first, last, first_rank, last_rank = map(int, found.groups())
        return TableExtent(NumberRange(first, last), NumberRange(first_rank, last_rank))

    def overlaps(self, other: TableExtent) -> bool:
        """Return whether both extents may have rows of the same rank's iteration."""
        return self.iterations.overlaps(other.iterations) and self.ranks.overlaps(other.ranks)

    def join(self, other: TableExtent) -> TableExtent:
        """Return the smallest extent that contains both extents."""
        return TableExtent(self.iterations.join(other.iterations), self.ranks.join(other.ranks))


@dataclass(frozen=True, slots=True)
class TableFile:
    """One pair of files of the table."""

    name: str
    """Name of the tensor file."""
    sources: frozenset[TableSource] = frozenset()
    replaces: frozenset[str] = frozenset()
    """Names of the tensor files whose rows this pair contains."""
    size_bytes: int = 0

    @property
    def iterations_name(self) -> str:
        """Name of the file of iterations."""
        return _ITERATIONS + self.name.removeprefix(_TENSORS)

    @property
    def is_of_manifests(self) -> bool:
        """Whether the rows come from manifests, without reading any other file."""
        return all(source.is_manifest for source in self.sources)

    @property
    def paths(self) -> tuple[str, str]:
        """Paths of both files below the root, the tensor file first; if either is missing, the pair
        is not valid.
        """
        return f"{TABLE_FOLDER}/{self.name}", f"{TABLE_FOLDER}/{self.iterations_name}"


@dataclass(frozen=True, slots=True)
class TableListing:
    """Files of a table at one moment."""

    files: list[TableFile]
    """Valid files, sorted by name."""
    remains: list[str]
    """Paths of files that killed processes left, for removal by the holder of the lock."""
    damaged: list[TableFile]
    """Files that cannot be read."""


def list_table(
    access: TreeAccess,
    problems: list[str],
    *,
    extents: Sequence[TableExtent] | None = None,
    now_s: float = 0.0,
) -> TableListing:
    """Return the files of a table; add a problem for each damaged file.

    With `extents`, only files that may have rows in one of them. Drafts count as remains if they
    are an hour old at `now_s`, in seconds since the epoch.
    """
    try:
        names = access.listing(TABLE_FOLDER)
    except FileNotFoundError:
        return TableListing([], [], [])
    found, damaged = list[TableFile](), list[TableFile]()
    for name in select_names(names, extents):
        try:
            found.append(read_table_file(access, name))
        except FileNotFoundError:
            continue  # the file was removed in the meantime
        except (OSError, CorruptedError) as error:
            problems.append(str(error))
            damaged.append(TableFile(name))
    replaced = {name for each in found for name in each.replaces if name in names}
    remains = [path for name in replaced for path in TableFile(name).paths]
    remains += _list_killed(access, names, now_s)
    counting = [each for each in found if each.name not in replaced]
    return TableListing(counting, remains, damaged)


def select_names(names: Iterable[str], extents: Sequence[TableExtent] | None = None) -> list[str]:
    """Return the names of tensor files that may have rows in one of the extents, sorted."""
    known = {
        name: extent
        for name in sorted(names)
        if name.startswith(_TENSORS) and (extent := TableExtent.parse(name)) is not None
    }
    return [
        name
        for name, extent in known.items()
        if extents is None or any(extent.overlaps(each) for each in extents)
    ]


def _list_killed(access: TreeAccess, names: Iterable[str], now_s: float) -> list[str]:
    """Return the paths of old drafts, and of files of iterations whose tensor file was
    not written.
    """
    known = {TableFile(name).iterations_name for name in names if name.startswith(_TENSORS)}
    found: list[str] = []
    for name in names:
        path = f"{TABLE_FOLDER}/{name}"
        if name.startswith(_ITERATIONS) and name not in known:
            found.append(path)
        elif _DRAFT_PATTERN.fullmatch(name):
            with suppress(FileNotFoundError):
                if now_s - access.stat(path).st_mtime > _DRAFT_AGE_S:
                    found.append(path)
    return found


def read_table_file(access: TreeAccess, name: str) -> TableFile:
    """Return a table file with its sources; CorruptedError when it is damaged, or is not from
    rankdump.
    """
    path = f"{access.root}/{TABLE_FOLDER}/{name}"
    try:
        _check_pair(access, TableFile(name))
        with access.open(TABLE_FOLDER, name) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            metadata: dict[bytes, bytes] = pq.read_metadata(file).metadata or {}
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise CorruptedError(f"{path}: not a Parquet file: {error}") from None
    version = metadata.get(_VERSION_KEY, b"")
    if version != str(TABLE_VERSION).encode():
        raise CorruptedError(
            f"{path}: its table version is {version.decode(errors='replace')!r}, "
            f"but this version reads {TABLE_VERSION}"
        )
    try:
        sources = (TableSource(str(p), int(s), int(ns)) for p, s, ns in _unpack(metadata))
        replaces = json.loads(metadata.get(_REPLACES_KEY, b"[]"))
        return TableFile(name, frozenset(sources), frozenset(map(str, replaces)), size_bytes)
    except (KeyError, ValueError, TypeError, zlib.error) as error:
        raise CorruptedError(f"{path}: its list of sources is damaged: {error!r}") from None


def _check_pair(access: TreeAccess, file: TableFile) -> None:
    """Raise a CorruptedError if one of both files is missing, or is not a file; reading a pipe
    would block.
    """
    tensors, iterations = file.paths
    problem = ""
    try:
        modes = [access.stat(iterations).st_mode]
    except FileNotFoundError:
        problem, modes = "its file of iterations is missing", []
    # FileNotFoundError: both files were removed in the meantime
    modes.append(access.stat(tensors).st_mode)
    if not all(map(stat.S_ISREG, modes)):
        problem = "it, or its file of iterations, is not a regular file"
    if problem:
        raise CorruptedError(f"{access.root}/{tensors}: {problem}")


def _unpack(metadata: dict[bytes, bytes]) -> list[tuple[str, int, int]]:
    packed = base64.b64decode(metadata[_SOURCES_KEY], validate=True)
    return json.loads(zlib.decompressobj().decompress(packed, _MAX_SOURCES_BYTES))


def list_tensor_files(root: Path) -> list[Path]:
    """Return the valid files with rows of tensors, sorted by name."""
    files = list_table(LocalTree(root), []).files
    return [root / TABLE_FOLDER / each.name for each in files]


def write_table_file(
    access: TreeAccess,
    tensors: pa.Table,
    iterations: pa.Table,
    sources: Iterable[TableSource],
    *,
    replaces: Iterable[str] = (),
    guard: Callable[[Callable[[], None]], None] = lambda rename: rename(),
) -> TableFile:
    """Write one pair of files, sorted; OSError if the disk cannot store them.

    `guard` calls the function that it is given, which makes the pair valid in place of the files
    that it replaces; or it raises an error to leave everything unchanged.
    """
    held, replaced = sorted(sources), sorted(replaces)
    digest = hashlib.blake2b(json.dumps(held).encode(), digest_size=8).hexdigest()
    extent = _find_extent(iterations, tensors)
    for each in filter(None, map(TableExtent.parse, replaced)):
        # A search for files of some iterations must find this file beside those that it replaces.
        extent = extent.join(each)
    name = f"{_TENSORS}{_format_extent(extent)}.{digest}{_SUFFIX}"
    packed = base64.b64encode(zlib.compress(json.dumps(held).encode(), 1))
    facts = {_VERSION_KEY: str(TABLE_VERSION).encode(), _SOURCES_KEY: packed}
    facts[_REPLACES_KEY] = json.dumps(replaced).encode()
    made = TableFile(name, frozenset(held), frozenset(replaced))
    rows = _sort(tensors)

    def write(name: str, table: pa.Table, sizes: Sequence[int], rename: _RenameGuard) -> None:
        table = table.replace_schema_metadata(facts)
        mark = f"table-{os.getpid()}-{name}"
        access.write(
            TABLE_FOLDER, name, lambda at: _fill(at, table, sizes), mark=mark, guard=rename
        )

    def write_tensors(rename_iterations: Callable[[], None]) -> None:
        def rename_both(rename_tensors: Callable[[], None]) -> None:
            rename_iterations()
            rename_tensors()

        write(made.name, rows, _split(rows), lambda rename: guard(lambda: rename_both(rename)))

    write(made.iterations_name, iterations, [len(iterations)], write_tensors)
    return made


_RenameGuard = Callable[[Callable[[], None]], None]


def _find_extent(*tables: pa.Table) -> TableExtent:
    return TableExtent(*(_find_range(tables, name) for name in ("iteration", "rank")))


def _find_range(tables: Sequence[pa.Table], name: str) -> NumberRange:
    """Return the range of a column in the first of the tables whose column has numbers."""
    for table in tables:
        numbers = table.column(name).drop_null()
        if len(numbers):
            values = numbers.to_numpy()
            return NumberRange(max(0, int(values.min())), max(0, int(values.max())))
    return NumberRange(0, 0)


def _format_extent(extent: TableExtent) -> str:
    return ".".join(f"{each.first}-{each.last}" for each in extent)


def _sort(rows: pa.Table) -> pa.Table:
    """Return rows sorted by iteration, rank and position; rows of constants come last."""
    columns = [
        rows.column(name).fill_null(_LAST).to_numpy().astype(np.int64) for name in SORT_COLUMNS
    ]
    return take_in_order(rows, np.lexsort(columns[::-1]))


def take_in_order(rows: pa.Table, order: npt.NDArray[np.int64]) -> pa.Table:
    """Return rows in the given order. Most already are in order, and copying them would take as
    long as writing them.
    """
    return rows if (order[1:] > order[:-1]).all() else rows.take(pa.array(order))


class ColumnPlace(NamedTuple):
    """The rows that belong to one iteration of one rank."""

    rank: int
    iteration: int
    start: int
    stop: int


def split_by_place(
    iterations: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
) -> list[ColumnPlace]:
    """Return the ranges of consecutive rows that have the same iteration and rank."""
    changes = (iterations[1:] != iterations[:-1]) | (ranks[1:] != ranks[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(ranks) else []
    ends = [*starts[1:], len(ranks)]
    return [
        ColumnPlace(int(ranks[start]), int(iterations[start]), start, end)
        for start, end in zip(starts, ends, strict=True)
    ]


def read_columns(path: Path, names: Sequence[str], *, use_threads: bool = True) -> pa.Table:
    """Return columns of a file; CorruptedError if the file is damaged or was removed."""
    try:
        return pq.read_table(
            path, columns=[*names], use_threads=use_threads, page_checksum_verification=True
        )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptedError(f"{path}: cannot be read: {error}") from None


@contextmanager
def lock_table(access: TreeAccess, *, patience_s: float) -> Generator[None]:
    """Lock the table; UnavailableError when another process holds the lock for `patience_s`
    seconds.
    """
    deadline_s = time.monotonic() + patience_s
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(access.lock(TABLE_FOLDER, _LOCK_FILE))
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise UnavailableError(
                        f"{access.root}: another process is indexing this tree"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


def remove_table_files(access: TreeAccess, files: Iterable[TableFile]) -> None:
    """Remove pairs of files; removing the first file of a pair makes the pair invalid."""
    access.remove(path for file in files for path in file.paths)


def _split(rows: pa.Table) -> list[int]:
    """Return the sizes of row groups; if a rank's iteration has enough rows, a row group ends with
    it.

    Reading one iteration of a rank then reads no rows of others.
    """
    if not len(rows):
        return [0]
    ranks = rows.column("rank").to_numpy()
    iterations = rows.column("iteration").fill_null(-1).to_numpy()
    ends = ((ranks[1:] != ranks[:-1]) | (iterations[1:] != iterations[:-1])).nonzero()[0] + 1
    sizes, start = list[int](), 0
    for end in [*ends.tolist(), len(rows)]:
        while end - start > _ROWS_PER_GROUP:
            sizes.append(_ROWS_PER_GROUP)
            start += _ROWS_PER_GROUP
        if end - start >= _MIN_ROWS_PER_GROUP or end == len(rows):
            sizes.append(end - start)
            start = end
    return [size for size in sizes if size]


def _fill(descriptor: int, table: pa.Table, group_sizes: Sequence[int]) -> None:
    with (
        os.fdopen(descriptor, "wb", closefd=False) as file,
        pq.ParquetWriter(
            file,
            table.schema,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=True,
        ) as writer,
    ):
        start = 0
        for size in group_sizes:
            writer.write_table(table.slice(start, size), row_group_size=max(1, size))
            start += size

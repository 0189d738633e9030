"""Files of the tensor table of a tree: names, sources and writing. Needs pyarrow.

    .rankdump/table/tensors.{first iteration}-{last iteration}.{digest}.parquet
    .rankdump/table/iterations.{first iteration}-{last iteration}.{digest}.parquet

A pair is written for a window of iterations, iterations first. The metadata of the pair's tensors
name its sources: manifests, or files of a tree that has none, with their size and time. A file has
its final name only when it is complete; page checksums (Apache Parquet format, `crc` of a page)
show damage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rankdump._analysis.table.table_schema import SORT_COLUMNS, TABLE_VERSION
from rankdump._core.tree_root import STATE_FOLDER
from rankdump.errors import CorruptedError

TABLE_FOLDER = f"{STATE_FOLDER}/table"
_TENSORS, _ITERATIONS, _SUFFIX = "tensors.", "iterations.", ".parquet"
_ROWS_PER_GROUP = 1 << 16
_MIN_ROWS_PER_GROUP = 1 << 14
_LAST = (1 << 31) - 1
_VERSION_KEY, _SOURCES_KEY = b"rankdump.version", b"rankdump.sources"
_MAX_SOURCES_BYTES = 64 << 20


class TableSource(NamedTuple):
    """A file whose content is in the table, as it was read."""

    path: str
    """Relative to the root of the tree."""
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class TableFile:
    """One pair of files of the table."""

    tensors: Path
    iterations: Path
    sources: frozenset[TableSource]

    @staticmethod
    def at(tensors: Path, sources: frozenset[TableSource]) -> TableFile:
        """Return the pair of a file of tensors."""
        iterations = tensors.with_name(_ITERATIONS + tensors.name.removeprefix(_TENSORS))
        return TableFile(tensors, iterations, sources)


def list_tensor_files(root: Path) -> list[Path]:
    """Return the files with rows of tensors, sorted by name; empty for a tree without a table."""
    return _list_files(root, _TENSORS)


def list_iteration_files(root: Path) -> list[Path]:
    """Return the files with rows of iterations, each beside its file of tensors."""
    return [TableFile.at(path, frozenset()).iterations for path in list_tensor_files(root)]


def _list_files(root: Path, kind: str) -> list[Path]:
    with suppress(FileNotFoundError):
        with os.scandir(root / TABLE_FOLDER) as found:
            names = [each.name for each in found if each.is_file(follow_symlinks=False)]
        wanted = (name for name in names if name.startswith(kind) and name.endswith(_SUFFIX))
        return [root / TABLE_FOLDER / name for name in sorted(wanted)]
    return []


def remove_remains(root: Path) -> None:
    """Remove what a killed run left: drafts, and iterations without their tensors."""
    known = set(list_iteration_files(root))
    for path in (root / TABLE_FOLDER).glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for path in _list_files(root, _ITERATIONS):
        if path not in known:
            path.unlink(missing_ok=True)


def read_sources(path: Path) -> frozenset[TableSource]:
    """Return the sources of a file; CorruptedError when it is damaged, or no table of rankdump."""
    try:
        metadata: dict[bytes, bytes] = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise CorruptedError(f"{path}: not a Parquet file: {error}") from None
    version = metadata.get(_VERSION_KEY, b"")
    if version != str(TABLE_VERSION).encode():
        raise CorruptedError(
            f"{path}: its table version is {version.decode(errors='replace')!r}, "
            f"but this version reads {TABLE_VERSION}"
        )
    try:
        packed = base64.b64decode(metadata[_SOURCES_KEY], validate=True)
        listed = json.loads(zlib.decompressobj().decompress(packed, _MAX_SOURCES_BYTES))
        return frozenset(TableSource(str(p), int(size), int(ns)) for p, size, ns in listed)
    except (KeyError, ValueError, TypeError, zlib.error) as error:
        raise CorruptedError(f"{path}: its list of sources is damaged: {error!r}") from None


def write_table_file(
    root: Path, tensors: pa.Table, iterations: pa.Table, sources: Iterable[TableSource]
) -> TableFile:
    """Write one pair of files, sorted; OSError where the disk does not take them."""
    held = sorted(sources)
    digest = hashlib.blake2b(json.dumps(held).encode(), digest_size=8).hexdigest()
    name = f"{_name_iterations(iterations, tensors)}.{digest}{_SUFFIX}"
    folder = root / TABLE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    packed = base64.b64encode(zlib.compress(json.dumps(held).encode(), 1))
    facts = {_VERSION_KEY: str(TABLE_VERSION).encode(), _SOURCES_KEY: packed}
    made = TableFile.at(folder / (_TENSORS + name), frozenset(held))
    # Rows of tensors come last: with them the window counts as written.
    _write_sealed(made.iterations, iterations.replace_schema_metadata(facts), [len(iterations)])
    rows = _sort(tensors)
    _write_sealed(made.tensors, rows.replace_schema_metadata(facts), _split(rows))
    return made


def _sort(rows: pa.Table) -> pa.Table:
    """Return rows by iteration, rank and position; those of constants come last."""
    columns = [
        rows.column(name).fill_null(_LAST).to_numpy().astype(np.int64) for name in SORT_COLUMNS
    ]
    order = np.lexsort(columns[::-1])
    # A copy of all columns takes as long as writing them, and most rows come in this order.
    return rows if (order[1:] > order[:-1]).all() else rows.take(pa.array(order))


def remove_table_file(file: TableFile) -> None:
    """Remove a pair, tensors first."""
    file.tensors.unlink(missing_ok=True)
    file.iterations.unlink(missing_ok=True)


def _name_iterations(*tables: pa.Table) -> str:
    for table in tables:
        numbers = table.column("iteration").drop_null()
        if len(numbers):
            values = numbers.to_numpy()
            return f"{values.min()}-{values.max()}"
    return "none"


def _split(rows: pa.Table) -> list[int]:
    """Return the sizes of row groups: they end with a rank's iteration where that is long enough.

    Then the group of one iteration of a rank has no other rows to be read.
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


def _write_sealed(path: Path, table: pa.Table, group_sizes: Sequence[int]) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with pq.ParquetWriter(
            draft,
            table.schema,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=True,
        ) as writer:
            for batch in _slice(table, group_sizes):
                writer.write_table(batch, row_group_size=max(1, len(batch)))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _slice(table: pa.Table, sizes: Sequence[int]) -> Iterator[pa.Table]:
    start = 0
    for size in sizes:
        yield table.slice(start, size)
        start += size

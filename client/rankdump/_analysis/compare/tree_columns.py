"""Tensors of a tree without their elements, as columns for a comparison. They are read from the
tree's table of statistics if it is up to date, else from its manifests. Needs pyarrow.

Texts and shapes are stored as numbers of entries in a list. Sketches, which are most of the bytes,
are read when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.indexed_manifests import find_indexed_files
from rankdump._analysis.reader.manifest_columns import read_manifest_columns
from rankdump._analysis.reader.manifests import list_manifest_files, list_rank_folders
from rankdump._analysis.reader.tensor_columns import make_columns_of_manifests
from rankdump._analysis.table.table_files import ColumnPlace, read_columns, split_by_place
from rankdump._analysis.table.table_schema import STATISTIC_COLUMNS
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.record import TensorSide
from rankdump._kernels.shard_fingerprint import SKETCH_BUCKETS
from rankdump.errors import CorruptedError

_Numbers: TypeAlias = "npt.NDArray[np.int64]"
_Sketches: TypeAlias = "npt.NDArray[np.float32]"
_TEXT_COLUMNS = ("name", "op_type", "argument", "dtype", "layout")
_PLACE_COLUMNS = ("iteration", "rank", "position")
_MANIFESTS_AT_A_TIME = 128
_SIDES = {TensorSide.INPUT.value: 0, TensorSide.OUTPUT.value: 1}


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """A column with repeated values, stored as codes."""

    values: list[Any]
    codes: _Numbers


@dataclass(slots=True)
class TreeColumns:
    """Tensors of a tree, sorted by iteration, rank and execution order."""

    places: list[ColumnPlace]
    coded: dict[str, CodedColumn]
    """Columns by name: `name`, `op_type`, `argument`, `dtype`, `layout`, and `shape` as tuples."""
    sides: _Numbers
    """0 for an input, 1 for an output."""
    slots: _Numbers
    digests: CodedColumn
    """xxh3-128 digests; the first value is the empty text."""
    fingerprints: npt.NDArray[np.uint64]
    has_fingerprint: npt.NDArray[np.bool_]
    statistics: dict[str, npt.NDArray[np.float64]]
    """Statistics by the names of `statistic_category`, for all statistics that any tensor has."""
    is_known: dict[str, npt.NDArray[np.bool_]]
    """For each statistic, which tensors have it."""
    microbatches: int
    """Number of micro-batches; 0 if tensors have no micro-batch numbers."""
    _order: _Numbers
    """For each row, its position in the files."""
    _parts: list[tuple[int, Callable[[], _Sketches]]]
    """For each part, its number of rows and a function that reads its sketches."""

    def __len__(self) -> int:
        return len(self.sides)

    def load_sketches(self, rows: _Numbers) -> _Sketches:
        """Return the sketches of rows that have one; only one part at a time is in memory."""
        wanted = self._order[rows]
        has_print = np.zeros(len(self), np.bool_)
        has_print[self._order] = self.has_fingerprint
        found = np.empty((len(rows), SKETCH_BUCKETS), np.float32)
        start = 0
        for count, load in self._parts:
            asked = np.flatnonzero((wanted >= start) & (wanted < start + count))
            if len(asked):
                ordinal = np.cumsum(has_print[start : start + count]) - 1
                found[asked] = load()[ordinal[wanted[asked] - start]]
            start += count
        return found


def read_comparable_columns(a: Dump, b: Dump) -> tuple[TreeColumns, TreeColumns] | None:
    """Return the tensors of two whole dumps, if they can be compared rank by rank and manifests
    have all tensors without files; else None.
    """
    dumps = (a,) if a is b else (a, b)
    if any(not _is_plain(dump) for dump in dumps):
        return None
    if len({dump.world_size for dump in dumps} - {0}) > 1:
        return None
    read = [read_tree_columns(dump.root) for dump in dumps]
    left, right = read[0], read[-1]
    if left is None or right is None or not _have_same_layout(left, right):
        return None
    return left, right


def _is_plain(dump: Dump) -> bool:
    return (
        dump.tabled_tensors > 0
        and not dump.has_several_attempts
        and len(dump.jobs) == 1
        and len(dump.graphs) == 1
    )


def _have_same_layout(a: TreeColumns, b: TreeColumns) -> bool:
    """Return whether both have the same number of micro-batches, and in their first iterations the
    same layouts at the places that both have. False if there are first elements of tensors.
    """
    texts = [*a.coded["layout"].values, *b.coded["layout"].values]
    if a.microbatches != b.microbatches or any(text.startswith("only the") for text in texts):
        return False
    if not any(texts):
        return True
    own, other = _list_layouts(a), _list_layouts(b)
    return all(own[place] == other[place] for place in own.keys() & other.keys())


def _list_layouts(columns: TreeColumns) -> dict[tuple[object, ...], str]:
    first = min((place.iteration for place in columns.places), default=0)
    names, layouts = columns.coded["name"], columns.coded["layout"]
    return {
        (place.rank, names.values[name], side, slot): layouts.values[layout]
        for place in columns.places
        if place.iteration == first
        for rows in [slice(place.start, place.stop)]
        for name, side, slot, layout in zip(
            names.codes[rows].tolist(),
            columns.sides[rows].tolist(),
            columns.slots[rows].tolist(),
            layouts.codes[rows].tolist(),
            strict=True,
        )
    }


def read_tree_columns(root: Path) -> TreeColumns | None:
    """Return the tensors of a tree. None if the manifests do not suffice: constants, several
    manifests for the same rank and iteration, or damaged files.
    """
    manifests = [
        path for name in list_rank_folders(root) for path, *_ in list_manifest_files(root, name, [])
    ]
    indexed = find_indexed_files(root)
    is_indexed = sum(len(each.manifests) for each in indexed) == len(manifests)
    paths = [each.tensors for each in indexed] if is_indexed else []
    try:
        parts = list(_read_table(paths)) if paths else list(_read_manifests(root, manifests))
    except CorruptedError:  # the code that reads the tree reports it
        return None
    return _assemble([table for table, _ in parts], [load for _, load in parts])


def _read_table(paths: Sequence[Path]) -> Iterator[tuple[pa.Table, Callable[[], _Sketches]]]:
    for path in paths:
        names = [
            *(*_PLACE_COLUMNS, *_TEXT_COLUMNS, "shape", "side", "slot", "microbatch"),
            *("digest", "fingerprint", *STATISTIC_COLUMNS.values()),
        ]
        yield (
            read_columns(path, names),
            lambda path=path: _get_sketches(read_columns(path, ["sketch"])),
        )


def _read_manifests(
    root: Path, manifests: Sequence[Path]
) -> Iterator[tuple[pa.Table, Callable[[], _Sketches]]]:
    access = LocalTree(root)
    for at in range(0, len(manifests), _MANIFESTS_AT_A_TIME):
        paths = [
            each.relative_to(root).as_posix() for each in manifests[at : at + _MANIFESTS_AT_A_TIME]
        ]
        problems: list[str] = []
        read = read_manifest_columns(access, paths, problems)
        places = [(each.status.rank, each.status.iteration) for each in read.manifests]
        table = make_columns_of_manifests(access, read, problems)
        if problems or len(set(places)) < len(paths):
            raise CorruptedError("; ".join(problems))
        sketches = _get_sketches(table)
        yield table, lambda sketches=sketches: sketches


def _get_sketches(table: pa.Table) -> _Sketches:
    column: Any = table.column("sketch").combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(flat, np.float32).reshape(-1, SKETCH_BUCKETS)


def _assemble(
    tables: Sequence[pa.Table], loads: Sequence[Callable[[], _Sketches]]
) -> TreeColumns | None:
    wanted = [name for name in tables[0].column_names if name != "sketch"] if tables else []
    table = pa.concat_tables([each.select(wanted) for each in tables]) if tables else None
    if table is None or any(
        table.column(name).null_count for name in ("iteration", "side", "shape")
    ):
        return None
    keys = [table.column(name).to_numpy().astype(np.int64) for name in _PLACE_COLUMNS]
    order = np.lexsort(keys[::-1])
    if (order[1:] < order[:-1]).any():
        table, keys = table.take(pa.array(order)), [each[order] for each in keys]
    places = split_by_place(keys[0], keys[1])
    if len({place[:2] for place in places}) < len(places) or _is_repeated(keys):
        return None
    numbers = table.column("microbatch").drop_null().to_numpy()
    return TreeColumns(
        places,
        {name: _encode(table.column(name)) for name in _TEXT_COLUMNS}
        | {"shape": _encode_shapes(table.column("shape"))},
        _encode_sides(table.column("side")),
        table.column("slot").to_numpy().astype(np.int64),
        _encode(table.column("digest")),
        table.column("fingerprint").fill_null(0).to_numpy(),
        _find_known(table.column("fingerprint")),
        *_read_statistics(table),
        int(numbers.max()) + 1 if len(numbers) else 0,
        order,
        [(len(each), load) for each, load in zip(tables, loads, strict=True)],
    )


def _is_repeated(keys: Sequence[_Numbers]) -> bool:
    """Return whether two rows have the same place and position."""
    return bool(np.logical_and.reduce([each[1:] == each[:-1] for each in keys]).any())


def _find_known(column: Any) -> npt.NDArray[np.bool_]:
    return column.is_valid().combine_chunks().to_numpy(zero_copy_only=False)


def _read_statistics(
    table: pa.Table,
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, npt.NDArray[np.bool_]]]:
    values: dict[str, npt.NDArray[np.float64]] = {}
    known: dict[str, npt.NDArray[np.bool_]] = {}
    for item, name in STATISTIC_COLUMNS.items():
        column = table.column(name)
        if column.null_count < len(column):
            known[item] = _find_known(column)
            values[item] = column.cast(pa.float64()).fill_null(0.0).to_numpy()
    return values, known


def _encode(column: Any) -> CodedColumn:
    """Return a column of texts with codes; the empty text comes first, and also stands for NULL."""
    whole: Any = column.cast(pa.string()).fill_null("").combine_chunks()
    texts: Any = whole.dictionary_encode()
    found: list[str] = texts.dictionary.to_pylist()
    codes: _Numbers = texts.indices.to_numpy().astype(np.int64)
    numbers: dict[str, int] = {"": 0}
    places = np.array([numbers.setdefault(each, len(numbers)) for each in found], np.int64)
    return CodedColumn(list(numbers), places[codes] if len(found) else codes)


def _encode_sides(column: Any) -> _Numbers:
    found = _encode(column)
    return np.array([_SIDES.get(each, 0) for each in found.values], np.int64)[found.codes]


def _encode_shapes(column: Any) -> CodedColumn:
    whole: Any = column.combine_chunks()
    flat: _Numbers = whole.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    lengths: _Numbers = whole.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    widest = int(lengths.max(initial=0))
    padded = np.full((len(lengths), widest + 1), -1, np.int64)
    padded[:, widest] = lengths
    for at in range(widest):
        has = lengths > at
        padded[has, at] = flat[starts[has] + at]
    # Rows are compared as bytes of a fixed width and numbered by their hash, which is faster than
    # sorting them.
    row_type: Any = pa.binary(padded.itemsize * (widest + 1))
    kind: Any = pa.FixedSizeBinaryArray
    rows: Any = kind.from_buffers(row_type, len(padded), [None, pa.py_buffer(padded)])
    coded: Any = rows.dictionary_encode()
    distinct = np.frombuffer(b"".join(coded.dictionary.to_pylist()), np.int64)
    shapes = [tuple(row[: row[widest]]) for row in distinct.reshape(-1, widest + 1).tolist()]
    codes: _Numbers = coded.indices.to_numpy().astype(np.int64)
    return CodedColumn(shapes, codes)

"""Rows of the tensor table, made from manifests as columns, or from the tensors of a tree. For a
tree with manifests both ways give the same rows. Needs pyarrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankdump._analysis.reader.file_errors import noted_errors
from rankdump._analysis.reader.fingerprints import read_fingerprints, read_fingerprints_of_tree
from rankdump._analysis.reader.manifest_columns import (
    SIDES,
    UNKNOWN_SIDE,
    ManifestColumns,
    find_constants,
)
from rankdump._analysis.reader.record_statistics import RecordPlaces, read_record_statistics
from rankdump._analysis.reader.statistic_columns import (
    STATISTIC_FIELDS,
    match_statistics,
    read_statistics,
)
from rankdump._analysis.reader.statistic_tables import is_layer_mark
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_rows import named, read_table_rows
from rankdump._analysis.reader.tensor_loader import facts
from rankdump._analysis.reader.tree import Entry, Figures, Tree, execution_order_of
from rankdump._analysis.table.table_files import take_in_order
from rankdump._analysis.table.table_schema import TENSOR_SCHEMA
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._core.record import TensorKey
from rankdump._kernels.shard_fingerprint import SKETCH_BUCKETS
from rankdump._layout.api_tree import LAYER_KIND
from rankdump.errors import CorruptedError

_INT32_MAX = (1 << 31) - 1
_SAME_COLUMNS = ("microbatch", "phase", "argument", "dtype", "digest", "path", "member")
"""Columns that are fields of a record with the same name."""


def make_columns_of_manifests(
    access: TreeAccess, read: ManifestColumns, problems: list[str]
) -> pa.Table:
    """Return a row for each record of manifests; add a problem for each invalid table."""
    if not len(read.records):
        return TENSOR_SCHEMA.empty_table()
    places = RecordPlaces(read)
    statistics = read_record_statistics(access, read, places, problems)
    constant = find_constants(read.records)
    stamps = read.records.column("timestamp_us").to_numpy()
    sides = np.array(read.records.column("side").to_numpy(), np.int64)
    slots = np.array(read.records.column("slot").to_numpy(), np.int64)
    rows = match_statistics(places.of_records, stamps, sides, slots, statistics)
    unknown = (sides == UNKNOWN_SIDE) & (rows >= 0)
    for values, name in ((sides, "side"), (slots, "slot")):
        values[unknown] = statistics.column(name).to_numpy()[rows[unknown]]
    rows[_find_layer_marks(read.records.column("op_name"))] = -1
    order = np.lexsort((slots, sides, stamps, constant.to_numpy(), read.manifest_of))
    statistics = statistics.select([each.name for each in STATISTIC_FIELDS])
    fingerprints = _make_fingerprint_columns(access, read, order, problems)
    return _assemble_manifest_rows(read, fingerprints, statistics, rows, sides, slots, order)


def _find_layer_marks(names: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return which rows are layer marks, whose zeros are not statistics."""
    may_be = np.flatnonzero(pc.starts_with(names, LAYER_KIND).to_numpy())
    return np.array([at for at in may_be.tolist() if is_layer_mark(names[at].as_py())], np.int64)


def _make_fingerprint_columns(
    access: TreeAccess, read: ManifestColumns, order: npt.NDArray[np.int64], problems: list[str]
) -> dict[str, pa.Array]:
    """Return the columns of fingerprints in this order; none if no manifest has fingerprints."""
    sealed = [n for n, each in enumerate(read.manifests) if each.fingerprints is not None]
    counts = np.bincount(read.manifest_of, minlength=len(read.manifests))
    starts = np.cumsum(counts) - counts
    numbers: list[npt.NDArray[np.int64]] = []
    found: list[npt.NDArray[Any]] = []
    for n in sealed:
        manifest, count = read.manifests[n], int(counts[n])
        rows = read_fingerprints(access, read.paths[n], manifest, count, problems)
        if rows is not None:
            numbers.append(rows["record"] + starts[n])
            found.append(rows)
    if not found:
        return {}
    row_of = np.full(len(order), -1)
    known = np.concatenate(found)
    row_of[np.concatenate(numbers)] = np.arange(len(known))
    taken = row_of[order]
    absent = taken < 0
    return {
        "fingerprint": pa.array(known["fingerprint"][taken], mask=absent),
        "sketch": pa.ListArray.from_arrays(
            np.append(0, np.cumsum(np.where(absent, 0, SKETCH_BUCKETS))).astype(np.int32),
            known["sketch"][taken[~absent]].reshape(-1),
            mask=pa.array(absent),
        ),
    }


def _assemble_manifest_rows(
    read: ManifestColumns,
    fingerprints: dict[str, pa.Array],
    statistics: pa.Table,
    rows: npt.NDArray[np.int64],
    sides: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
) -> pa.Table:
    records = take_in_order(read.records, order)
    manifest_of = read.manifest_of[order]
    statuses = [each.status for each in read.manifests]
    constant = find_constants(records)
    # Constants of a graph are numbered separately, like an iteration.
    parts = manifest_of * 2 + constant.to_numpy()
    columns: dict[str, Any] = {
        "job": _spread([each.job_id for each in statuses], manifest_of),
        "attempt": _spread([each.attempt for each in statuses], manifest_of),
        "rank": _spread([each.rank for each in statuses], manifest_of),
        "iteration": pc.if_else(
            constant, None, _spread([each.iteration for each in statuses], manifest_of)
        ),
        "position": pa.array(np.arange(len(order)) - np.searchsorted(parts, parts)),
        "name": records.column("op_name"),
        "side": pa.array(SIDES).take(pa.array(sides[order], mask=sides[order] == UNKNOWN_SIDE)),
        "slot": pa.array(np.minimum(slots[order], _INT32_MAX), mask=sides[order] == UNKNOWN_SIDE),
        "bytes": records.column("bytes_in"),
        "stored_bytes": records.column("bytes_stored"),
        "phase": records.column("phase").fill_null(""),
        "member": records.column("member").fill_null(""),
        "layout": records.column("layout").fill_null(""),
    }
    for name in ("microbatch", "op_type", "argument", "dtype", "shape", "digest", "path"):
        columns[name] = records.column(name)
    columns["timestamp_us"] = records.column("timestamp_us")
    if any(each.same_as_baseline for each in statuses):
        columns["same_as"] = records.column("same_as")
    found = rows[order]
    taken = statistics.take(pa.array(found, mask=found < 0))
    columns |= {name: taken.column(name) for name in taken.column_names} | fingerprints
    return _make_table(columns, len(order))


def _spread(values: Sequence[Any], places: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(values).take(pa.array(places))


def _make_table(columns: dict[str, Any], count: int) -> pa.Table:
    """Return a table with these columns by the schema; columns that are not given are NULL."""
    arrays: list[Any] = []
    for each in TENSOR_SCHEMA:
        column = columns.get(each.name)
        if column is None:
            column = pa.nulls(count, each.type)
        elif pa.types.is_dictionary(each.type):
            column = column.cast(pa.string()).dictionary_encode()
        arrays.append(column)
    return pa.Table.from_arrays(arrays, names=TENSOR_SCHEMA.names).cast(TENSOR_SCHEMA)


def make_columns_of_tree(
    tree: Tree, problems: list[str], keeps: Callable[[Entry | Figures], bool] = lambda _: True
) -> pa.Table:
    """Return a row for each tensor of a tree; add a problem for each damaged file.

    If the tree has manifests, tensors that no manifest names are left out.
    """
    read = [*_read_rows(tree, problems)]
    figures = {_place(row.key): row for row in read}
    tensors = _list_recorded(tree, read, keeps) if tree.manifests else named(tree, keeps)
    jobs: dict[tuple[int, int | None], str]
    jobs = {(m.status.rank, m.status.iteration): m.status.job_id for m in tree.manifests}
    jobs |= {(m.status.rank, None): m.status.job_id for m in tree.manifests}
    ranks = {m.status.rank for m in tree.manifests if m.fingerprints is not None}
    fingerprints = (
        read_fingerprints_of_tree(tree.root, lambda rank, _: rank in ranks, problems)
        if ranks
        else {}
    )
    counts: Counter[tuple[int, int | None, str]] = Counter()
    rows: list[dict[str, Any]] = []
    for tensor in tensors:
        try:
            row = _make_row(tensor)
        except CorruptedError as error:
            problems.append(str(error))
            continue
        key = tensor.key
        place = key.rank, None if key.constant else key.iteration
        session = tree.periods.find_session(key.rank, key.timestamp_us)
        # Several attempts, or jobs, in a tree may have the same iterations.
        counted = *place, session.session_id if session is not None else ""
        row |= {
            "job": jobs.get(place, "") if session is None else session.job_id,
            "attempt": tree.find_attempt(key),
            "position": counts[counted],
        }
        counts[counted] += 1
        if tensor.record is not None and (key.rank, tensor.record) in fingerprints:
            known = fingerprints[key.rank, tensor.record]
            row |= {"fingerprint": known.digest, "sketch": np.frombuffer(known.sketch, "<f4")}
        found = tensor if isinstance(tensor, Figures) else figures.get(_place(key))
        has_statistics = found is not None and not is_layer_mark(tensor.op_name)
        rows.append(row | (read_statistics(found) if found and has_statistics else {}))
    return pa.Table.from_pylist(rows, TENSOR_SCHEMA)


def _list_recorded(
    tree: Tree, rows: Sequence[Figures], keeps: Callable[[Entry | Figures], bool]
) -> list[Entry | Figures]:
    """Return the tensors that manifests name, in execution order.

    A folder with files may also have rows of tensors of which only statistics were kept.
    """
    files = [each for each in tree.entries if each.record is not None and keeps(each)]
    others = [row for row in rows if row.record and not row.record.path and keeps(row)]
    return sorted([*files, *others], key=lambda each: execution_order_of(each.key))


def _read_rows(tree: Tree, problems: list[str]) -> Iterator[Figures]:
    known = TableRecords(tree)
    for table in tree.tables:
        with noted_errors(problems):
            yield from read_table_rows(table, known)


def _place(key: TensorKey) -> tuple[object, ...]:
    """Return the key that a row of statistics and a file have in common if they are the same
    tensor.
    """
    when = None if key.constant else key.iteration
    return key.rank, when, key.timestamp_us, key.side, key.slot, key.argument


def _make_row(tensor: Entry | Figures) -> dict[str, Any]:
    """Return the columns of a tensor without its statistics; CorruptedError for a damaged file."""
    key, record = tensor.key, tensor.record
    row: dict[str, Any] = {
        "rank": key.rank,
        "iteration": None if key.constant else key.iteration,
        "name": tensor.op_name,
        "op_type": tensor.op_type,
        "side": key.side.value,
        "slot": min(key.slot, _INT32_MAX),
        "path": tensor.relative if isinstance(tensor, Entry) else "",
        "member": tensor.member if isinstance(tensor, Entry) else "",
        "timestamp_us": min(key.timestamp_us, (1 << 63) - 1),
        "phase": "",
        "layout": "",
        "argument": key.argument,
    }
    if record is not None:
        row |= {name: getattr(record, name) for name in _SAME_COLUMNS}
        return row | {
            "shape": list(record.shape),
            "layout": str(record.layout or ""),
            "bytes": record.bytes_in,
            "stored_bytes": record.bytes_stored,
            "same_as": f"{record.baseline}/{record.same_as}" if record.same_as else None,
        }
    if isinstance(tensor, Figures):
        size = {"bytes": tensor.data_bytes, "stored_bytes": 0}
        return row | size | {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    known = facts(tensor)
    return row | {
        "dtype": known.dtype,
        "shape": list(known.shape),
        "bytes": known.bytes_in,
        "stored_bytes": tensor.stored_bytes,
    }

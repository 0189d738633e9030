"""Sizes of the tensors of each rank and iteration, computed from the rows of the table. Needs
pyarrow. Only one file of the table is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankdump._analysis.reader.indexed_manifests import IndexedFile
from rankdump._analysis.table.table_files import read_columns, split_by_place, take_in_order
from rankdump._analysis.table.table_schema import ITERATION_SCHEMA, TENSOR_SCHEMA
from rankdump.errors import CorruptedError

_PLACE = ["iteration", "rank"]


def _check_places(file: IndexedFile, places: Iterable[tuple[int, int]]) -> None:
    for rank, iteration in places:
        if (rank, iteration) not in file.manifests:
            raise CorruptedError(
                f"{file.tensors}: has rows of rank {rank}, iteration {iteration}, "
                "which none of its sources has"
            )


def _read(path: Path, schema: pa.Schema, columns: list[str]) -> Any:
    rows = read_columns(path, columns, use_threads=False)
    try:
        return rows.cast(pa.schema([schema.field(name) for name in columns]))
    except (ValueError, pa.ArrowException) as error:
        raise CorruptedError(f"{path}: cannot be read: {error}") from None


class PlaceSizes(NamedTuple):
    """Sizes of the tensors of one iteration of a rank."""

    rank: int
    iteration: int | None
    """Iteration; None for the constants of a graph."""
    stall_us: int
    paths: list[str]
    """Paths of files; there may be fewer than tensors, because rows of statistics have no file."""
    stored_bytes: list[int]
    """Stored bytes of each path."""
    bytes_in: int
    """Bytes of all tensors together, before compression."""
    stamps_us: npt.NDArray[np.int64]
    """Time stamp of each tensor, in microseconds."""


def read_place_sizes(file: IndexedFile) -> Iterator[PlaceSizes]:
    """Yield the tensor sizes of each rank and iteration in a file of the table.

    CorruptedError, before anything is yielded, when the file is damaged or was removed.
    """
    columns = ["path", "bytes", "stored_bytes", "timestamp_us"]
    rows = _read(file.tensors, TENSOR_SCHEMA, [*_PLACE, *columns])
    iterations = _read(file.iterations, ITERATION_SCHEMA, [*_PLACE, "stall_us"])
    stalls = {
        (each["rank"], each["iteration"]): each["stall_us"] for each in iterations.to_pylist()
    }
    _check_places(file, stalls)
    is_dated = pc.is_valid(rows.column("iteration"))
    constants = rows.filter(pc.invert(is_dated))
    for rank in pc.unique(constants.column("rank")).to_pylist():
        own = constants.filter(pc.equal(constants.column("rank"), rank))
        yield _sum_sizes(own, rank, None, 0)
    dated = rows.filter(is_dated)
    order = np.lexsort([dated.column(name).to_numpy() for name in reversed(_PLACE)])
    dated = take_in_order(dated, order)
    found = split_by_place(*(dated.column(name).to_numpy() for name in _PLACE))
    parts = {(each.rank, each.iteration): (each.start, each.stop) for each in found}
    for (rank, iteration), stall_us in stalls.items():
        start, end = parts.get((rank, iteration), (0, 0))
        yield _sum_sizes(dated.slice(start, end - start), rank, iteration, stall_us)


def _sum_sizes(rows: Any, rank: int, iteration: int | None, stall_us: int) -> PlaceSizes:
    filed = rows.filter(pc.not_equal(rows.column("path"), ""))
    return PlaceSizes(
        rank=rank,
        iteration=iteration,
        stall_us=stall_us,
        paths=filed.column("path").to_pylist(),
        stored_bytes=filed.column("stored_bytes").to_pylist(),
        bytes_in=pc.sum(rows.column("bytes")).as_py() or 0,
        stamps_us=rows.column("timestamp_us").to_numpy(),
    )

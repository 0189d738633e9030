"""First start and last end of each iteration on each rank, from the files of a merged order. The
files are read in blocks, so the memory does not depend on their size. Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from rankdump._analysis.reader.coordinator_files import PublishedOrder, list_order_files
from rankdump.errors import CorruptedError

_BLOCK_BYTES = 4 << 20
_TYPES = {
    "iteration": pa.int64(),
    "ranks": pa.string(),
    "start_us": pa.int64(),
    "end_us": pa.int64(),
}
_SUMS = [("start_us", "min"), ("end_us", "max")]


def read_rank_times(order: PublishedOrder, attempt: int | None = None) -> pa.Table:
    """Return a table with `rank`, `iteration`, `start_us` and `end_us`, one row for each rank and
    iteration.

    A collective counts for all ranks that took part, from the start of the first one. An order
    without times gives no rows. CorruptedError names a file that cannot be read.
    """
    found = [*_iter_sums(order, attempt)]
    if not found:
        names = ("rank", "iteration", "start_us", "end_us")
        return pa.table({name: pa.array([], pa.int64()) for name in names})
    return _sum(pa.concat_tables(found))


def _iter_sums(order: PublishedOrder, attempt: int | None) -> Iterator[pa.Table]:
    merged = [each for each in order.merged if each.start_us and attempt in (None, each.attempt)]
    if merged:
        columns = {name: [getattr(each, name) for each in merged] for name in _TYPES}
        columns["ranks"] = [" ".join(map(str, ranks)) for ranks in columns["ranks"]]
        yield _sum_block(pa.table(columns))
    for path, _ in list_order_files(order, attempt):
        yield from _sum_file(path)


def _sum_file(path: Path) -> Iterator[pa.Table]:
    options = pyarrow.csv.ConvertOptions(column_types=_TYPES, include_columns=list(_TYPES))
    rejected: list[object] = []
    parsing = pyarrow.csv.ParseOptions(invalid_row_handler=partial(_skip_row, rejected))
    reading = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False)
    try:
        for block in pyarrow.csv.open_csv(path, reading, parsing, options):
            yield _sum_block(pa.Table.from_batches([block]))
    except (OSError, pa.ArrowException) as error:
        raise CorruptedError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    if len(rejected) > 1:  # the last line may still be being written
        raise CorruptedError(f"{path}: {len(rejected):,} lines are not lines of an order")


def _skip_row(rejected: list[object], row: object) -> str:
    rejected.append(row)
    return "skip"


def _sum_block(block: pa.Table) -> pa.Table:
    numbers = pc.split_pattern(block.column("ranks").combine_chunks(), " ")
    taken = block.take(pc.list_parent_indices(numbers))
    ranks = pc.list_flatten(numbers).cast(pa.int64())
    return _sum(taken.drop_columns(["ranks"]).append_column("rank", ranks))


def _sum(table: pa.Table) -> pa.Table:
    found = table.group_by(["rank", "iteration"]).aggregate(_SUMS)
    return found.rename_columns(["rank", "iteration", "start_us", "end_us"])

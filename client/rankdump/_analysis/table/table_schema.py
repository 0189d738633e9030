"""Columns of the tensor table: one row for each tensor that a tree keeps, and one for each
iteration of a rank. Needs pyarrow: `pip install 'rankdump[table]'`.

Rows are sorted by iteration, rank and position, so that the statistics of a row group (Apache
Parquet format, `Statistics` of a column chunk) show which groups a query has to read.
"""

from __future__ import annotations

import pyarrow as pa

from rankdump._core.statistics import MD5_ITEM, STATISTIC_TITLES

TABLE_VERSION = 1
"""Version of the table, raised when a column changes its meaning; new columns do not raise it."""
_WORDS = pa.dictionary(pa.int32(), pa.string())
STATISTIC_COLUMNS = {item: item.replace(" ", "_") for item in STATISTIC_TITLES if item != MD5_ITEM}
"""Column for each item of `statistic_category`; NULL if the item was not recorded."""
_COUNT_ITEMS = frozenset(item for item in STATISTIC_TITLES if item.endswith("count"))


def _statistic_fields() -> list[pa.Field]:
    return [
        pa.field(name, pa.int64() if item in _COUNT_ITEMS else pa.float64())
        for item, name in STATISTIC_COLUMNS.items()
    ]


TENSOR_SCHEMA = pa.schema(
    [
        pa.field("job", _WORDS),
        pa.field("attempt", pa.int32()),
        pa.field("rank", pa.int32()),
        pa.field("iteration", pa.int64()),  # NULL for a constant of a graph
        pa.field("microbatch", pa.int32()),
        pa.field("phase", _WORDS),
        # position within the rank's iteration, in execution order
        pa.field("position", pa.int32()),
        pa.field("name", _WORDS),
        pa.field("op_type", _WORDS),
        pa.field("side", _WORDS),
        pa.field("slot", pa.int32()),
        pa.field("argument", _WORDS),
        pa.field("dtype", _WORDS),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("layout", _WORDS),
        pa.field("bytes", pa.int64()),  # bytes of the elements in the framework
        pa.field("stored_bytes", pa.int64()),  # bytes on disk; 0 for a link or a row of statistics
        pa.field("digest", pa.string()),
        *_statistic_fields(),
        pa.field("md5", pa.string()),
        pa.field("fingerprint", pa.uint64()),  # digest, which adds up over shards modulo 2**64
        # 64 elements; not a list of fixed size, see decision 142.
        pa.field("sketch", pa.list_(pa.float32())),
        pa.field("path", pa.string()),  # path below the root; empty for a row of statistics
        pa.field("member", _WORDS),
        pa.field("timestamp_us", pa.int64()),
        # file in the baseline; NULL if the baseline does not have the tensor
        pa.field("same_as", pa.string()),
    ]
)
ITERATION_SCHEMA = pa.schema(
    [
        pa.field("job", _WORDS),
        pa.field("attempt", pa.int32()),
        pa.field("session", pa.string()),
        pa.field("rank", pa.int32()),
        pa.field("iteration", pa.int64()),
        pa.field("expected", pa.int64()),
        pa.field("stored", pa.int64()),
        pa.field("linked", pa.int64()),
        pa.field("degraded", pa.int64()),
        pa.field("dropped", pa.int64()),
        pa.field("dropped_by", pa.map_(pa.string(), pa.int64())),
        pa.field("degraded_by", pa.map_(pa.string(), pa.int64())),
        pa.field("bytes", pa.int64()),
        pa.field("stored_bytes", pa.int64()),
        pa.field("stall_us", pa.int64()),
        pa.field("same_as_baseline", pa.int64()),  # how many of the linked tensors
        pa.field("host", _WORDS),
    ]
)
SORT_COLUMNS = ("iteration", "rank", "position")
NONFINITE = (
    "coalesce(nan_count > 0 OR negative_inf_count > 0 OR positive_inf_count > 0, false)"
    " OR coalesce(NOT isfinite(max) OR NOT isfinite(min) OR NOT isfinite(l2norm), false)"
)
"""SQL condition: a statistic shows that an element is not finite."""

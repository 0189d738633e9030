"""How long each iteration took on each rank: by the order of all ranks where the tree has one, else
by the times of its tensors.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rankdump._analysis.reader.order_times import read_rank_times
from rankdump._web.dump_source import DumpSource
from rankdump._web.order_trace import open_order
from rankdump._web.page_kinds import AbsentPageError
from rankdump._web.rank_values import RankValues, arrange_values

_BY_ORDER = (
    "from the start of the first entry of the order to the end of the last, with collectives"
)
_BY_TENSORS = (
    "from the first tensor to the last, by the clock of the rank: no order of all ranks was used"
)
_MAX_ORDER_BYTES = 256 << 20
"""A longer order takes seconds to read."""
_FROM_TENSORS = (
    "SELECT rank, iteration, min(timestamp_us) AS start_us, max(timestamp_us) AS end_us "
    "FROM tensors WHERE iteration IS NOT NULL AND timestamp_us > 0 GROUP BY rank, iteration"
)


def read_times(source: DumpSource) -> RankValues:
    """Return milliseconds; CorruptedError for an order that cannot be read."""
    found, note = _read_order_times(source), _BY_ORDER
    if found is None or not len(found):
        found, note = source.read_table(_FROM_TENSORS), _BY_TENSORS
    ranks, iterations, starts, ends = (
        found.column(name).to_numpy() for name in ("rank", "iteration", "start_us", "end_us")
    )
    return arrange_values(ranks, iterations, (ends - starts).astype(np.float64) / 1e3, note)


def _read_order_times(source: DumpSource) -> pa.Table | None:
    """Return the times of the order; None where there is none, or it is too long for a page."""
    try:
        order = open_order(source)
    except AbsentPageError:
        return None
    size = sum(path.stat().st_size for path in order.paths)
    return read_rank_times(order, source.part.attempt) if size <= _MAX_ORDER_BYTES else None

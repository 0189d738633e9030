"""A number for each iteration of each rank, as the map of ranks shows it, and how long each took:
by the order of all ranks where the tree has one, else by the times of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankdump._analysis.reader.order_times import read_rank_times
from rankdump._web.dump_source import DumpSource
from rankdump._web.order_trace import open_order
from rankdump._web.page_kinds import AbsentPageError


@dataclass(frozen=True, slots=True)
class RankValues:
    """A statistic in each iteration of each rank."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    values: npt.NDArray[np.float64]
    """Ranks by iterations; NaN also where there is nothing."""
    is_there: npt.NDArray[np.bool_]
    note: str = ""
    """What the numbers are, where their name does not say it."""


def arrange_values(
    ranks: npt.NDArray[np.int64],
    iterations: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    note: str = "",
) -> RankValues:
    """Return values by rank and iteration, of which each place has at most one."""
    (known_ranks, row_of), (known_iterations, column_of) = (
        np.unique(column, return_inverse=True) for column in (ranks, iterations)
    )
    cells = np.full((len(known_ranks), len(known_iterations)), np.nan)
    is_there = np.zeros(cells.shape, np.bool_)
    cells[row_of, column_of] = values
    is_there[row_of, column_of] = True
    places = tuple(known_ranks.tolist()), tuple(known_iterations.tolist())
    return RankValues(*places, cells, is_there, note)


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

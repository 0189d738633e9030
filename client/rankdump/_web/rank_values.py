"""A number for each iteration of each rank, as the map of ranks shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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

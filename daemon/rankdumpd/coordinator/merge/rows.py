"""One rank's batches, joined in the order of its program, each event once. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankdump.contract.events import OPEN, Column

_SPARSE = 4
"""Up to how many positions for an event they are sorted by counting."""
_SAME = ("name", "kind", "group", "sequence")
"""What two reports of one event have in common: its times may have been corrected differently."""


def program_order(position: Column) -> Column | None:
    """Return the order of those positions; None when one of them is there twice."""
    count = len(position)
    if np.all(position[1:] > position[:-1]):
        return np.arange(count)
    low, high = int(position.min()), int(position.max())
    if high - low < _SPARSE * count:
        # Events come as they complete, so nearly every position is there: no need to compare.
        places = np.full(high - low + 1, -1, "i8")
        places[(position - position.dtype.type(low)).astype("i8")] = np.arange(count)
        order = places[places >= 0]
    else:
        order = np.argsort(position, kind="stable")
        if np.any(position[order][1:] == position[order][:-1]):
            return None
    return order if len(order) == count else None


def without_repeats(events: Mapping[str, Column]) -> tuple[Column, tuple[int, ...]]:
    """Return the order with one event of each position, and the positions where they differ.

    What is complete replaces what is not; otherwise the first one counts.
    """
    position, opened = events["position"], events["end_position"] == OPEN
    order = np.lexsort((opened, position))
    repeat = np.flatnonzero(position[order][1:] == position[order][:-1]) + 1
    again, kept = order[repeat], np.delete(order, repeat)
    first = kept[np.searchsorted(position[kept], position[again])]
    differs = np.zeros(len(repeat), dtype=bool)
    for field in _SAME:
        differs |= events[field][again] != events[field][first]
    return kept, tuple(np.unique(position[again[differs]]).tolist())

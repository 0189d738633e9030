"""Merges sorted runs, a stretch of all of them at a time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column

_STRETCH = 1 << 17
"""About how many elements are sorted at once: what they point to stays in the processor's cache,
so an element costs the same however many runs there are."""
_SAMPLES = 64
"""How many elements of a stretch are looked at to find where it ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of keys that never fall, one after the other."""

    keys: Column
    bounds: Column
    """Run i has the elements `bounds[i]` to `bounds[i + 1]`."""


def merged_runs(runs: Runs) -> Iterator[tuple[Column, Column, Column]]:
    """Yield all elements by their keys, of equal ones those of earlier runs first.

    Each time the elements of a stretch, run by run; their order; and, in that order, which run
    each is of.
    """
    cuts = _cuts(runs)
    for low, high in itertools.pairwise(cuts):
        lengths = high - low
        starts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        elements = np.repeat(low - starts, lengths) + np.arange(total)
        order = _stable_order(runs.keys[elements])
        yield elements, order, np.repeat(np.arange(len(lengths)), lengths)[order]


def _cuts(runs: Runs) -> list[Column]:
    """Return where in each run the stretches begin, and where the last one ends."""
    spacing = _STRETCH // _SAMPLES
    samples = np.sort(runs.keys[::spacing])
    pivots = samples[_SAMPLES::_SAMPLES]
    cuts = np.empty((len(pivots) + 2, len(runs.bounds) - 1), "i8")
    cuts[0], cuts[-1] = runs.bounds[:-1], runs.bounds[1:]
    for run, (low, high) in enumerate(zip(runs.bounds[:-1], runs.bounds[1:], strict=True)):
        cuts[1:-1, run] = low + np.searchsorted(runs.keys[low:high], pivots, side="left")
    return list(cuts)


def _stable_order(keys: Column) -> Column:
    """Return the stable order of some keys."""
    if not len(keys):
        return np.empty(0, "i8")
    low, high = int(keys.min()), int(keys.max())
    bits = (len(keys) - 1).bit_length()
    if (high - low) >> (63 - bits):
        return np.argsort(keys, kind="stable")
    # Numbers are sorted faster than places, so each key carries its own; and the sort that is
    # stable is the one that makes use of runs.
    packed = ((keys - low) << bits) | np.arange(len(keys))
    packed.sort(kind="stable")
    return packed & ((1 << bits) - 1)

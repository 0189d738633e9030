"""Short spelling of a set of numbers, such as ranks or iterations: `0-3,7`. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

_MAX_NAMED_RANGES = 8


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ascending ranges such as `0-3,7`; empty for no numbers."""
    return _format_runs(_find_runs(numbers))


def missing_ranges(numbers: Iterable[int], count: int) -> str:
    """Return the numbers below `count` that are missing, as ranges; `count` may be large."""
    ends = (-1, *sorted(number for number in set(numbers) if number < count), count)
    return _format_runs((low + 1, high - 1) for low, high in pairwise(ends) if high - low > 1)


def name_ranks(ranks: Collection[int]) -> str:
    """Return a text such as `rank 3` or `ranks 0-2,7`; repeated ranks count once."""
    return f"rank{'s' * (len(set(ranks)) > 1)} {ranges(ranks)}"


def name_first_ranks(ranks: Collection[int], count: int = 0) -> str:
    """Return the text of `name_ranks`, which is cut if there are very many ranges: `ranks 0-6,9 and
    20 more`.

    `count` is the number of all ranks if only the first ones are given.
    """
    named = _find_runs(ranks)[:_MAX_NAMED_RANGES]
    count = max(count, len(set(ranks)))
    more = count - sum(high - low + 1 for low, high in named)
    text = f"rank{'s' * (count != 1)} {_format_runs(named)}"
    return f"{text} and {more} more" if more else text


def group_ranks(places: Iterable[tuple[int, int]]) -> dict[str, str]:
    """Return ranks by iterations, both as ranges, from pairs of rank and iteration."""
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for rank, iteration in places:
        by_rank[rank].append(iteration)
    by_iterations: defaultdict[str, list[int]] = defaultdict(list)
    for rank, iterations in by_rank.items():
        by_iterations[ranges(iterations)].append(rank)
    return {iterations: ranges(ranks) for iterations, ranks in by_iterations.items()}


def _find_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run without a gap."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _format_runs(runs: Iterable[tuple[int, int]]) -> str:
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)

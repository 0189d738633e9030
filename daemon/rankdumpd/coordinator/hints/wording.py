"""Times, ranks and shares as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 4


def duration(us: float) -> str:
    """Return a time with the digits that matter: `2.5 ms`, `12.4 s`, `1836 s`."""
    seconds = us / 1e6
    if seconds >= 100 or seconds == int(seconds):
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{us / 1000:.0f} ms" if us >= 100_000 else f"{us / 1000:.3g} ms"


def percent(share: float) -> str:
    """Return a part of a whole."""
    return f"{share:.0%}".replace("%", " %")


def named(ranks: Sequence[int]) -> str:
    """Return ranks by number, the first few of many."""
    listed = ", ".join(map(str, ranks[:_NAMED]))
    more = len(ranks) - _NAMED
    who = "rank" if len(ranks) == 1 else "ranks"
    return f"{who} {listed}" + (f" and {more} more" if more > 0 else "")

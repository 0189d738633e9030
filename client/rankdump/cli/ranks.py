"""The table of ranks that `status` and `run` share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from rankdump.cli.table import Column, numbers, table
from rankdump.cli.tally import Tally, Totals, tallies, totals
from rankdump.cli.text import counted, ratio, size
from rankdump.contract.status import StatusView

_RowOf: TypeAlias = Callable[[str, str, tuple[Tally, ...]], list[str]]
MOST_RANKS = 64
_STATUS_COLUMNS = (
    Column("rank", right=True),
    Column("state"),
    *numbers("iterations", "expected", "stored", "linked", "degraded", "dropped"),
    *numbers("bytes in", "on disk", "ratio"),
)
_SUMMARY_COLUMNS = numbers(
    "rank", "iterations", "tensors", "linked", "bytes in", "on disk", "ratio", "dropped"
)


def status_table(
    view: StatusView, *, width: int, most: int = MOST_RANKS, folded: Collection[str] = ()
) -> list[str]:
    """Return the ranks with their full balance, job after job; at most so many of each.

    Jobs that are folded have one line each, before the others.
    """
    groups = _by_job(tallies(view))
    lines = [_job_line(job, groups[job]) for job in groups if job in folded]
    for job, ranks in groups.items():
        if job in folded:
            continue
        if len(groups) > 1:
            lines += ["", f"job {job or '(unknown)'}"]
        rows = [_status_row(str(tally.rank), tally.state, (tally,)) for tally in ranks]
        lines += table(_STATUS_COLUMNS, _bounded(rows, ranks, _status_row, most), width=width)
    return lines


def _job_line(job: str, ranks: list[Tally]) -> str:
    sums = _sums(tuple(ranks))
    states = Counter(tally.state or "unknown" for tally in ranks)
    how = ", ".join(f"{count:,} {state}" for state, count in states.items())
    kept = f"{counted(sums.kept, 'tensor')}, {size(sums.bytes_stored)}"
    iterations = f"iterations {_iterations(tuple(ranks))}"
    return f"job {job or '(unknown)'}: ranks {how}; {iterations}, {kept}, {sums.dropped:,} dropped"


def summary_table(view: StatusView, *, width: int) -> list[str]:
    """Return what was collected, rank by rank."""
    ranks = tallies(view)
    rows = [_summary_row(str(tally.rank), tally.state, (tally,)) for tally in ranks]
    return table(_SUMMARY_COLUMNS, _bounded(rows, ranks, _summary_row, MOST_RANKS), width=width)


def _by_job(ranks: Iterable[Tally]) -> dict[str, list[Tally]]:
    groups: dict[str, list[Tally]] = {}
    for tally in ranks:
        groups.setdefault(tally.job_id, []).append(tally)
    return groups


def _bounded(
    rows: list[list[str]], ranks: Iterable[Tally], row_of: _RowOf, most: int
) -> list[list[str]]:
    """Cut a long table, and close one of several ranks with its sum."""
    total = [row_of("all", "", tuple(ranks))] if len(rows) > 1 else []
    if len(rows) <= most:
        return rows + total
    left_out = ["..." for _ in rows[0]]
    return [*rows[:most], left_out, *total]


def _status_row(title: str, state: str, ranks: tuple[Tally, ...]) -> list[str]:
    sums = _sums(ranks)
    return [
        title,
        state,
        _iterations(ranks),
        *(f"{n:,}" for n in (sums.expected, sums.stored, sums.linked, sums.degraded, sums.dropped)),
        *_sizes(sums),
    ]


def _summary_row(title: str, _state: str, ranks: tuple[Tally, ...]) -> list[str]:
    sums = _sums(ranks)
    return [
        title,
        _iterations(ranks),
        f"{sums.kept:,}",
        f"{sums.linked:,}",
        *_sizes(sums),
        f"{sums.dropped:,}",
    ]


def _sums(ranks: tuple[Tally, ...]) -> Totals:
    return totals(iteration for tally in ranks for iteration in tally.iterations)


def _iterations(ranks: tuple[Tally, ...]) -> str:
    return f"{sum(t.complete for t in ranks)}/{sum(t.seen for t in ranks)}"


def _sizes(sums: Totals) -> list[str]:
    smaller = ratio(sums.bytes_in, sums.bytes_compared)
    # An agent does not count what rows of tables take; a link takes nothing.
    unknown = not sums.bytes_stored and sums.stored + sums.degraded > 0
    return [size(sums.bytes_in), "-" if unknown else size(sums.bytes_stored), smaller]

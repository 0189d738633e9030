"""Status of a job rank by rank: sums over iterations, the tables that `status` and `run` show, and
sentences about problems and their causes. Pure: no terminal, no daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from rankdump._analysis.reader.rank_tallies import (
    IterationTotals,
    RankTally,
    sum_iterations,
    tally_ranks,
)
from rankdump._cli.output import TableColumn, format_table, number_columns, without_attempts
from rankdump._cli.text_format import format_ratio
from rankdump._core.status import (
    StatusView,
)
from rankdump._core.units import format_bytes, format_count

MAX_RANKS_SHOWN = 64
_STATUS_COLUMNS = (
    *number_columns("rank", "attempt"),
    TableColumn("state"),
    *number_columns("iterations", "expected", "stored", "linked", "degraded", "dropped"),
    *number_columns("bytes in", "on disk", "ratio"),
)
_SUMMARY_COLUMNS = number_columns(
    "rank", "attempt", "iterations", "tensors", "linked", "bytes in", "on disk", "ratio", "dropped"
)


_RowFormatter: TypeAlias = Callable[[str, str, tuple[RankTally, ...]], list[str]]


def format_status_table(
    view: StatusView, *, width: int, most: int = MAX_RANKS_SHOWN, folded: Collection[str] = ()
) -> list[str]:
    """Return a table of ranks with their balances for each job, with at most `most` ranks.

    Folded jobs have one line each, before the others.
    """
    groups = _group_by_job(tally_ranks(view))
    shown = {job: ranks for job, ranks in groups.items() if job not in folded}
    return [
        *(_format_job_line(job, groups[job]) for job in groups if job in folded),
        *_format_job_tables(
            shown, _STATUS_COLUMNS, _status_row, width, most, titled=len(groups) > 1
        ),
    ]


def _format_job_tables(
    jobs: Mapping[str, list[RankTally]],
    columns: Sequence[TableColumn],
    row_of: _RowFormatter,
    width: int,
    most: int,
    *,
    titled: bool,
) -> list[str]:
    """Return a table of ranks for each job, under its name if titled."""
    lines: list[str] = []
    for job, ranks in jobs.items():
        lines += ["", f"job {job or '(unknown)'}"] if titled else []
        rows = [row_of(str(tally.rank), tally.described_state, (tally,)) for tally in ranks]
        rows = _bound_rows(rows, ranks, row_of, most)
        attempts = (tally.attempt for tally in ranks)
        lines += format_table(*without_attempts(columns, rows, attempts), width=width)
    return lines


def _format_job_line(job: str, ranks: list[RankTally]) -> str:
    sums = _sum_ranks(tuple(ranks))
    states = Counter(tally.state or "unknown" for tally in ranks)
    how = ", ".join(f"{count:,} {state}" for state, count in states.items())
    kept = f"{format_count(sums.kept, 'tensor')}, {format_bytes(sums.bytes_stored)}"
    iterations = f"iterations {_format_iterations(tuple(ranks))}"
    return f"job {job or '(unknown)'}: ranks {how}; {iterations}, {kept}, {sums.dropped:,} dropped"


def format_summary_table(view: StatusView, *, width: int) -> list[str]:
    """Return a table of what was collected from each rank, for each job."""
    jobs = _group_by_job(tally_ranks(view))
    return _format_job_tables(
        jobs, _SUMMARY_COLUMNS, _summary_row, width, MAX_RANKS_SHOWN, titled=len(jobs) > 1
    )


def _group_by_job(ranks: Iterable[RankTally]) -> dict[str, list[RankTally]]:
    groups: dict[str, list[RankTally]] = {}
    for tally in ranks:
        groups.setdefault(tally.job_id, []).append(tally)
    return groups


def _bound_rows(
    rows: list[list[str]], ranks: Iterable[RankTally], row_of: _RowFormatter, most: int
) -> list[list[str]]:
    """Cut a long table, and add the sum to a table of several ranks."""
    total = [row_of("all", "", tuple(ranks))] if len(rows) > 1 else []
    if len(rows) <= most:
        return rows + total
    left_out = ["..." for _ in rows[0]]
    return [*rows[:most], left_out, *total]


def _status_row(title: str, state: str, ranks: tuple[RankTally, ...]) -> list[str]:
    sums = _sum_ranks(ranks)
    return [
        title,
        _format_attempt(ranks),
        state,
        _format_iterations(ranks),
        *(f"{n:,}" for n in (sums.expected, sums.stored, sums.linked, sums.degraded, sums.dropped)),
        *_format_sizes(sums),
    ]


def _summary_row(title: str, _state: str, ranks: tuple[RankTally, ...]) -> list[str]:
    sums = _sum_ranks(ranks)
    return [
        title,
        _format_attempt(ranks),
        _format_iterations(ranks),
        f"{sums.kept:,}",
        f"{sums.linked:,}",
        *_format_sizes(sums),
        f"{sums.dropped:,}",
    ]


def _format_attempt(ranks: tuple[RankTally, ...]) -> str:
    """Return the attempt of a row; empty for the sum of all."""
    return str(ranks[0].attempt) if len(ranks) == 1 else ""


def _sum_ranks(ranks: tuple[RankTally, ...]) -> IterationTotals:
    return sum_iterations(iteration for tally in ranks for iteration in tally.iterations)


def _format_iterations(ranks: tuple[RankTally, ...]) -> str:
    return f"{sum(t.iterations_complete for t in ranks)}/{sum(t.iterations_seen for t in ranks)}"


def _format_sizes(sums: IterationTotals) -> list[str]:
    smaller = format_ratio(sums.bytes_in, sums.bytes_compared)
    # An agent does not count the bytes of table rows; a link takes none.
    unknown = not sums.bytes_stored and sums.stored + sums.degraded > 0
    return [
        format_bytes(sums.bytes_in),
        "-" if unknown else format_bytes(sums.bytes_stored),
        smaller,
    ]

"""Tables of a job's status: ranks, iterations and agents, as `status` and `run` show them, and the
lines below the tables. Pure: no terminal, no daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from rankdump._analysis.reader.job_sentences import (
    format_causes,
    format_findings,
    format_merge_status,
    format_timeout_hints,
)
from rankdump._analysis.reader.rank_tallies import (
    IterationTotals,
    RankTally,
    sum_iterations,
    tally_ranks,
)
from rankdump._cli.output import (
    TableColumn,
    format_ratio,
    format_reasons,
    format_table,
    number_columns,
    without_attempts,
)
from rankdump._core.status import AgentStatus, IterationStatus, StatusView
from rankdump._core.units import format_bytes, format_count, format_duration

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
_MAX_ITERATIONS_SHOWN = 6
_MAX_AGENTS_SHOWN = 6
_ITERATION_COLUMNS = (
    *number_columns("attempt", "iteration", "ranks", "expected", "stored", "linked", "degraded"),
    *number_columns("on disk", "stall"),
    TableColumn("dropped", is_flexible=True),
)
_AGENT_COLUMNS = (
    TableColumn("host", is_flexible=True),
    *number_columns("contact", "clock", "queued", "disk free", "events held", "lost"),
)


def format_status_table(
    view: StatusView, *, width: int, most: int = MAX_RANKS_SHOWN, folded: Collection[str] = ()
) -> list[str]:
    """Return a table of ranks with their balances for each job, with at most `most` ranks.

    Jobs in `folded` have one line each, before the other jobs.
    """
    jobs = _group_by_job(view)
    lines = [_format_job_line(job, ranks) for job, ranks in jobs.items() if job in folded]
    for job, ranks in jobs.items():
        if job not in folded:
            lines += _format_title(job, jobs)
            lines += _format_ranks(ranks, _STATUS_COLUMNS, _status_row, width, most)
    return lines


def format_summary_table(view: StatusView, *, width: int) -> list[str]:
    """Return a table for each job with what was collected from each rank."""
    jobs = _group_by_job(view)
    lines: list[str] = []
    for job, ranks in jobs.items():
        lines += _format_title(job, jobs)
        lines += _format_ranks(ranks, _SUMMARY_COLUMNS, _summary_row, width, MAX_RANKS_SHOWN)
    return lines


def _group_by_job(view: StatusView) -> dict[str, list[RankTally]]:
    groups: dict[str, list[RankTally]] = {}
    for tally in tally_ranks(view):
        groups.setdefault(tally.job_id, []).append(tally)
    return groups


def _format_title(job: str, jobs: Collection[str]) -> list[str]:
    return ["", f"job {job or '(unknown)'}"] if len(jobs) > 1 else []


def _format_ranks(
    ranks: Sequence[RankTally],
    columns: Sequence[TableColumn],
    make_row: Callable[[Sequence[RankTally]], list[str]],
    width: int,
    most: int,
) -> list[str]:
    """Return a table of ranks, which is cut if it is long, with the sum if there are several."""
    rows = [make_row([tally]) for tally in ranks[:most]]
    if len(ranks) > most:
        rows.append(["..." for _ in columns])
    if len(ranks) > 1:
        rows.append(make_row(ranks))
    attempts = (tally.attempt for tally in ranks)
    return format_table(*without_attempts(columns, rows, attempts), width=width)


def _format_job_line(job: str, ranks: Sequence[RankTally]) -> str:
    sums = _sum_ranks(ranks)
    states = Counter(tally.state or "unknown" for tally in ranks)
    how = ", ".join(f"{count:,} {state}" for state, count in states.items())
    kept = f"{format_count(sums.kept, 'tensor')}, {format_bytes(sums.bytes_stored)}"
    iterations = f"iterations {_format_iterations(ranks)}"
    return f"job {job or '(unknown)'}: ranks {how}; {iterations}, {kept}, {sums.dropped:,} dropped"


def _status_row(ranks: Sequence[RankTally]) -> list[str]:
    sums = _sum_ranks(ranks)
    return [
        *_name_row(ranks),
        ranks[0].described_state if len(ranks) == 1 else "",
        _format_iterations(ranks),
        *(f"{n:,}" for n in (sums.expected, sums.stored, sums.linked, sums.degraded, sums.dropped)),
        *_format_sizes(sums),
    ]


def _summary_row(ranks: Sequence[RankTally]) -> list[str]:
    sums = _sum_ranks(ranks)
    return [
        *_name_row(ranks),
        _format_iterations(ranks),
        f"{sums.kept:,}",
        f"{sums.linked:,}",
        *_format_sizes(sums),
        f"{sums.dropped:,}",
    ]


def _name_row(ranks: Sequence[RankTally]) -> tuple[str, str]:
    """Return the rank and the attempt of a row; the sum of all ranks has no attempt."""
    return (str(ranks[0].rank), str(ranks[0].attempt)) if len(ranks) == 1 else ("all", "")


def _sum_ranks(ranks: Iterable[RankTally]) -> IterationTotals:
    return sum_iterations(iteration for tally in ranks for iteration in tally.iterations)


def _format_iterations(ranks: Sequence[RankTally]) -> str:
    return f"{sum(t.iterations_complete for t in ranks)}/{sum(t.iterations_seen for t in ranks)}"


def _format_sizes(sums: IterationTotals) -> list[str]:
    smaller = format_ratio(sums.bytes_in, sums.bytes_compared)
    # An agent does not count the bytes of table rows, and a link takes none.
    unknown = not sums.bytes_stored and sums.stored + sums.degraded > 0
    return [
        format_bytes(sums.bytes_in),
        "-" if unknown else format_bytes(sums.bytes_stored),
        smaller,
    ]


def format_job_status(view: StatusView, *, width: int) -> list[str]:
    """Return the lines below the table of ranks; none unless the view is a coordinator's."""
    tables = format_job_tables(view, width=width)
    return [*tables, *_separate_parts(_list_findings(view))] if tables else []


def format_job_tables(view: StatusView, *, width: int) -> list[str]:
    """Return the tables of iterations and agents, and the progress of the merge."""
    if not (view.merges or view.agents):
        return []
    parts = (
        _iteration_table(view, width),
        _agent_table(view.agents, width),
        [format_merge_status(merge, named=len(view.merges) > 1) for merge in view.merges],
    )
    return list(_separate_parts(parts))


def format_job_findings(view: StatusView) -> list[str]:
    """Return the timeout hints and the findings of the merge."""
    return list(chain.from_iterable(_list_findings(view)))


def _list_findings(view: StatusView) -> tuple[list[str], list[str]]:
    """Return the timeout hints with their causes, and the first findings of the merge."""
    attempts = (session.attempt for session in view.sessions)
    return (
        [*format_timeout_hints(view.hints), *format_causes(view.hints, view.order_findings)],
        format_findings(view.order_findings, attempts=attempts),
    )


def _separate_parts(parts: Iterable[list[str]]) -> Iterator[str]:
    for part in parts:
        yield from ("", *part) if part else ()


def _iteration_table(view: StatusView, width: int) -> list[str]:
    by_iteration: dict[tuple[str, int, int], list[IterationStatus]] = {}
    for each in view.iterations:
        place = each.job_id, each.attempt, each.iteration
        by_iteration.setdefault(place, []).append(each)
    if not by_iteration:
        return []
    ranks = Counter(job_id for job_id, _ in {(s.job_id, s.rank) for s in view.sessions})
    last = sorted(by_iteration)[-_MAX_ITERATIONS_SHOWN:]
    rows = [_iteration_row(place, ranks[place[0]], by_iteration[place]) for place in last]
    earlier = len(by_iteration) - len(last)
    attempts = (attempt for _, attempt, _ in by_iteration)
    lines = format_table(*without_attempts(_ITERATION_COLUMNS, rows, attempts), width=width)
    return [*lines, *([f"and {format_count(earlier, 'earlier iteration')}"] if earlier else [])]


def _iteration_row(
    place: tuple[str, int, int], ranks: int, parts: list[IterationStatus]
) -> list[str]:
    sums = sum_iterations(parts)
    dropped: Counter[str] = Counter()
    for each in parts:
        dropped.update(each.dropped)
    counts = (sums.expected, sums.stored, sums.linked, sums.degraded)
    return [
        *map(str, place[1:]),
        f"{len({each.rank for each in parts if each.complete})}/{ranks}",
        *(f"{count:,}" for count in counts),
        format_bytes(sums.bytes_stored),
        format_duration(max(each.stall_us for each in parts)),
        format_reasons(dropped) or "0",
    ]


def _agent_table(agents: tuple[AgentStatus, ...], width: int) -> list[str]:
    # Agents that need attention come first.
    ordered = sorted(agents, key=lambda a: (a.connected, -a.lost_events, -a.heard_s, a.host))
    rows = [_agent_row(agent) for agent in ordered[:_MAX_AGENTS_SHOWN]]
    more = len(agents) - len(rows)
    lines = format_table(_AGENT_COLUMNS, rows, width=width) if rows else []
    return [*lines, *([f"and {format_count(more, 'more agent')}"] if more > 0 else [])]


def _agent_row(agent: AgentStatus) -> list[str]:
    contact = f"{agent.heard_s:.1f} s ago" + ("" if agent.connected else ", gone")
    clock = agent.clock
    offset = (
        f"{clock.offset_us / 1000:+.2f} ±{clock.error_us / 1000:.2f} ms" if clock.known else "-"
    )
    steps = f", set {clock.steps}x" if clock.steps else ""
    return [
        agent.host,
        contact,
        offset + steps,
        f"{agent.load.queued_records:,}",
        format_bytes(agent.load.disk_free_bytes) if agent.load.disk_total_bytes else "-",
        f"{agent.held_events:,}",
        f"{agent.lost_events:,}",
    ]

"""Tables of iterations and agents, and what `status` shows below them. Pure: no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rankdump._analysis.reader.job_sentences import (
    format_causes,
    format_findings,
    format_merge_status,
    format_timeout_hints,
)
from rankdump._analysis.reader.rank_tallies import sum_iterations
from rankdump._cli.output import TableColumn, format_table, number_columns, without_attempts
from rankdump._cli.text_format import format_reasons
from rankdump._core.status import AgentStatus, IterationStatus, StatusView
from rankdump._core.units import format_bytes, format_count, format_duration

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


def format_job_status(view: StatusView, *, width: int) -> list[str]:
    """Return the lines below the table of ranks; none for a view that is not a coordinator's."""
    if not (view.merges or view.agents):
        return []
    tables = format_job_tables(view, width=width)
    found = (
        [*format_timeout_hints(view.hints), *format_causes(view.hints, view.order_findings)],
        _format_view_findings(view),
    )
    return [*tables, *_separate_parts(found)]


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
    return [
        *format_timeout_hints(view.hints),
        *format_causes(view.hints, view.order_findings),
        *_format_view_findings(view),
    ]


def _format_view_findings(view: StatusView) -> list[str]:
    """Return the first findings of the merge in a view."""
    attempts = (session.attempt for session in view.sessions)
    return format_findings(view.order_findings, attempts=attempts)


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
    rows = [
        [
            str(attempt),
            *_iteration_row(number, ranks[job_id], by_iteration[job_id, attempt, number]),
        ]
        for job_id, attempt, number in last
    ]
    earlier = len(by_iteration) - len(last)
    attempts = (attempt for _, attempt, _ in by_iteration)
    lines = format_table(*without_attempts(_ITERATION_COLUMNS, rows, attempts), width=width)
    return [*lines, *([f"and {format_count(earlier, 'earlier iteration')}"] if earlier else [])]


def _iteration_row(iteration: int, ranks: int, parts: list[IterationStatus]) -> list[str]:
    sums = sum_iterations(parts)
    dropped: Counter[str] = Counter()
    for each in parts:
        dropped.update(each.dropped)
    counts = (sums.expected, sums.stored, sums.linked, sums.degraded)
    return [
        str(iteration),
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
        format_bytes(agent.load.disk_free_bytes),
        f"{agent.held_events:,}",
        f"{agent.lost_events:,}",
    ]

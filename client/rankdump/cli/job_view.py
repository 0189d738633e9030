"""What a coordinator knows of a job beyond its ranks: iterations, agents, order, hints. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rankdump.cli.table import Column, numbers, table
from rankdump.cli.tally import totals
from rankdump.cli.text import counted, duration, reasons, size
from rankdump.contract.findings import Finding
from rankdump.contract.status import AgentStatus, IterationStatus, MergeStatus, StatusView
from rankdump.contract.timeouts import HintLevel, TimeoutHint

_MOST_ITERATIONS = 6
_MOST_AGENTS = 6
_MOST_FINDINGS = 5
_ITERATION_COLUMNS = (
    *numbers("iteration", "ranks", "expected", "stored", "linked", "degraded"),
    *numbers("on disk", "stall"),
    Column("dropped", flexible=True),
)
_AGENT_COLUMNS = (
    Column("host", flexible=True),
    *numbers("heard", "clock", "queued", "disk free", "events held", "lost"),
)


def job_lines(view: StatusView, *, width: int) -> list[str]:
    """Return the lines below the table of ranks; none for a view that no coordinator gave."""
    if not (view.merges or view.agents):
        return []
    found = (hint_lines(view.hints), finding_lines(view.order_findings))
    return [*job_tables(view, width=width), *_parted(found)]


def job_tables(view: StatusView, *, width: int) -> list[str]:
    """Return how iterations, agents and the merge stand."""
    if not (view.merges or view.agents):
        return []
    parts = (
        _iterations(view, width),
        _agents(view.agents, width),
        [merge_line(merge, named=len(view.merges) > 1) for merge in view.merges],
    )
    return list(_parted(parts))


def job_findings(view: StatusView) -> list[str]:
    """Return what asks for something, and what the merge found."""
    return [*hint_lines(view.hints), *finding_lines(view.order_findings)]


def _parted(parts: Iterable[list[str]]) -> Iterator[str]:
    for part in parts:
        yield from ("", *part) if part else ()


def merge_line(merge: MergeStatus, *, named: bool) -> str:
    """Return how far the merged order is."""
    done = counted(merge.published_iterations, "iteration")
    text = f"order: {done} published ({counted(merge.published_events, 'event')})"
    if merge.pending_iterations:
        text += (
            f", {merge.pending_iterations} under way ({counted(merge.pending_events, 'event')}, "
            f"{merge.lag_s:.1f} s behind)"
        )
    return f"job {merge.job_id}, {text}" if named else text


def hint_lines(hints: Iterable[TimeoutHint]) -> list[str]:
    """Return the hints that ask for something; the widest wait when none does."""
    hints = tuple(hints)
    urgent = urgent_lines(hints)
    known = [hint for hint in hints if hint.limit is not None]
    if urgent or not known:
        return urgent
    widest = max(known, key=lambda hint: hint.share)
    assert widest.limit is not None
    return [
        f"timeouts: the widest wait was {duration(widest.spread_us)}, {widest.share:.1%} of "
        f"{duration(widest.limit.limit_us)} ({widest.limit.name}, group {widest.group!r})"
    ]


def urgent_lines(hints: Iterable[TimeoutHint]) -> list[str]:
    """Return the hints that ask for something, with the lines to set."""
    return [
        line
        for hint in hints
        if hint.level is not HintLevel.OK
        for line in (f"timeout {hint.level.value}: {hint.reason}", *_set(hint.settings))
    ]


def finding_lines(findings: tuple[Finding, ...], *, where: str = "") -> list[str]:
    """Return what the merge found, the first of many; `where` is the tree that has the others."""
    shown = [f"{finding.kind.value}: {finding.text}" for finding in findings[:_MOST_FINDINGS]]
    more = len(findings) - len(shown)
    if more > 0:
        command = f"rankdump order {where} --findings" if where else "rankdump order --findings"
        shown.append(f"... {counted(more, 'more finding')}: {command}")
    return shown


def _iterations(view: StatusView, width: int) -> list[str]:
    by_iteration: dict[tuple[str, int], list[IterationStatus]] = {}
    for each in view.iterations:
        by_iteration.setdefault((each.job_id, each.iteration), []).append(each)
    if not by_iteration:
        return []
    ranks = Counter(job_id for job_id, _ in {(s.job_id, s.rank) for s in view.sessions})
    last = sorted(by_iteration)[-_MOST_ITERATIONS:]
    rows = [_iteration_row(place[1], ranks[place[0]], by_iteration[place]) for place in last]
    earlier = len(by_iteration) - len(last)
    lines = table(_ITERATION_COLUMNS, rows, width=width)
    return [*lines, *([f"and {counted(earlier, 'earlier iteration')}"] if earlier else [])]


def _iteration_row(iteration: int, ranks: int, parts: list[IterationStatus]) -> list[str]:
    sums = totals(parts)
    dropped: Counter[str] = Counter()
    for each in parts:
        dropped.update(each.dropped)
    counts = (sums.expected, sums.stored, sums.linked, sums.degraded)
    return [
        str(iteration),
        f"{len({each.rank for each in parts if each.complete})}/{ranks}",
        *(f"{count:,}" for count in counts),
        size(sums.bytes_stored),
        duration(max(each.stall_us for each in parts)),
        reasons(dropped) or "0",
    ]


def _agents(agents: tuple[AgentStatus, ...], width: int) -> list[str]:
    # Those that people should look at come first.
    ordered = sorted(agents, key=lambda a: (a.connected, -a.lost_events, -a.heard_s, a.host))
    rows = [_agent_row(agent) for agent in ordered[:_MOST_AGENTS]]
    more = len(agents) - len(rows)
    lines = table(_AGENT_COLUMNS, rows, width=width) if rows else []
    return [*lines, *([f"and {counted(more, 'more agent')}"] if more > 0 else [])]


def _agent_row(agent: AgentStatus) -> list[str]:
    heard = f"{agent.heard_s:.1f} s ago" + ("" if agent.connected else ", gone")
    clock = agent.clock
    offset = (
        f"{clock.offset_us / 1000:+.2f} ±{clock.error_us / 1000:.2f} ms" if clock.known else "-"
    )
    steps = f", set {clock.steps}x" if clock.steps else ""
    return [
        agent.host,
        heard,
        offset + steps,
        f"{agent.load.queued_records:,}",
        size(agent.load.disk_free_bytes),
        f"{agent.held_events:,}",
        f"{agent.lost_events:,}",
    ]


def _set(settings: Iterable[str]) -> list[str]:
    return [f"  set: {line}" for line in settings]

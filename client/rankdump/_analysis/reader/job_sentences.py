"""Sentences about a job that `status` and the live page show besides its ranks: merge, timeouts,
findings, freezes, and the use and limits of disks, jobs and memory; and about the result of an
order to the job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rankdump._core.events import Finding
from rankdump._core.job_control import ControlAction, ControlResult
from rankdump._core.number_ranges import name_ranks
from rankdump._core.status import (
    BlackBoxStatus,
    DiskStatus,
    JobUsage,
    LedgerStatus,
    MergeStatus,
    PackBacklog,
    StatusView,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_bytes, format_count, format_duration, format_percentage

_MAX_FINDINGS_SHOWN = 5


def format_merge_status(merge: MergeStatus, *, named: bool) -> str:
    """Return the progress of the merged order."""
    done = format_count(merge.published_iterations, "iteration")
    text = f"order: {done} published ({format_count(merge.published_events, 'event')})"
    if merge.pending_iterations:
        text += (
            f", {merge.pending_iterations} under way "
            f"({format_count(merge.pending_events, 'event')}, "
            f"{merge.lag_s:.1f} s behind)"
        )
    return f"job {merge.job_id}, {text}" if named else text


def format_timeout_hints(hints: Iterable[TimeoutHint]) -> list[str]:
    """Return the hints that call for action; if there are none, the widest wait."""
    hints = tuple(hints)
    urgent = format_urgent_hints(hints)
    known = [hint for hint in hints if hint.limit is not None]
    if urgent or not known:
        return urgent
    widest = max(known, key=lambda hint: hint.share)
    assert widest.limit is not None
    return [
        f"timeouts: the widest wait was {format_duration(widest.spread_us)}, "
        f"{format_percentage(widest.share)} of {format_duration(widest.limit.limit_us)} "
        f"({widest.limit.name}, group {widest.group!r})"
    ]


def format_causes(hints: Iterable[TimeoutHint], findings: Iterable[Finding]) -> list[str]:
    """Return a line for each cause that a longer timeout does not cure, unless a
    finding states it.
    """
    known = {finding.text for finding in findings}
    causes = dict.fromkeys(hint.cause for hint in hints if hint.cause)
    return [f"a longer timeout does not help: {cause}" for cause in causes if cause not in known]


def format_urgent_hints(hints: Iterable[TimeoutHint]) -> list[str]:
    """Return the hints that call for action, with the settings to change."""
    return [
        line
        for hint in hints
        if hint.level is not HintLevel.OK and not hint.cause
        for line in (
            f"timeout {hint.level.value}: {hint.reason}",
            *(f"  set: {setting}" for setting in hint.settings),
        )
    ]


def format_findings(
    findings: tuple[Finding, ...], *, where: str = "", attempts: Iterable[int] = ()
) -> list[str]:
    """Return the first findings of the merge; `where` is the tree that has the remaining ones.

    `attempts` contains the attempts of the job; if there are several, each finding names its own.
    """
    several = any((*attempts, *(finding.attempt for finding in findings)))
    shown = [
        f"{finding.kind.value}{f', attempt {finding.attempt}' if several else ''}: {finding.text}"
        for finding in findings[:_MAX_FINDINGS_SHOWN]
    ]
    more = len(findings) - len(shown)
    if more > 0:
        command = f"rankdump order {where} --findings" if where else "rankdump order --findings"
        shown.append(f"... {format_count(more, 'more finding')}: {command}")
    return shown


def format_freezes(view: StatusView) -> list[str]:
    """Return a line for each freeze of a black box."""
    freezes = view.black_box.freezes
    several = len({each.job_id for each in freezes}) > 1
    return [
        f"frozen at iteration {each.iteration}{f' of job {each.job_id}' if several else ''}: "
        f"{each.text}; {f'rankdump faults {each.root}' if each.root else 'its tree is not written'}"
        for each in freezes
    ]


def _format_black_box(black_box: BlackBoxStatus) -> str:
    held = format_count(black_box.steps, "step")
    text = f"black box: {held} of ranks, {format_bytes(black_box.step_bytes)}"
    dropped = format_dropped(black_box.dropped_steps, black_box.dropped_tensors)
    return f"{text}; {dropped} dropped because memory was short" if dropped else text


def format_dropped(steps: int, tensors: int) -> str:
    """Return what a black box has dropped; empty if nothing."""
    counts = ((steps, "older step"), (tensors, "older full tensor"))
    return " and ".join(format_count(count, what) for count, what in counts if count)


def format_resource_usage(view: StatusView) -> list[str]:
    """Return lines about the queue, and about use and limits of memory, disks, ledger and jobs."""
    load = view.load
    queued = (
        f"queued: {format_count(load.queued_records, 'tensor')}, {format_bytes(load.queued_bytes)}"
    )
    memory = view.memory
    if memory.limit_bytes:
        queued += (
            f"; memory: {format_bytes(memory.used_bytes)} of {format_bytes(memory.limit_bytes)}"
        )
    if load.disk_total_bytes and not view.disks:
        queued += (
            f"; disk: {format_bytes(load.disk_free_bytes)} free of "
            f"{format_bytes(load.disk_total_bytes)}"
        )
    ledger = [_format_ledger(view.ledger)] if view.ledger.folder else []
    backlog = [_format_backlog(view.backlog)] if view.backlog.waiting_files else []
    has_steps = view.black_box.steps or view.black_box.dropped_steps
    backlog += [_format_black_box(view.black_box)] if has_steps else []
    return [queued, *backlog, *map(_format_disk, view.disks), *ledger, *_format_jobs(view)]


def _format_backlog(backlog: PackBacklog) -> str:
    waiting = format_count(backlog.waiting_files, "file")
    return f"to be packed: {waiting}, {format_bytes(backlog.waiting_bytes)}"


def _format_disk(disk: DiskStatus) -> str:
    if not disk.total_bytes:
        return f"disk of {disk.root}: the free space is not known"
    free = f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
    kept = f", {format_bytes(disk.floor_bytes)} of it reserved" if disk.floor_bytes else ""
    files = f", {disk.free_inodes:,} free inodes" if disk.total_inodes else ""
    taken = _format_share(disk.used_bytes, disk.limit_bytes)
    return f"disk of {disk.root}: {free}{kept}{files}; dumps use {taken}"


def _format_ledger(ledger: LedgerStatus) -> str:
    taken = f"ledger in {ledger.folder}: {format_bytes(ledger.used_bytes)}"
    if not ledger.total_bytes:
        return taken
    return f"{taken}; {format_bytes(ledger.free_bytes)} free of {format_bytes(ledger.total_bytes)}"


def _format_share(used: int, limit: int) -> str:
    return f"{format_bytes(used)} of {format_bytes(limit)}" if limit else format_bytes(used)


def _format_jobs(view: StatusView) -> Iterator[str]:
    # The table of ranks already shows the size if there is a single job without a limit.
    several = len(view.usage) > 1
    for job in view.usage:
        if several or job.limit_bytes or job.pinned or job.retired_iterations:
            yield _format_job(job)


def _format_job(job: JobUsage) -> str:
    parts = [_format_share(job.bytes_stored, job.limit_bytes)]
    if job.pinned:
        parts.append("pinned")
    if job.retired_iterations:
        parts.append(f"{format_count(job.retired_iterations, 'manifest')} retired")
    return f"job {job.job_id}: {', '.join(parts)}"


def format_result(
    job_id: str, action: ControlAction, values: Sequence[str], result: ControlResult
) -> list[str]:
    """Return lines about the result of an order: what begins in which iteration, and which ranks
    differ.
    """
    what = " ".join((action.value, *values))
    changed = [each.rank for each in result.ranks if each.iteration is not None]
    is_freeze = action is ControlAction.FREEZE
    done = "frozen" if is_freeze else "changed"
    if result.iteration is None or not changed:
        lines = [f"job {job_id}: {what}: no rank is {done}"]
    else:
        how = f"{what} from iteration {result.iteration} on"
        if is_freeze:
            how = f"frozen at iteration {result.iteration} (rankdump faults)"
        lines = [f"job {job_id}: {how}, {name_ranks(changed)}"]
    return [*lines, *_format_ranks(result, done)]


def _format_ranks(result: ControlResult, done: str) -> Iterator[str]:
    """Yield lines about ranks that differ; each line names all ranks that it is true for."""
    by_text: dict[str, list[int]] = {}
    for each in result.exceptions:
        begins = f"not {done}" if each.iteration is None else f"from iteration {each.iteration} on"
        begins = "not confirmed" if each.unconfirmed else begins
        by_text.setdefault(f"{begins}: {each.reason}", []).append(each.rank)
    for each in result.ranks:
        if each.note:
            by_text.setdefault(each.note, []).append(each.rank)
    yield from (f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items())

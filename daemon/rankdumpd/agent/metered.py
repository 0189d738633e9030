"""Numbers of an agent for monitoring: what batches add up to, and how it stands. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rankdump.contract.exchange import IterationEnd
from rankdump.contract.reasons import known
from rankdump.contract.room import DiskStatus, LedgerStatus, MetricSample
from rankdump.contract.status import StatusView
from rankdumpd.agent.values import Fate, Judged, Outcome
from rankdumpd.metric_names import MOST_OPEN, Key

_RECORDS = "rankdump_agent_records_total"
_DROPPED = "rankdump_agent_dropped_records_total"


def of_frames(outcomes: Iterable[Outcome], judged: Iterable[Judged]) -> dict[Key, float]:
    """Return what records and rows of figures add, as they stand in the ledger."""
    fates: Counter[Fate] = Counter()
    reasons: Counter[str] = Counter()
    received = stored = 0
    for outcome in outcomes:
        fates[outcome.fate] += 1
        received += outcome.head.byte_count
        stored += outcome.bytes_stored
        if outcome.reason:
            reasons[outcome.reason] += 1
    for frame in judged:
        fates[frame.fate] += frame.kept
        for reason, places in frame.refused.items():
            fates[Fate.DROPPED] += len(places)
            reasons[reason] += len(places)
    found: dict[Key, float] = {
        ("rankdump_agent_received_bytes_total", ()): received,
        ("rankdump_agent_stored_bytes_total", ()): stored,
    }
    for fate, count in fates.items():
        found[_RECORDS, (("fate", fate.value),)] = count
    return found | _drops(reasons, "agent")


def of_end(end: IterationEnd) -> dict[Key, float]:
    """Return what a rank says at the end of an iteration adds."""
    found: dict[Key, float] = {
        ("rankdump_agent_iterations_total", ()): 1,
        ("rankdump_agent_stall_seconds_total", ()): end.stall_us / 1e6,
        (_RECORDS, (("fate", Fate.DROPPED.value),)): sum(end.dropped.values()),
    }
    return found | _drops(end.dropped, "rank")


def of_status(view: StatusView) -> Iterator[MetricSample]:
    """Yield how an agent stands; of many disks or jobs the fullest or largest."""
    load, memory = view.load, view.memory
    yield MetricSample("rankdump_agent_queue_records", load.queued_records)
    yield MetricSample("rankdump_agent_queue_bytes", load.queued_bytes)
    yield MetricSample("rankdump_agent_memory_limit_bytes", memory.limit_bytes)
    states = Counter(session.state for session in view.sessions)
    for state, count in states.items():
        yield MetricSample("rankdump_agent_sessions", count, {"state": state.value})
    for disk in sorted(view.disks, key=lambda each: each.free_bytes)[:MOST_OPEN]:
        yield from _of_disk(disk)
    for job in sorted(view.usage, key=lambda each: -each.bytes_stored)[:MOST_OPEN]:
        yield MetricSample("rankdump_agent_job_bytes", job.bytes_stored, {"job": job.job_id})


def of_memory(
    *, queue_bytes: int, queue_limit_bytes: int, slab_bytes: int
) -> Iterator[MetricSample]:
    """Yield what is taken of the agent's memory."""
    yield MetricSample("rankdump_agent_queue_limit_bytes", queue_limit_bytes)
    yield MetricSample("rankdump_agent_memory_bytes", queue_bytes, {"part": "queue"})
    yield MetricSample("rankdump_agent_memory_bytes", slab_bytes, {"part": "slabs"})


def of_ledger(ledger: LedgerStatus) -> Iterator[MetricSample]:
    """Yield what the ledger takes, and what its disk has left."""
    yield MetricSample("rankdump_agent_ledger_bytes", ledger.used_bytes)
    yield MetricSample("rankdump_agent_ledger_disk_free_bytes", ledger.free_bytes)


def of_report(waiting: int, lost: int) -> Iterator[MetricSample]:
    """Yield how many events the coordinator has still to hear, and how many it never will."""
    yield MetricSample("rankdump_agent_report_waiting_events", waiting)
    yield MetricSample("rankdump_agent_report_lost_events_total", lost)


def _of_disk(disk: DiskStatus) -> Iterator[MetricSample]:
    labels = {"root": disk.root}
    yield MetricSample("rankdump_agent_disk_free_bytes", disk.free_bytes, labels)
    yield MetricSample("rankdump_agent_disk_size_bytes", disk.total_bytes, labels)
    yield MetricSample("rankdump_agent_disk_floor_bytes", disk.floor_bytes, labels)


def _drops(reasons: Mapping[str, int], by: str) -> dict[Key, float]:
    """Return drops by the words there are: what a rank says may be any text."""
    found: dict[Key, float] = {}
    for reason, count in reasons.items():
        key = _DROPPED, (("by", by), ("reason", known(reason)))
        found[key] = found.get(key, 0) + count
    return found

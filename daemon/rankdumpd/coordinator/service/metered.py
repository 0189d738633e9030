"""How a coordinator stands, for monitoring. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rankdump.contract.room import MetricSample
from rankdump.contract.timeouts import HintLevel
from rankdumpd.coordinator.values import Fleet


def of_fleet(fleet: Fleet) -> Iterator[MetricSample]:
    """Yield what is gathered of all jobs and agents, added up."""
    jobs = fleet.jobs.values()
    connected = sum(agent.connected for agent in fleet.agents)
    states = {"connected": connected, "silent": len(fleet.agents) - connected}
    for state, count in states.items():
        yield MetricSample("rankdump_coordinator_agents", count, {"state": state})
    lost = sum(agent.lost_events for agent in fleet.agents)
    yield MetricSample("rankdump_coordinator_agent_lost_events", lost)
    yield MetricSample("rankdump_coordinator_jobs", len(fleet.jobs))
    merges = [job.merge for job in jobs]
    pending = sum(merge.pending_iterations for merge in merges)
    yield MetricSample("rankdump_coordinator_pending_iterations", pending)
    events = sum(merge.pending_events for merge in merges)
    yield MetricSample("rankdump_coordinator_pending_events", events)
    lag_s = max((merge.lag_s for merge in merges), default=0.0)
    yield MetricSample("rankdump_coordinator_merge_lag_seconds", lag_s)
    kinds = Counter(finding.kind for job in jobs for finding in job.findings)
    for kind, count in kinds.items():
        yield MetricSample("rankdump_coordinator_findings", count, {"kind": kind.value})
    yield from _of_hints(fleet)


def _of_hints(fleet: Fleet) -> Iterator[MetricSample]:
    hints = [hint for job in fleet.jobs.values() for hint in job.hints]
    levels = Counter(hint.level for hint in hints)
    for level in HintLevel:
        labels = {"level": level.value}
        yield MetricSample("rankdump_coordinator_timeout_hints", levels[level], labels)
    used = max((hint.share for hint in hints), default=0.0)
    yield MetricSample("rankdump_coordinator_timeout_used_ratio", used)

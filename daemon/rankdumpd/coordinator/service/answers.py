"""What the coordinator answers people and scripts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankdump.contract.errors import RefusedError
from rankdump.contract.findings import Finding
from rankdump.contract.status import AgentStatus, OrderEntry, StatusView, total_load
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.views import entry_to_wire, finding_to_wire
from rankdumpd.coordinator.values import Fleet, JobView

_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1 << 20
_MAX_BALANCES = 20_000
"""Balances in one answer: more of them would pass the limit that gRPC sets for a message."""
_MAX_SESSIONS = 8_192
_MAX_FINDINGS = 2_000


def chosen(fleet: Fleet, job_id: str) -> list[JobView]:
    """Return the job of that id, or every job when there is no id; RefusedError if unknown."""
    if not job_id:
        return list(fleet.jobs.values())
    if job_id not in fleet.jobs:
        known = ", ".join(fleet.jobs) or "none"
        raise RefusedError(f"job {job_id!r} has not reported; known: {known}")
    return [fleet.jobs[job_id]]


def status_of(fleet: Fleet, jobs: Sequence[JobView], problem: str) -> StatusView:
    """Return the whole picture of some jobs; `problem` is the coordinator's own."""
    sessions = [session for job in jobs for session in job.sessions]
    balances = [balance for job in jobs for balance in job.iterations]
    findings = [finding for job in jobs for finding in job.findings]
    older = sum(job.older_iterations for job in jobs) + max(0, len(balances) - _MAX_BALANCES)
    more = sum(job.more_findings for job in jobs) + max(0, len(findings) - _MAX_FINDINGS)
    left_out = {
        "older sessions are not in this answer": max(0, len(sessions) - _MAX_SESSIONS),
        "older balances are not in this answer": older,
        "more findings are in the files beside the order": more,
    }
    return StatusView(
        sessions=tuple(sessions[-_MAX_SESSIONS:]),
        iterations=tuple(balances[-_MAX_BALANCES:]),
        load=total_load(agent.load for agent in fleet.agents),
        roots=tuple(dict.fromkeys(root for job in jobs for root in job.roots)),
        findings=tuple(_sentences(fleet.agents, left_out, problem)),
        agents=fleet.agents,
        merges=tuple(job.merge for job in jobs),
        hints=tuple(hint for job in jobs for hint in job.hints),
        order_findings=tuple(findings[-_MAX_FINDINGS:]),
    )


def pages(parts: Iterable[OrderEntry | Finding]) -> Iterator[pb.OrderResponse]:
    """Return entries and findings in pages that a message can hold."""
    page, size = pb.OrderResponse(), 0
    for part in parts:
        if isinstance(part, Finding):
            message = finding_to_wire(part)
            page.findings.append(message)
        else:
            message = entry_to_wire(part)
            page.entries.append(message)
        size += message.ByteSize()
        if len(page.entries) + len(page.findings) == _PAGE_ENTRIES or size > _PAGE_BYTES:
            yield page
            page, size = pb.OrderResponse(), 0
    if size:
        yield page


def _sentences(
    agents: Iterable[AgentStatus], left_out: Mapping[str, int], problem: str
) -> Iterator[str]:
    if problem:
        yield f"{problem}; nothing is acknowledged until it can be"
    yield from (f"{count} {what}" for what, count in left_out.items() if count)
    yield from map(_lost, (agent for agent in agents if agent.lost_events))


def _lost(agent: AgentStatus) -> str:
    return f"{agent.lost_events} events of {agent.host or agent.agent_id} never came here"

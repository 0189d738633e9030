"""What outlived an earlier process, remembered. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rankdumpd.coordinator.gather.agents import Agents
from rankdumpd.coordinator.gather.job import Job
from rankdumpd.coordinator.kept import (
    AgentRow,
    BalanceRow,
    FindingRow,
    JobRow,
    LateRow,
    PublishedRow,
    Row,
    SessionRow,
    SettledRow,
    TimeoutsRow,
)


def recall(
    rows: Iterable[Row], jobs: dict[str, Job], agents: Agents, *, now_s: float, now_us: int
) -> None:
    """Fill jobs and agents; agents come first among the rows, published iterations before balances.

    What an agent was not told to forget it will say again, after the events that came before it;
    until then it must not make an iteration look complete.
    """
    acknowledged: dict[str, int] = {}
    for row in rows:
        if isinstance(row, AgentRow):
            agents.restore(row, now_s=now_s, now_us=now_us)
            acknowledged[row.agent_id] = row.acknowledged
        elif isinstance(row, JobRow):
            job = jobs[row.job_id] = Job(row.job_id, now_s=now_s)
            job.first_s = now_s - (now_us - row.first_us) / 1e6
            job.heard_s = now_s - max(0, now_us - row.heard_us) / 1e6
            job.roots = dict.fromkeys(row.roots)
        elif isinstance(row, SessionRow | BalanceRow):
            known = acknowledged.get(row.agent_id, 0)
            _recall_status(row, jobs[row.status.job_id], acknowledged=known)
            if row.sequence <= known and row.agent_id in agents.all:
                agents.all[row.agent_id].jobs.add(row.status.job_id)
        else:
            _recall_part(row, jobs)


def _recall_status(row: SessionRow | BalanceRow, job: Job, *, acknowledged: int) -> None:
    if isinstance(row, SessionRow):
        job.recall_session(row, acknowledged=acknowledged)
    elif row.sequence > acknowledged:
        job.ranks.recall_balance(row.status)
    else:
        job.ranks.take_balance(row.status, needed=job.needs(row.status.iteration))


def _recall_part(row: Row, jobs: Mapping[str, Job]) -> None:
    if isinstance(row, PublishedRow):
        jobs[row.job_id].published.recall(row)
    elif isinstance(row, LateRow):
        jobs[row.job_id].published.recall_late(row)
    elif isinstance(row, FindingRow):
        jobs[row.job_id].findings.append(row.finding)
    elif isinstance(row, TimeoutsRow):
        jobs[row.job_id].ranks.take_timeouts(row.rank, row.timeouts)
    elif isinstance(row, SettledRow):
        job = jobs[row.job_id]
        job.book, job.hint_state, job.more_findings = row.book, row.hint_state, row.more_findings

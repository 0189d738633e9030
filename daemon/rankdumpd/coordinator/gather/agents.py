"""The agents that report, and how far each may forget; its owner holds the lock. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rankdump.contract.errors import ExhaustedError
from rankdump.contract.status import AgentStatus, ClockEstimate, Load
from rankdumpd.coordinator.kept import AgentRow
from rankdumpd.coordinator.values import Report

SILENT_S = 5.0
"""Agents report once a second."""
MAX_AGENTS = 1 << 14
"""Each is remembered for days after it was heard last."""


@dataclass(slots=True)
class Agent:
    """One of them."""

    agent_id: str
    heard_s: float
    host: str = ""
    received: int = 0
    acknowledged: int = 0
    """Safe, and on disk."""
    streams: int = 0
    clock: ClockEstimate = field(default_factory=ClockEstimate)
    load: Load = field(default_factory=Load)
    held_events: int = 0
    lost_events: int = 0
    jobs: set[str] = field(default_factory=set[str])

    def take(self, report: Report, *, now_s: float) -> None:
        """Take what a report says of its agent."""
        self.heard_s = now_s
        self.host = report.host or self.host
        self.clock, self.load = report.clock, report.load
        self.held_events, self.lost_events = report.held_events, report.lost_events

    def first_number(self, report: Report) -> int:
        """Return the lowest number that an item of a report may have."""
        return max(self.received + 1, report.sequence - report.items + 1)

    def words(self, *, now_s: float) -> str:
        """Say how far behind it is."""
        silent_s, name = now_s - self.heard_s, f"the agent of {self.host or self.agent_id}"
        if silent_s >= SILENT_S:
            return f"{name} was last heard {silent_s:.0f} s ago"
        held, queued = self.held_events, self.load.queued_records
        return f"{name} has {held:,} events to report, and {queued:,} records under way"

    def status(self, *, now_s: float) -> AgentStatus:
        """Return how it stands."""
        return AgentStatus(
            agent_id=self.agent_id,
            host=self.host,
            heard_s=max(0.0, now_s - self.heard_s),
            connected=self.streams > 0,
            clock=self.clock,
            held_events=self.held_events,
            lost_events=self.lost_events,
            load=self.load,
        )


class Agents:
    """All that ever reported."""

    def __init__(self) -> None:
        self.all: dict[str, Agent] = {}
        self._rows: dict[str, tuple[str, int]] = {}

    def of(self, agent_id: str, *, now_s: float) -> Agent:
        """Return an agent, known or new; ExhaustedError when there are too many."""
        if agent_id not in self.all and len(self.all) >= MAX_AGENTS:
            raise ExhaustedError(f"{len(self.all)} agents are known, and no more are taken")
        return self.all.setdefault(agent_id, Agent(agent_id, now_s))

    def words(self, *, now_s: float) -> dict[str, str]:
        """Return how each agent stands, in words."""
        return {name: agent.words(now_s=now_s) for name, agent in self.all.items()}

    def restore(self, row: AgentRow, *, now_s: float, now_us: int) -> None:
        """Remember an agent."""
        heard_s = now_s - max(0, now_us - row.heard_us) / 1e6
        agent = Agent(row.agent_id, heard_s, row.host, row.acknowledged, row.acknowledged)
        self.all[row.agent_id] = agent
        self._rows[row.agent_id] = row.host, row.acknowledged

    def rows(
        self, lowest: Iterable[Mapping[str, int]], *, now_s: float, now_us: int
    ) -> list[AgentRow]:
        """Return the agents of which more is safe than before.

        `lowest` has, for each iteration that is not published, the first number of each agent.
        """
        safe = {name: agent.received for name, agent in self.all.items()}
        for numbers in lowest:
            for name, number in numbers.items():
                if name in safe:
                    safe[name] = min(safe[name], number - 1)
        return [
            AgentRow(name, agent.host, safe[name], now_us - int((now_s - agent.heard_s) * 1e6))
            for name, agent in self.all.items()
            if self._rows.get(name) != (agent.host, safe[name])
        ]

    def committed(self, row: AgentRow) -> None:
        """Remember that a row is on disk."""
        agent = self.all.get(row.agent_id)
        if agent is not None:
            agent.acknowledged = row.acknowledged
            self._rows[row.agent_id] = row.host, row.acknowledged

    def forget(self, *, before_s: float) -> list[str]:
        """Forget those that were not heard since then, and name them."""
        gone = [name for name, a in self.all.items() if a.heard_s < before_s and not a.streams]
        for name in gone:
            del self.all[name]
            self._rows.pop(name, None)
        return gone

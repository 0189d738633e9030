"""The agents that report, and how far each may forget; its owner holds the lock. No I/O."""

from __future__ import annotations

from collections import defaultdict
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
    host_id: str = ""
    """Which host of that name."""
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
        self.host, self.host_id = report.host or self.host, report.host_id or self.host_id
        self.clock, self.load = report.clock, report.load
        self.held_events, self.lost_events = report.held_events, report.lost_events

    def first_number(self, report: Report) -> int:
        """Return the lowest number that an item of a report may have."""
        return max(self.received + 1, report.sequence - report.items + 1)

    def words(self, host: str, *, now_s: float) -> str:
        """Say how far behind it is; `host` is what its host is called."""
        silent_s, name = now_s - self.heard_s, f"the agent of {host or self.agent_id}"
        if silent_s >= SILENT_S:
            return f"{name} was last heard {silent_s:.0f} s ago"
        held, queued = self.held_events, self.load.queued_records
        return f"{name} has {held:,} events to report, and {queued:,} records under way"

    def status(self, host: str, *, now_s: float) -> AgentStatus:
        """Return how it stands; `host` is what its host is called."""
        return AgentStatus(
            agent_id=self.agent_id,
            host=host,
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
        hosts = self.hosts()
        return {name: a.words(hosts[name][1], now_s=now_s) for name, a in self.all.items()}

    def hosts(self) -> dict[str, tuple[str, str]]:
        """Return the name of the host of each agent, and what it is called among the others."""
        return called({name: (agent.host, agent.host_id) for name, agent in self.all.items()})

    def statuses(self, *, now_s: float) -> tuple[AgentStatus, ...]:
        """Return how each agent stands."""
        hosts = self.hosts()
        return tuple(a.status(hosts[name][1], now_s=now_s) for name, a in self.all.items())

    def restore(self, row: AgentRow, *, now_s: float, now_us: int) -> None:
        """Remember an agent."""
        heard_s = now_s - max(0, now_us - row.heard_us) / 1e6
        known = row.acknowledged
        agent = Agent(row.agent_id, heard_s, row.host, received=known, acknowledged=known)
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


def called(hosts: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the name of each host, and that name with its id where several hosts have it.

    >>> called({"a": ("node", "1"), "b": ("node", "1"), "c": ("localhost", "1")})["b"]
    ('node', 'node')
    >>> called({"a": ("localhost", "1"), "b": ("localhost", "2")})["b"]
    ('localhost', 'localhost (2)')
    """
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for host, host_id in hosts.values():
        ids[host].add(host_id)
    return {
        agent: (host, f"{host} ({host_id or agent})" if len(ids[host]) > 1 else host)
        for agent, (host, host_id) in hosts.items()
    }

"""How the ranks of one job stand; its owner holds the lock. No I/O, and no clock."""

from __future__ import annotations

from collections.abc import Mapping

from rankdump.contract.events import OPEN
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.contract.timeouts import Timeouts
from rankdumpd.coordinator.values import Heard, JobFacts

MAX_BALANCES = 20_000
"""Balances of a job that are kept in memory to be shown; all of them stand in the state."""
MAX_DONE = 200_000
"""Balances of iterations that are not published; those of ranks without events never are."""


class Ranks:
    """Sessions, balances and limits of all ranks of a job; the newest session speaks for a rank."""

    def __init__(self) -> None:
        self.world_size = 0
        self.sessions: dict[str, SessionStatus] = {}
        self.balances: dict[tuple[str, int], IterationStatus] = {}
        self.forgotten_balances = 0
        self.stalls: dict[int, int] = {}
        """How long dumping had held each rank up, as its newest session said last."""
        self.heard_us: dict[int, int] = {}
        """Up to when all that each rank began has come."""
        self._agents: dict[str, str] = {}
        """The agent of each session."""
        self._timeouts: dict[int, Timeouts] = {}
        self._newest: dict[int, str] = {}
        self._spoken: set[str] = set()
        """Sessions that count: not those that are only remembered and will be said again."""
        self._lives: dict[int, int] = {}
        """Sessions that each rank has had."""
        self._starts: dict[str, int] = {}
        self._done: dict[int, dict[str, IterationStatus]] = {}
        self._done_count = 0

    def take_session(self, session: SessionStatus, agent_id: str = "") -> None:
        """Take the state of a session of an agent."""
        name = session.session_id
        self.recall_session(session)
        self._agents[name] = agent_id
        if name in self._spoken:
            return
        self._spoken.add(name)
        self._newest[session.rank] = name
        self.world_size = session.world_size

    def recall_session(self, session: SessionStatus) -> None:
        """Remember a session that its agent will speak of again; until then it decides nothing."""
        name, rank = session.session_id, session.rank
        self.sessions[name] = session
        if name not in self._starts:
            self._starts[name] = self._lives.get(rank, 0)
            self._lives[rank] = self._starts[name] + 1

    def start_of(self, rank: int, session_id: str = "") -> int:
        """Return how often a rank had started over before a session, or before its newest one."""
        return self._starts.get(session_id or self._newest.get(rank, ""), 0)

    def take_balance(self, status: IterationStatus, *, needed: bool) -> None:
        """Take a balance; `needed` while its iteration is not published."""
        self.recall_balance(status)
        if needed and status.complete:
            done = self._done.setdefault(status.iteration, {})
            self._done_count += status.session_id not in done
            done[status.session_id] = status
            if self._done_count > MAX_DONE:
                self.published(next(iter(self._done)))

    def recall_balance(self, status: IterationStatus) -> None:
        """Remember a balance that its agent will say again; until then it decides nothing."""
        self.balances[status.session_id, status.iteration] = status
        if len(self.balances) > MAX_BALANCES:
            del self.balances[next(iter(self.balances))]
            self.forgotten_balances += 1

    def take_timeouts(self, rank: int, timeouts: Timeouts) -> None:
        """Take what a rank knows of its limits."""
        self._timeouts[rank] = timeouts

    def hear(self, rank: int, until_us: int) -> None:
        """Note that all that a rank began before a time has come."""
        self.heard_us[rank] = max(until_us, self.heard_us.get(rank, until_us))

    def heard(self, agents: Mapping[str, str]) -> dict[int, Heard]:
        """Return how far each rank is known; `agents` says in words how each agent stands."""
        heard = {
            rank: Heard(until_us, agents.get(self._agents.get(self._newest.get(rank, ""), ""), ""))
            for rank, until_us in self.heard_us.items()
        }
        # Who said goodbye has nothing more to say.
        over = (r for r, n in self._newest.items() if self.sessions[n].state is SessionState.CLOSED)
        return heard | dict.fromkeys(over, Heard(OPEN))

    def has_left(self, rank: int, session_id: str) -> bool:
        """Return whether a rank has a newer session than that one."""
        newest = self._newest.get(rank)
        return bool(session_id and newest) and session_id != newest

    def published(self, iteration: int) -> None:
        """Forget who had finished an iteration: nobody asks again."""
        self._done_count -= len(self._done.pop(iteration, {}))

    def finished(self, iteration: int) -> set[int]:
        """Return the ranks from which nothing more of an iteration is to be expected."""
        done = self._done.get(iteration, {})
        return {
            rank
            for rank, name in self._newest.items()
            if rank < self.world_size and (name in done or self._is_over(name))
        }

    def all_declared(self, iteration: int) -> bool:
        """Return whether every rank has said that it finished an iteration."""
        return 0 < self.world_size <= len(self._done.get(iteration, {}))

    def all_over(self) -> bool:
        """Return whether there are sessions and none of them will send more."""
        return bool(self._newest) and all(map(self._is_over, self._newest.values()))

    def excluded(self) -> frozenset[int]:
        """Return the ranks that the plan leaves out."""
        return frozenset(r for r, name in self._newest.items() if self.sessions[name].excluded)

    def spans(self, iteration: int) -> dict[int, tuple[int, int]]:
        """Return first and last position of an iteration in each rank that said so."""
        done = self._done.get(iteration, {})
        found = ((rank, done.get(name)) for rank, name in self._newest.items())
        return {
            rank: (status.first_position, status.last_position)
            for rank, status in found
            if status is not None and (status.first_position or status.last_position)
        }

    def tells(self, session_id: str, agent_id: str) -> None:
        """Note which agent speaks of a session."""
        self._agents[session_id] = agent_id

    def clocks(self, hosts: Mapping[str, tuple[str, str]]) -> dict[int, str]:
        """Return the host of each rank, under a name that no other host has.

        `hosts` has of each agent the name of its host, and what that is called among the others. A
        rank with another name than its agent's host is in a container, or on another host.
        """
        found: dict[int, str] = {}
        for rank, name in self._newest.items():
            own = self.sessions[name].host
            host, called = hosts.get(self._agents.get(name, ""), ("", ""))
            found[rank] = own if not host else called if own == host else f"{own} at {called}"
        return found

    def facts(self, job_id: str) -> JobFacts:
        """Return what hints need to know."""
        sessions = {rank: self.sessions[name] for rank, name in self._newest.items()}
        return JobFacts(job_id, dict(self._timeouts), sessions)

    def _is_over(self, name: str) -> bool:
        session = self.sessions[name]
        return session.state is SessionState.CLOSED or bool(session.excluded)

"""Progress of one job: the sessions, balances and timeouts of its ranks, its published iterations,
and the events that arrived too late for them. No I/O and no clock; the owner holds the lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rankdump._core.events import OPEN_END_POSITION, EventColumns, Finding, FindingKind
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdumpd.coordinator.fleet_views import JobFacts, RankCoverage
from rankdumpd.coordinator.state import LateEventsRow, PublishedIterationRow, StateRow

MAX_BALANCES = 20_000
"""Largest number of balances of a job that are kept in memory for the status; the state has all of
them.
"""
MAX_COMPLETE_BALANCES = 200_000
"""Largest number of balances of unpublished iterations; iterations without events are never
published.
"""


class ProgramPlace(NamedTuple):
    """A place in the program of a rank; positions rise from one iteration to the next."""

    position: int
    iteration: int


class RankRegistry:
    """Sessions, balances and timeout limits of all ranks of a job; for each rank the newest session
    counts.
    """

    def __init__(self) -> None:
        self.world_size = 0
        self.sessions: dict[str, SessionStatus] = {}
        self.balances: dict[tuple[str, int], IterationStatus] = {}
        self.forgotten_balances = 0
        self.stalls: dict[int, int] = {}
        """Microseconds that dumping has stalled each rank, as last reported by its
        newest session.
        """
        self.known_until_us: dict[int, int] = {}
        """Time up to which every event that a rank began has arrived."""
        self._agents: dict[str, str] = {}
        """Id of the agent of each session."""
        self._timeouts: dict[int, RankTimeouts] = {}
        self._newest: dict[int, str] = {}
        self._counted: set[str] = set()
        """Ids of the sessions that count; a restored session does not until its agent reports it
        again.
        """
        self._start_counts: dict[int, int] = {}
        """Number of sessions that each rank has had."""
        self._starts: dict[str, int] = {}
        self._done: dict[int, dict[str, IterationStatus]] = {}
        self._done_count = 0
        self._last_places: dict[str, ProgramPlace] = {}
        """The last place that each session has reported, by session id."""
        self._elastic_attempt = 0
        """Latest attempt of a launcher that restarts all ranks together."""

    def update_session(self, session: SessionStatus, agent_id: str = "") -> None:
        """Update a session with the state that an agent has reported."""
        name = session.session_id
        self.restore_session(session)
        self._agents[name] = agent_id
        if name in self._counted:
            return
        self._counted.add(name)
        self._newest[session.rank] = name
        self.world_size = session.world_size
        if session.is_elastic:
            self._elastic_attempt = max(self._elastic_attempt, session.attempt)

    def restore_session(self, session: SessionStatus) -> None:
        """Restore a session that its agent will report again; until then the session does not
        count.
        """
        name, rank = session.session_id, session.rank
        known = self.sessions.get(name)
        if known is not None and known.last_events_known and session.state is SessionState.LOST:
            # A restarted agent does not know that the earlier agent process had read all events.
            session = dataclasses.replace(session, last_events_known=True)
        self.sessions[name] = session
        if name not in self._starts:
            self._starts[name] = self._start_counts.get(rank, 0)
            self._start_counts[rank] = self._starts[name] + 1

    def count_earlier_starts(self, rank: int, session_id: str = "") -> int:
        """Return the number of restarts of a rank before a session, by default before its newest
        one.
        """
        return self._starts.get(session_id or self._newest.get(rank, ""), 0)

    def update_balance(self, status: IterationStatus, *, needed: bool) -> None:
        """Add a balance; `needed` says that its iteration is not published yet."""
        self.restore_balance(status)
        if needed and status.complete:
            done = self._done.setdefault(status.iteration, {})
            self._done_count += status.session_id not in done
            done[status.session_id] = status
            if self._done_count > MAX_COMPLETE_BALANCES:
                self.forget_iteration(next(iter(self._done)))

    def restore_balance(self, status: IterationStatus) -> None:
        """Restore a balance that its agent will report again; until then the balance does not
        count.
        """
        self.balances[status.session_id, status.iteration] = status
        if status.last_position:
            self.note_place(status.session_id, status.last_position, status.iteration)
        if len(self.balances) > MAX_BALANCES:
            del self.balances[next(iter(self.balances))]
            self.forgotten_balances += 1

    def update_timeouts(self, rank: int, timeouts: RankTimeouts) -> None:
        """Set the timeout limits that a rank has read."""
        self._timeouts[rank] = timeouts

    def update_known_until(self, rank: int, until_us: int) -> None:
        """Store that every event that a rank began before a time has arrived."""
        self.known_until_us[rank] = max(until_us, self.known_until_us.get(rank, until_us))

    def build_coverage(self, agents: Mapping[str, str]) -> dict[int, RankCoverage]:
        """Return up to when each rank is known; `agents` contains a sentence on the state of each
        agent.
        """
        coverage = {
            rank: RankCoverage(
                until_us, agents.get(self._agents.get(self._newest.get(rank, ""), ""), "")
            )
            for rank, until_us in self.known_until_us.items()
        }
        # A closed session reports no more events, so its rank is known completely.
        closed = (
            r for r, n in self._newest.items() if self.sessions[n].state is SessionState.CLOSED
        )
        return coverage | dict.fromkeys(closed, RankCoverage(OPEN_END_POSITION))

    def has_left(self, rank: int, session_id: str) -> bool:
        """Return whether a rank has a newer session than this one, or is about to begin one."""
        newest = self._newest.get(rank)
        is_older = bool(session_id and newest) and session_id != newest
        return is_older or self._is_superseded(session_id)

    def get_attempt(self, session_id: str) -> int:
        """Return the attempt of a session; 0 for a session that has not been reported."""
        session = self.sessions.get(session_id)
        return session.attempt if session is not None else 0

    def is_elastic(self, session_id: str) -> bool:
        """Return whether the launcher of a session restarts all ranks together."""
        session = self.sessions.get(session_id)
        return session is not None and session.is_elastic

    def forget_superseded_balances(self) -> None:
        """Forget which iterations were finished by sessions of earlier attempts."""
        newest = set(self._newest.values())
        for iteration, done in list(self._done.items()):
            left = [name for name in done if name not in newest or self._is_superseded(name)]
            for name in left:
                del done[name]
            self._done_count -= len(left)
            if not done:
                del self._done[iteration]

    def forget_iteration(self, iteration: int) -> None:
        """Forget which ranks had finished an iteration."""
        self._done_count -= len(self._done.pop(iteration, {}))

    def find_finished(self, iteration: int) -> set[int]:
        """Return the ranks that will not report any more events of an iteration."""
        done = self._done.get(iteration, {})
        return {
            rank
            for rank, name in self._newest.items()
            if rank < self.world_size
            and (name in done or self._has_session_ended(name))
            and not self._is_superseded(name)
        }

    def is_finished_by_all(self, iteration: int) -> bool:
        """Return whether every rank has reported an iteration as complete."""
        return 0 < self.world_size <= len(self._done.get(iteration, {}))

    def has_ended(self) -> bool:
        """Return whether there are sessions and all of them have ended."""
        return bool(self._newest) and all(
            self._has_session_ended(name) or self._is_superseded(name)
            for name in self._newest.values()
        )

    def list_agents(self) -> frozenset[str]:
        """Return the agents of all sessions."""
        return frozenset(filter(None, self._agents.values()))

    def list_open_agents(self) -> frozenset[str]:
        """Return the agents whose newest sessions have not ended."""
        opened = (
            self._agents.get(name, "")
            for name in self._newest.values()
            if not (self._has_session_ended(name) or self._is_superseded(name))
        )
        return frozenset(filter(None, opened))

    def list_excluded(self) -> frozenset[int]:
        """Return the ranks that the plan excludes."""
        return frozenset(r for r, name in self._newest.items() if self.sessions[name].excluded)

    def list_spans(self, iteration: int) -> dict[int, tuple[int, int]]:
        """Return the first and last position of an iteration in each rank that has
        reported them.
        """
        done = self._done.get(iteration, {})
        found = ((rank, done.get(name)) for rank, name in self._newest.items())
        return {
            rank: (status.first_position, status.last_position)
            for rank, status in found
            if status is not None and (status.first_position or status.last_position)
        }

    def list_lost(self, starts: Mapping[int, int]) -> dict[int, bool]:
        """Return the ranks whose session was lost, and for each whether its last events are known.

        `starts` contains the number of restarts after which a rank's session counts; by default the
        newest session counts.
        """
        return {
            session.rank: session.last_events_known
            for session in self._iter_newest_sessions(starts)
            if session.state is SessionState.LOST
        }

    def note_place(self, session_id: str, position: int, iteration: int) -> None:
        """Note the position and iteration that a session has reported."""
        place = ProgramPlace(position, iteration)
        self._last_places[session_id] = max(place, self._last_places.get(session_id, place))

    def list_last_places(self, starts: Mapping[int, int]) -> dict[int, ProgramPlace]:
        """Return the last place that each rank has reported; `starts` as above."""
        return {
            session.rank: self._last_places[session.session_id]
            for session in self._iter_newest_sessions(starts)
            if session.session_id in self._last_places
        }

    def list_raised(self, starts: Mapping[int, int]) -> dict[int, int]:
        """Return the ranks whose session was ended by an error, with the iteration; `starts` as in
        `list_lost`.
        """
        return {
            session.rank: session.raised_in
            for session in self._iter_newest_sessions(starts)
            if session.raised_in is not None
        }

    def _iter_newest_sessions(self, starts: Mapping[int, int]) -> Iterator[SessionStatus]:
        for name, session in self.sessions.items():
            newest = starts.get(session.rank, self.count_earlier_starts(session.rank))
            if self._starts.get(name) == newest:
                yield session

    def set_agent(self, session_id: str, agent_id: str) -> None:
        """Set the agent that reports a session."""
        self._agents[session_id] = agent_id

    def list_agent_ranks(self, attempt: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks of an attempt whose sessions have not ended, by agent."""
        found: dict[str, list[int]] = {}
        for rank, name in sorted(self._newest.items()):
            session, agent = self.sessions[name], self._agents.get(name, "")
            ended = session.state is SessionState.CLOSED or session.excluded
            if session.attempt == attempt and not ended:
                found.setdefault(agent, []).append(rank)
        return {agent: tuple(ranks) for agent, ranks in found.items()}

    def name_clocks(self, hosts: Mapping[str, tuple[str, str]]) -> dict[int, str]:
        """Return the host of each rank, under a name that no other host has.

        `hosts` contains, for each agent, the name of its host and the unique name that is shown for
        the host. If a rank reports another host name than its agent, it is in a container or on
        another host.
        """
        found: dict[int, str] = {}
        for rank, name in self._newest.items():
            own = self.sessions[name].host
            host, shown = hosts.get(self._agents.get(name, ""), ("", ""))
            found[rank] = own if not host else shown if own == host else f"{own} at {shown}"
        return found

    def build_facts(self, job_id: str) -> JobFacts:
        """Return the timeouts and sessions that hints are computed from."""
        sessions = {rank: self.sessions[name] for rank, name in self._newest.items()}
        return JobFacts(job_id, dict(self._timeouts), sessions)

    def _has_session_ended(self, name: str) -> bool:
        session = self.sessions[name]
        ended = session.state is SessionState.CLOSED or session.last_events_known
        return ended or bool(session.excluded)

    def _is_superseded(self, name: str) -> bool:
        """Return whether all ranks have been restarted since a session began."""
        session = self.sessions.get(name)
        return (
            session is not None and session.is_elastic and session.attempt < self._elastic_attempt
        )


_LAST_POSITION = (1 << 63) - 1


class PublishedIterations:
    """Published iterations of all runs of a job; changed state rows are put into `rows`."""

    def __init__(self, job_id: str, rows: dict[object, StateRow]) -> None:
        self._job_id = job_id
        self._changed = rows
        # State rows of iterations that are being published; they must not be written before the end
        # of the publication.
        self._in_publication: dict[tuple[int, int], dict[object, StateRow]] = {}
        self._rows: dict[int, dict[int, PublishedIterationRow]] = {}
        """Rows of published iterations, by iteration and run."""
        self._late: dict[tuple[int, int, int], int] = {}
        self._starts: dict[int, int] = {}
        """Number of restarts of each rank that the present run contains."""
        self.run = 0
        """Number of the present run; a rank that is restarted begins a new run."""
        self.attempt = 0
        """Number of the attempt that the present run belongs to."""
        self.iterations = 0
        """Number of iterations whose order is in the tree."""
        self.events = 0

    def __contains__(self, iteration: int) -> bool:
        """Return whether the present run has published an iteration."""
        return self.run in self._rows.get(iteration, {})

    def enter_run(
        self, rank: int, start: int, attempt: int = 0, *, is_elastic: bool = False
    ) -> bool:
        """Add a start of a rank to the present run; return whether a new run begins with it.

        A new run begins if the present one contains an earlier start of the rank, or if all ranks
        were restarted since it began.
        """
        before = self._starts.get(rank)
        if before is None:
            before = self._find_published_start(rank, start)
        was_restarted = is_elastic and bool(self._starts) and attempt > self.attempt
        is_new = before < start or was_restarted
        if is_new:
            self.run += 1
            self._starts.clear()
        self.attempt = max(self.attempt, attempt)
        self._starts[rank] = start if is_new else before
        return is_new

    def select_unknown(
        self, iteration: int, rank: int, start: int, part: EventColumns
    ) -> EventColumns:
        """Return the events of this start of a rank that are neither published nor counted as late.

        The agent of a rank resends events that the coordinator may have lost.
        """
        for row in self._rows.get(iteration, {}).values():
            if not row.has_rank(rank) or row.start_of(rank) != start:
                continue
            beyond = part.columns["position"] > row.positions.get(rank, _LAST_POSITION)
            columns = {name: column[beyond] for name, column in part.columns.items()}
            part = dataclasses.replace(part, columns=columns)
        return part

    def start_iteration(self, row: PublishedIterationRow) -> None:
        """Begin to publish an iteration; events that arrive from now on are late."""
        self._keep(row)
        self._in_publication[row.run, row.iteration] = {}

    def finish_iteration(self, run: int, iteration: int, *, written: bool) -> None:
        """Count an iteration as published, or as lost if its order was not written."""
        row = self._rows[iteration][run]
        if not written:
            row = dataclasses.replace(row, events=0)
            self._keep(row)
        self._count(row)
        self._changed.update(self._in_publication.pop((run, iteration)))
        self._changed["published", run, iteration] = row

    def restore(self, row: PublishedIterationRow) -> None:
        """Restore the row of a published iteration."""
        self._keep(row)
        self._count(row)
        self.run = max(self.run, row.run)

    def restore_late(self, row: LateEventsRow) -> None:
        """Restore the number of late events of a rank."""
        self._late[row.run, row.iteration, row.rank] = row.events

    def count_late(
        self, run: int, iteration: int, rank: int, start: int, part: EventColumns
    ) -> None:
        """Count events of this start of a rank that arrived too late for the iteration of a run."""
        changed = self._in_publication.get((run, iteration), self._changed)
        row = self._rows.get(iteration, {}).get(run)
        if row is not None and (not row.has_rank(rank) or row.start_of(rank) == start):
            reached = {**row.positions, rank: int(part.columns["position"].max())}
            starts = {**row.starts, rank: start} if row.start_of(rank) != start else row.starts
            row = dataclasses.replace(row, positions=reached, starts=starts)
            self._keep(row)
            changed["published", run, iteration] = row
        key = run, iteration, rank
        self._late[key] = self._late.get(key, 0) + len(part)
        changed[("late", *key)] = LateEventsRow(self._job_id, *key, self._late[key])

    def build_late_findings(self, most: int) -> Iterator[Finding]:
        """Yield at most `most` findings about events that arrived too late."""
        for (_, iteration, rank), count in list(self._late.items())[:most]:
            text = (
                f"iteration {iteration}: {count} events of rank {rank} arrived after its "
                "publication and are not in the order"
            )
            yield Finding(FindingKind.LATE, iteration, text, ranks=(rank,))

    def _keep(self, row: PublishedIterationRow) -> None:
        self._rows.setdefault(row.iteration, {})[row.run] = row

    def _find_published_start(self, rank: int, start: int) -> int:
        """Return the start of a rank that an earlier process has published in the present run;
        `start` if there is none.
        """
        for runs in reversed(self._rows.values()):
            row = runs.get(self.run)
            if row is not None and row.has_rank(rank):
                return row.start_of(rank)
        return start

    def _count(self, row: PublishedIterationRow) -> None:
        self.events += row.events
        self.iterations += row.events > 0

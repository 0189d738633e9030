"""Reads an agent's reports from the wire; what contradicts itself is refused as a whole."""

from __future__ import annotations

import dataclasses

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import EventColumns
from rankdump.contract.status import ClockEstimate, IterationStatus, RankEvents, SessionStatus
from rankdump.contract.timeouts import Timeouts
from rankdump.wire.convert import MAX_WORLD_SIZE, timeouts_from_wire
from rankdump.wire.events import events_from_wire
from rankdump.wire.fields import common
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.views import iteration_from_wire, load_from_wire, session_from_wire
from rankdumpd.coordinator.values import Report

MAX_TEXTS = 1 << 18
"""Texts of one stream: four times what makes an agent start anew."""
_LARGEST = (1 << 63) - 1


class Reader:
    """Reads the reports of one stream, which share their texts."""

    def __init__(self) -> None:
        # Batches keep the list that was theirs, and it only grows.
        self._texts = [""]
        self._agent_id = ""

    def read(self, message: coordinator_pb2.ReportRequest) -> Report:
        """Return a report; ProtocolError when any part of it cannot be."""
        agent_id = message.agent_id
        if not agent_id or self._agent_id not in ("", agent_id):
            raise ProtocolError(f"report {message.sequence} of {agent_id!r} on another's stream")
        self._agent_id = agent_id
        if message.HasField("texts"):
            self._take_texts(message.texts)
        clock = ClockEstimate(**common(message.clock, ClockEstimate))
        return Report(
            agent_id=agent_id,
            sequence=_bounded("number of a report", message.sequence),
            sessions=tuple(_session(session_from_wire(each)) for each in message.sessions),
            iterations=tuple(_balance(iteration_from_wire(each)) for each in message.iterations),
            events=tuple(self._events(each, clock) for each in message.events),
            timeouts=tuple(map(_timeouts, message.timeouts)),
            roots={job_id: _root(job_id, root) for job_id, root in message.roots.items()},
            host=message.host,
            clock=clock,
            load=load_from_wire(message.load),
            held_events=message.held_events,
            lost_events=message.lost_events,
        )

    def _take_texts(self, message: coordinator_pb2.Texts) -> None:
        if not message.first:
            if message.texts and message.texts[0]:
                raise ProtocolError(f"text 0 is {message.texts[0][:80]!r} and not the empty one")
            self._texts = list(message.texts) or [""]
        elif message.first == len(self._texts):
            self._texts.extend(message.texts)
        else:
            raise ProtocolError(f"text {message.first} after {len(self._texts)} texts")
        if len(self._texts) > MAX_TEXTS:
            raise ProtocolError(f"{len(self._texts)} texts on one stream; at most {MAX_TEXTS}")

    def _events(
        self, message: coordinator_pb2.RankEvents, clock: ClockEstimate
    ) -> tuple[RankEvents, EventColumns]:
        _named("events", message.job_id, message.rank)
        try:
            columns = events_from_wire(message.columns, self._texts)
        except OverflowError as error:
            raise ProtocolError(f"events of rank {message.rank}: {error}") from None
        if len(columns):
            _bounded("iteration of events", int(columns.columns["iteration"].max()))
        source = RankEvents(message.job_id, message.rank, message.session_id)
        return source, _corrected(columns, clock)


def _corrected(columns: EventColumns, clock: ClockEstimate) -> EventColumns:
    """Return a batch with the times of the coordinator's clock, where they surely differ."""
    if not clock.known or abs(clock.offset_us) <= clock.error_us:
        return columns
    times = {name: columns.columns[name] + clock.offset_us for name in ("start_us", "end_us")}
    return dataclasses.replace(columns, columns={**columns.columns, **times})


def _session(session: SessionStatus) -> SessionStatus:
    if not session.job_id or not session.session_id:
        raise ProtocolError(f"session of rank {session.rank} without a job id or a session id")
    if not 0 <= session.rank < session.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(f"rank {session.rank} of {session.world_size}: rank must be below it")
    return session


def _balance(status: IterationStatus) -> IterationStatus:
    if not status.job_id or not status.session_id:
        raise ProtocolError(f"balance of rank {status.rank} without a job id or a session id")
    _bounded("iteration", status.iteration)
    return status


def _timeouts(message: coordinator_pb2.RankTimeouts) -> tuple[str, int, Timeouts]:
    _named("timeouts", message.job_id, message.rank)
    return message.job_id, message.rank, timeouts_from_wire(message.timeouts)


def _named(what: str, job_id: str, rank: int) -> None:
    if not job_id:
        raise ProtocolError(f"{what} of rank {rank} without a job id")
    if rank >= MAX_WORLD_SIZE:
        raise ProtocolError(f"{what} of rank {rank}: at most {MAX_WORLD_SIZE} ranks")


def _bounded(what: str, number: int) -> int:
    if number > _LARGEST:
        raise ProtocolError(f"{what} is {number}; at most {_LARGEST}")
    return number


def _root(job_id: str, root: str) -> str:
    if not job_id or not root.startswith("/") or "\0" in root:
        raise ProtocolError(f"tree {root!r} of job {job_id!r} is not an absolute path")
    return root

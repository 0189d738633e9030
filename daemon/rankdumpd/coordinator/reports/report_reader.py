"""Reader that converts agents' reports from the wire; an invalid report is rejected as a whole."""

from __future__ import annotations

import dataclasses

from rankdump._core.events import EventColumns
from rankdump._core.status import (
    AgentLoad,
    ClockEstimate,
    EventSource,
    IterationStatus,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.black_box_messages import (
    is_known_freeze,
    job_freeze_from_wire,
    rank_step_from_wire,
)
from rankdump._wire.control_messages import answer_from_wire
from rankdump._wire.message_fields import (
    MAX_NAME_CHARACTERS,
    check_count,
    check_numbers,
    check_text,
    from_message,
    make_notes_printable,
    make_printable,
)
from rankdump._wire.metadata_messages import events_from_wire
from rankdump._wire.session_messages import (
    MAX_JOB_ID_CHARACTERS,
    MAX_WORLD_SIZE,
    check_rank,
    reasons_from_wire,
    timeouts_from_wire,
)
from rankdump._wire.status_messages import iteration_from_wire, load_from_wire, session_from_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import coordinator_pb2
from rankdumpd.coordinator.fleet_views import AgentReport, ReportedRankCoverage

MAX_TEXTS = 1 << 18
"""Largest number of texts on one stream; an agent starts a new table at a quarter of it."""
MAX_TEXT_CHARACTERS = 1 << 26
"""Largest number of characters of all texts on one stream."""
MAX_AGENT_ID = 128
_MAX_REPORT_PARTS = 1 << 16
"""Largest number of sessions, of balances, of batches of events and the like in one report."""
_MAX_REPORT_FREEZES = 256
"""Largest number of freezes in one report, which has those of a minute."""
_MAX_CLOCK_OFFSET_US = 1 << 60
"""Largest offset and error of a clock in microseconds, because the sum with a time must fit into 64
bits.
"""


class ReportReader:
    """Reads the reports of one stream, which share one table of texts."""

    def __init__(self) -> None:
        # Batches refer to this list, so it is only extended, or replaced by a new list.
        self._texts = [""]
        self._characters = 0
        self._agent_id = ""

    def read(self, message: coordinator_pb2.ReportRequest) -> AgentReport:
        """Return a report from its message; ProtocolError when any part of the message
        is invalid.
        """
        agent_id = message.agent_id
        if not agent_id or self._agent_id not in ("", agent_id):
            raise ProtocolError(
                f"report {message.sequence} of agent {agent_id[:80]!r} "
                f"on the stream of {self._agent_id!r}"
            )
        if len(agent_id) > MAX_AGENT_ID or not agent_id.isprintable():
            raise ProtocolError(
                f"agent id {agent_id[:80]!r} is not printable, or longer than {MAX_AGENT_ID}"
            )
        self._agent_id = agent_id
        _check_size(message)
        if message.HasField("texts"):
            self._take_texts(message.texts)
        clock = _read_clock(message.clock)
        return AgentReport(
            agent_id=agent_id,
            sequence=message.sequence,
            sessions=tuple(_check_session(session_from_wire(each)) for each in message.sessions),
            iterations=tuple(
                _check_balance(iteration_from_wire(each)) for each in message.iterations
            ),
            events=tuple(self._events(each, clock) for each in message.events),
            timeouts=tuple(map(_read_timeouts, message.timeouts)),
            roots={job_id: _check_root(job_id, root) for job_id, root in message.roots.items()},
            coverage=tuple(_read_rank_coverage(each, clock) for each in message.heard),
            host=make_printable(message.host),
            host_id=make_printable(message.host_id),
            clock=clock,
            load=_check_load(load_from_wire(message.load)),
            held_events=message.held_events,
            control_answers=tuple(map(answer_from_wire, message.control_answers)),
            lost_events=message.lost_events,
            freezes=tuple(map(job_freeze_from_wire, filter(is_known_freeze, message.freezes))),
            steps=tuple(map(rank_step_from_wire, message.steps)),
        )

    def _take_texts(self, message: coordinator_pb2.Texts) -> None:
        for text in message.texts:
            check_text("text", text)
        added = sum(map(len, message.texts))
        self._characters = added + (self._characters if message.first else 0)
        check_count("characters of texts on one stream", self._characters, MAX_TEXT_CHARACTERS)
        if not message.first:
            if message.texts and message.texts[0]:
                raise ProtocolError(f"text 0 is {message.texts[0][:80]!r}; it must be empty")
            self._texts = list(message.texts) or [""]
        elif message.first == len(self._texts):
            self._texts.extend(message.texts)
        else:
            raise ProtocolError(
                f"text {message.first} after {len(self._texts)} texts; numbers must be consecutive"
            )
        if len(self._texts) > MAX_TEXTS:
            raise ProtocolError(f"{len(self._texts)} texts on one stream; at most {MAX_TEXTS}")

    def _events(
        self, message: coordinator_pb2.RankEvents, clock: ClockEstimate
    ) -> tuple[EventSource, EventColumns]:
        _check_source("events", message.job_id, message.rank)
        try:
            columns = events_from_wire(message.columns, self._texts)
        except OverflowError as error:
            raise ProtocolError(f"events of rank {message.rank}: {error}") from None
        if len(columns):
            highest = int(columns.columns["iteration"].max())
            check_numbers(f"events of rank {message.rank}", (highest,))
        source = EventSource(message.job_id, message.rank, message.session_id)
        return source, _correct_times(columns, clock)


def _correct_times(columns: EventColumns, clock: ClockEstimate) -> EventColumns:
    """Return a batch with times on the coordinator's clock, if the two clocks certainly differ."""
    if not _is_clock_off(clock):
        return columns
    times = {name: columns.columns[name] + clock.offset_us for name in ("start_us", "end_us")}
    sent_us = columns.sent_us + clock.offset_us if columns.sent_us else 0
    return dataclasses.replace(columns, columns={**columns.columns, **times}, sent_us=sent_us)


def _is_clock_off(clock: ClockEstimate) -> bool:
    """Return whether the clock of an agent certainly differs from the coordinator's clock."""
    return clock.known and abs(clock.offset_us) > clock.error_us


def _check_size(message: coordinator_pb2.ReportRequest) -> None:
    items = (message.sessions, message.iterations, message.events, message.timeouts)
    parts = (*items, message.roots, message.heard, message.freezes, message.steps)
    check_count("parts of a report", sum(map(len, parts)), _MAX_REPORT_PARTS)
    check_count("freezes of a report", len(message.freezes), _MAX_REPORT_FREEZES)
    numbers = (message.sequence, message.held_events, message.lost_events)
    check_numbers(f"report of agent {message.agent_id}", numbers)


def _read_clock(message: coordinator_pb2.ClockEstimate) -> ClockEstimate:
    if max(abs(message.offset_us), message.error_us) > _MAX_CLOCK_OFFSET_US:
        raise ProtocolError(
            f"clock offset of {message.offset_us} us exceeds {_MAX_CLOCK_OFFSET_US} us"
        )
    return from_message(ClockEstimate, message)


def _check_load(load: AgentLoad) -> AgentLoad:
    check_numbers("load", dataclasses.astuple(load))
    return load


def _check_ids(what: str, job_id: str, session_id: str) -> None:
    if not job_id or not session_id:
        raise ProtocolError(f"{what} without a job id or a session id")
    check_text(f"{what} with a job id", job_id, MAX_JOB_ID_CHARACTERS)
    check_text(f"{what} with a session id", session_id, MAX_JOB_ID_CHARACTERS)


def _check_session(session: SessionStatus) -> SessionStatus:
    _check_ids(f"session of rank {session.rank}", session.job_id, session.session_id)
    if not 0 <= session.rank < session.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(
            f"rank {session.rank} is not below the world size of {session.world_size}"
        )
    numbers = session.pid, session.iterations_seen, session.started_us
    numbers += session.raised_in or 0, session.changed_in or 0
    check_numbers(f"session of rank {session.rank}", numbers)
    return dataclasses.replace(
        session,
        host=make_printable(session.host),
        excluded=make_printable(session.excluded, MAX_NAME_CHARACTERS),
        notes=make_notes_printable(session.notes),
        framework=make_printable(session.framework),
        device_target=make_printable(session.device_target),
        selected=make_printable(session.selected, MAX_NAME_CHARACTERS),
        operators=make_printable(session.operators, MAX_NAME_CHARACTERS),
        saved_data=make_printable(session.saved_data),
    )


def _check_balance(status: IterationStatus) -> IterationStatus:
    _check_ids(f"balance of rank {status.rank}", status.job_id, status.session_id)
    check_rank("balance", status.rank)
    numbers = (value for value in dataclasses.astuple(status) if isinstance(value, int))
    check_numbers(f"balance of rank {status.rank}", numbers)
    return dataclasses.replace(status, dropped=reasons_from_wire(status.dropped))


def _read_timeouts(message: coordinator_pb2.RankTimeouts) -> tuple[str, int, RankTimeouts]:
    _check_source("timeouts", message.job_id, message.rank)
    return message.job_id, message.rank, timeouts_from_wire(message.timeouts)


def _read_rank_coverage(
    message: coordinator_pb2.RankHeard, clock: ClockEstimate
) -> ReportedRankCoverage:
    _check_source("coverage", message.job_id, message.rank)
    check_text("coverage with a session id", message.session_id, MAX_JOB_ID_CHARACTERS)
    offset_us = clock.offset_us if _is_clock_off(clock) else 0
    until_us = message.until_us + offset_us
    return ReportedRankCoverage(message.job_id, message.rank, message.session_id, until_us)


def _check_source(what: str, job_id: str, rank: int) -> None:
    if not job_id:
        raise ProtocolError(f"{what} of rank {rank} without a job id")
    check_text(f"{what} with a job id", job_id, MAX_JOB_ID_CHARACTERS)
    check_rank(what, rank)


def _check_root(job_id: str, root: str) -> str:
    if not job_id or not root.startswith("/") or "\0" in root:
        raise ProtocolError(f"tree {root[:80]!r} of job {job_id[:80]!r} is not an absolute path")
    check_text("tree of a job with an id", job_id, MAX_JOB_ID_CHARACTERS)
    return check_text("tree with a path", root)

"""Reader of reports: complete, or an error."""

from __future__ import annotations

from typing import Any

import pytest
from support.event_lists import list_events

from rankdump._core.events import OPEN_END_POSITION, EventColumns, EventKind, RankEvent
from rankdump._core.status import ClockEstimate, EventSource
from rankdump._core.timeouts import GroupTimeout, RankTimeouts
from rankdump._wire.metadata_messages import events_to_wire
from rankdump._wire.session_messages import timeouts_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import coordinator_pb2, events_pb2, status_pb2
from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.reports import report_reader
from rankdumpd.coordinator.reports.report_reader import MAX_TEXTS, ReportReader

SESSION_OPEN = status_pb2.SESSION_STATE_OPEN
UNHEARD_OF = bytes([200])
TOO_LARGE = 1 << 63


def batch(*names: str) -> EventColumns:
    """Return operators of these names, one after the other."""
    events = [
        RankEvent(0, 0, at, at, name, EventKind.OPERATOR, 10 * at, 10 * at + 5)
        for at, name in enumerate(names)
    ]
    return EventColumns.from_events(events)


def of_rank(columns: events_pb2.EventColumns) -> coordinator_pb2.RankEvents:
    return coordinator_pb2.RankEvents(job_id="j", rank=0, session_id="s", columns=columns)


JUMP = coordinator_pb2.FreezeCause(kind="jump")


def freeze_of(kind: str = "jump", **fields: Any) -> coordinator_pb2.JobFreeze:
    cause = coordinator_pb2.FreezeCause(kind=kind, **fields)
    return coordinator_pb2.JobFreeze(job_id="j", cause=cause)


def wire_report(**changes) -> coordinator_pb2.ReportRequest:
    session = status_pb2.SessionStatus(
        job_id="j", session_id="s", rank=0, world_size=1, state=SESSION_OPEN
    )
    parts: dict[str, Any] = {
        "agent_id": "a",
        "sequence": 1,
        "sessions": [session],
        "iterations": [status_pb2.IterationStatus(job_id="j", session_id="s", complete=True)],
        "events": [of_rank(events_to_wire(batch("Op")))],
        "roots": {"j": "/tree"},
    }
    return coordinator_pb2.ReportRequest(**(parts | changes))


def read(**changes) -> AgentReport:
    return ReportReader().read(wire_report(**changes))


def test_reader_returns_every_part_of_a_report() -> None:
    timeouts = RankTimeouts(
        {"HCCL_EXEC_TIMEOUT": "68"}, (GroupTimeout("g", "gloo", 5),), {"x": 1.5}
    )
    report = read(
        load=status_pb2.Load(queued_records=4),
        clock=coordinator_pb2.ClockEstimate(offset_us=3, error_us=4, steps=5, known=True),
        timeouts=[
            coordinator_pb2.RankTimeouts(job_id="j", rank=2, timeouts=timeouts_to_wire(timeouts))
        ],
        host="h",
        held_events=6,
        lost_events=7,
    )
    assert (report.agent_id, report.sequence, report.roots) == ("a", 1, {"j": "/tree"})
    assert (report.sessions[0].session_id, report.iterations[0].complete) == ("s", True)
    assert report.load.queued_records == 4
    assert report.clock == ClockEstimate(3, 4, 5, True)
    assert report.timeouts == (("j", 2, timeouts),)
    assert (report.host, report.held_events, report.lost_events) == ("h", 6, 7)
    assert report.items == 4
    ((source, columns),) = report.events
    assert source == EventSource("j", 0, "s")
    assert [event.name for event in list_events(columns)] == ["Op"]


def test_reader_shares_texts_of_a_stream() -> None:
    """Batches refer to the texts of their stream; a new table does not change earlier batches."""
    reader = ReportReader()

    def columns(first: int, *texts: str, names: tuple[str, ...]) -> EventColumns:
        message = events_to_wire(batch(*names), names=False)
        said = coordinator_pb2.Texts(first=first, texts=texts)
        report = reader.read(wire_report(texts=said, events=[of_rank(message)]))
        return report.events[0][1]

    one = columns(1, "A", "B", names=("A", "B"))
    two = columns(3, "C", names=("A", "B", "C"))
    assert one.names is two.names
    three = columns(0, "", "Z", names=("Z",))
    assert [event.name for event in list_events(one)] == ["A", "B"]
    assert [event.name for event in list_events(two)] == ["A", "B", "C"]
    assert [event.name for event in list_events(three)] == ["Z"]
    with pytest.raises(ProtocolError, match="past 2 names"):
        reader.read(wire_report(events=[of_rank(events_to_wire(batch("Z", "Y"), names=False))]))


@pytest.mark.parametrize(
    ("offset_us", "error_us", "known", "applied"),
    [
        (5_000, 20, True, 5_000),
        (-5_000, 20, True, -5_000),
        (15, 20, True, 0),
        (-20, 20, True, 0),
        (5_000, 20, False, 0),
    ],
)
def test_reader_converts_times_to_coordinator_clock(offset_us, error_us, known, applied) -> None:
    """An uncertain offset is not applied; open events stay open."""
    event = RankEvent(0, 0, 1, OPEN_END_POSITION, "x", EventKind.BARRIER, 100, 100, group="g")
    events = [of_rank(events_to_wire(EventColumns.from_events([event])))]
    clock = coordinator_pb2.ClockEstimate(offset_us=offset_us, error_us=error_us, known=known)
    (_, columns), *_ = read(events=events, clock=clock).events
    (found,) = list_events(columns)
    assert (found.start_us, found.end_us) == (100 + applied, 100 + applied)
    assert found.end_position == OPEN_END_POSITION


@pytest.mark.parametrize(
    "changes",
    [
        {"agent_id": ""},
        {"sequence": TOO_LARGE},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", world_size=1)]},
        {"sessions": [status_pb2.SessionStatus(session_id="s", world_size=1, state=SESSION_OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", world_size=1, state=SESSION_OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", rank=1, world_size=1,
                                               state=SESSION_OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", world_size=1 << 31,
                                               state=SESSION_OPEN)]},
        {"iterations": [status_pb2.IterationStatus(session_id="s")]},
        {"iterations": [status_pb2.IterationStatus(job_id="j")]},
        {"iterations": [status_pb2.IterationStatus(job_id="j", session_id="s",
                                                   iteration=TOO_LARGE)]},
        {"events": [coordinator_pb2.RankEvents(rank=0)]},
        {"events": [coordinator_pb2.RankEvents(job_id="j", rank=1 << 31)]},
        {"events": [coordinator_pb2.RankEvents(
            job_id="j", columns=events_pb2.EventColumns(count=2))]},
        {"events": [coordinator_pb2.RankEvents(
            job_id="j",
            columns=events_pb2.EventColumns(kind=UNHEARD_OF, count=1, position=bytes(8)))]},
        {"events": [of_rank(events_pb2.EventColumns(
            kind=b"\1", count=1, position=bytes(8), iteration=b"\xff" * 8))]},
        {"timeouts": [coordinator_pb2.RankTimeouts(rank=0)]},
        {"timeouts": [coordinator_pb2.RankTimeouts(job_id="j", rank=1 << 31)]},
        {"texts": coordinator_pb2.Texts(first=2, texts=["x"])},
        {"texts": coordinator_pb2.Texts(first=0, texts=["x"])},
        {"texts": coordinator_pb2.Texts(first=1, texts=["x"] * MAX_TEXTS)},
        {"roots": {"j": "relative/tree"}},
        {"roots": {"": "/tree"}},
        {"roots": {"j": "/" + "t" * 4096}},
        {"roots": {"j" * 257: "/tree"}},
        {"agent_id": "a" * 129},
        {"agent_id": "a\n"},
        {"held_events": TOO_LARGE},
        {"load": status_pb2.Load(queued_bytes=TOO_LARGE)},
        {"clock": coordinator_pb2.ClockEstimate(offset_us=-(1 << 62))},
        {"clock": coordinator_pb2.ClockEstimate(error_us=1 << 62)},
        {"sessions": [status_pb2.SessionStatus(job_id="j" * 257, session_id="s", world_size=1,
                                               state=SESSION_OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", world_size=1,
                                               state=SESSION_OPEN, pid=TOO_LARGE)]},
        {"iterations": [status_pb2.IterationStatus(job_id="j", session_id="s",
                                                   expected=TOO_LARGE)]},
        {"iterations": [status_pb2.IterationStatus(job_id="j", session_id="s", rank=1 << 31)]},
        {"iterations": [status_pb2.IterationStatus(job_id="j", session_id="s",
                                                   dropped={str(n): 1 for n in range(257)})]},
        {"iterations": [status_pb2.IterationStatus(job_id="j", session_id="s")] * 65_537},
        {"texts": coordinator_pb2.Texts(first=1, texts=["x" * 4097])},
        {"timeouts": [coordinator_pb2.RankTimeouts(
            job_id="j", timeouts=events_pb2.Timeouts(limits={"x": float("inf")}))]},
        {"freezes": [coordinator_pb2.JobFreeze(cause=JUMP)]},
        {"freezes": [coordinator_pb2.JobFreeze(job_id="j" * 257, cause=JUMP)]},
        {"freezes": [coordinator_pb2.JobFreeze(job_id="j", iteration=TOO_LARGE, cause=JUMP)]},
        {"freezes": [freeze_of(at_us=TOO_LARGE)]},
        {"freezes": [freeze_of(rank=1 << 31)]},
        {"freezes": [freeze_of(text="x" * 4097)]},
        {"freezes": [coordinator_pb2.JobFreeze(job_id="j", cause=JUMP)] * 257},
        {"steps": [coordinator_pb2.RankStep(numbers={"loss": 1.0})]},
        {"steps": [coordinator_pb2.RankStep(job_id="j", rank=1 << 31)]},
        {"steps": [coordinator_pb2.RankStep(job_id="j", iteration=TOO_LARGE)]},
        {"steps": [coordinator_pb2.RankStep(job_id="j", numbers={"x" * 257: 1.0})]},
        {"steps": [coordinator_pb2.RankStep(job_id="j",
                                            numbers={str(at): 1.0 for at in range(65)})]},
    ],
)  # fmt: skip
def test_reader_rejects_invalid_reports(changes) -> None:
    """Missing ids, ranks and sizes out of bounds, ragged columns, relative trees."""
    with pytest.raises(ProtocolError):
        read(**changes)


def test_reader_bounds_texts_of_a_report() -> None:
    """Unknown reasons are replaced, and long texts are cut."""
    session = status_pb2.SessionStatus(
        job_id="j", session_id="s", world_size=1, state=SESSION_OPEN,
        host="h" * 300, notes=["n"] * 300, selected="0|" * 5000,
    )  # fmt: skip
    balance = status_pb2.IterationStatus(job_id="j", session_id="s", dropped={"torn": 1, "why": 2})
    report = read(sessions=[session], iterations=[balance], host="x\x1b[2J")
    (found,) = report.sessions
    assert (len(found.host), len(found.notes), len(found.selected)) == (256, 256, 4096)
    assert report.iterations[0].dropped == {"torn": 1, "other": 2}
    assert report.host == "x\ufffd[2J"


def test_reader_bounds_texts_of_a_stream(monkeypatch) -> None:
    """The limit applies to all messages together."""
    monkeypatch.setattr(report_reader, "MAX_TEXT_CHARACTERS", 10)
    reader = ReportReader()
    reader.read(wire_report(texts=coordinator_pb2.Texts(first=1, texts=["x" * 10])))
    reader.read(wire_report(texts=coordinator_pb2.Texts(first=0, texts=["", "x" * 10])))
    with pytest.raises(ProtocolError, match="11 characters of texts"):
        reader.read(wire_report(texts=coordinator_pb2.Texts(first=2, texts=["y"])))


def test_reader_rejects_second_agent_on_a_stream() -> None:
    """Its sequence numbers would acknowledge items of the first agent."""
    reader = ReportReader()
    reader.read(wire_report())
    with pytest.raises(ProtocolError, match="on the stream of '"):
        reader.read(wire_report(agent_id="b"))


def test_reader_leaves_out_freezes_of_kinds_that_later_versions_have() -> None:
    """Everything else in the report counts."""
    report = read(freezes=[freeze_of(kind="cosmic_ray"), freeze_of(rank=2)])
    assert [freeze.key for freeze in report.freezes] == [("j", 0, 0)]
    assert report.freezes[0].cause.rank == 2
    assert report.items == 3

"""Reports come off the wire whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import Event, EventColumns, EventKind
from rankdump.contract.status import RankEvents
from rankdump.wire.events import events_to_wire
from rankdump.wire.v1 import coordinator_pb2, events_pb2, status_pb2
from rankdumpd.coordinator.gather import report_from_wire

OPEN = status_pb2.SESSION_STATE_OPEN
UNHEARD_OF = bytes([200])


def wire_report(**changes) -> coordinator_pb2.ReportRequest:
    events = EventColumns.of([Event(0, 0, 0, 0, "Op", EventKind.OPERATOR, 0, 0)])
    parts: dict[str, Any] = {
        "agent_id": "a",
        "sequence": 1,
        "sessions": [
            status_pb2.SessionStatus(
                job_id="j",
                session_id="s",
                rank=0,
                world_size=1,
                state=OPEN,
            )
        ],
        "iterations": [status_pb2.IterationStatus(job_id="j", session_id="s", complete=True)],
        "events": [coordinator_pb2.RankEvents(job_id="j", rank=0, columns=events_to_wire(events))],
        "roots": {"j": "/tree"},
    }
    return coordinator_pb2.ReportRequest(**(parts | changes))


def test_a_report_comes_off_the_wire_whole() -> None:
    """Every part of a message is in the value."""
    report = report_from_wire(wire_report(load=status_pb2.Load(queued_records=4)))
    assert (report.agent_id, report.sequence, report.roots) == ("a", 1, {"j": "/tree"})
    assert (report.sessions[0].session_id, report.iterations[0].complete) == ("s", True)
    assert report.load.queued_records == 4
    ((source, columns),) = report.events
    assert (source, [event.name for event in columns.events()]) == (RankEvents("j", 0), ["Op"])


@pytest.mark.parametrize(
    "changes",
    [
        {"agent_id": ""},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", world_size=1)]},
        {"sessions": [status_pb2.SessionStatus(session_id="s", world_size=1, state=OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", world_size=1, state=OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", rank=1, world_size=1,
                                               state=OPEN)]},
        {"sessions": [status_pb2.SessionStatus(job_id="j", session_id="s", world_size=1 << 31,
                                               state=OPEN)]},
        {"iterations": [status_pb2.IterationStatus(session_id="s")]},
        {"iterations": [status_pb2.IterationStatus(job_id="j")]},
        {"events": [coordinator_pb2.RankEvents(rank=0)]},
        {"events": [coordinator_pb2.RankEvents(job_id="j", rank=1 << 31)]},
        {"events": [coordinator_pb2.RankEvents(
            job_id="j", columns=events_pb2.EventColumns(count=2))]},
        {"events": [coordinator_pb2.RankEvents(
            job_id="j",
            columns=events_pb2.EventColumns(kind=UNHEARD_OF, count=1, position=bytes(8)))]},
        {"roots": {"j": "relative/tree"}},
        {"roots": {"": "/tree"}},
    ],
)  # fmt: skip
def test_a_report_that_contradicts_itself_is_refused(changes) -> None:
    """Ids that are missing, ranks and sizes out of bounds, ragged columns, relative trees."""
    with pytest.raises(ProtocolError):
        report_from_wire(wire_report(**changes))

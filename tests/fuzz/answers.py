"""What agents report to a coordinator, and what people and ranks are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.pieces import chosen, pieces
from google.protobuf.message import DecodeError

from rankdump.contract.errors import RankdumpError
from rankdump.contract.order import finding_from_line, finding_to_line, from_line, to_line
from rankdump.wire import views
from rankdump.wire.convert import session_grant_from_wire, session_grant_to_wire
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, metrics_pb2, status_pb2
from rankdumpd.coordinator.gather import Gather, Reader
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.service.answers import chosen as chosen_jobs
from rankdumpd.coordinator.service.answers import status_of
from rankdumpd.coordinator.values import Settled


def reports(data: bytes) -> None:
    """Reports of one stream, up to the order that is merged from them, and its lines."""
    reader, gather = Reader(), Gather(deadline_s=1.0)
    for at, piece in enumerate(pieces(data)):
        try:
            report = reader.read(coordinator_pb2.ReportRequest.FromString(piece))
        except (DecodeError, RankdumpError):
            reader = Reader()
            continue
        gather.take(report, now_s=float(at))
    while view := gather.next_ready(now_s=1e6, every=True):
        order = merge(view)
        for finding in order.findings:
            assert finding_from_line(finding_to_line(finding)) == finding
        for entry in order.entries():
            from_line(to_line(entry))
        gather.settle(view.job_id, Settled(None, False, order.findings, ""))
    fleet = gather.fleet(now_s=1e6)
    views.view_to_wire(status_of(fleet, chosen_jobs(fleet, ""), ""))


def answers(data: bytes) -> None:
    """A message that answers; what is read from it can be said again."""
    which, rest = chosen(data, len(_ANSWERS))
    kind, read, write = _ANSWERS[which]
    try:
        message = kind.FromString(rest)
    except DecodeError:
        return
    value = read(message)
    again = read(kind.FromString(write(value).SerializeToString()))
    assert repr(again) == repr(value)  # as text: a NaN is not equal to itself


_ANSWERS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (agent_pb2.OpenSessionResponse, session_grant_from_wire, session_grant_to_wire),
    (status_pb2.StatusView, views.view_from_wire, views.view_to_wire),
    (coordinator_pb2.OrderEntry, views.entry_from_wire, views.entry_to_wire),
    (status_pb2.Finding, views.finding_from_wire, views.finding_to_wire),
    (status_pb2.TimeoutHint, views.timeout_hint_from_wire, views.timeout_hint_to_wire),
    (metrics_pb2.MetricsResponse, views.samples_from_wire, views.samples_to_wire),
)

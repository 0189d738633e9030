"""Items of the log as the messages of one stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.wire import views
from rankdump.wire.v1 import agent_pb2, coordinator_pb2
from rankdumpd.agent.report.texts import StreamTexts
from rankdumpd.agent.values import ItemKind, LogItem


class Messages:
    """Makes the messages of one stream; a batch of events says only names that are new in it."""

    def __init__(self) -> None:
        self._texts = StreamTexts()

    def of(self, items: Sequence[LogItem]) -> coordinator_pb2.ReportRequest:
        """Return the message of some items, in their order; without any it only asks for news."""
        request = coordinator_pb2.ReportRequest()
        if items:
            self._texts.renew()
        for item in items:
            request.sequence = item.number
            if item.kind is ItemKind.EVENTS:
                self._add_events(request, item)
            else:
                _ADD[item.kind](request, item)
        texts = self._texts.added()
        if texts:
            request.texts.CopyFrom(texts)
        return request

    def _add_events(self, request: coordinator_pb2.ReportRequest, item: LogItem) -> None:
        columns = agent_pb2.Frame.FromString(item.body).events
        self._texts.point(columns)
        about = {"job_id": item.job_id, "rank": item.rank, "session_id": item.session_id}
        request.events.add(columns=columns, **about)


def _add_session(request: coordinator_pb2.ReportRequest, item: LogItem) -> None:
    body = json.loads(item.body)
    about = body["status"]
    about |= {"state": SessionState(about["state"]), "notes": tuple(about["notes"])}
    request.sessions.append(views.session_to_wire(SessionStatus(**about)))
    request.roots[item.job_id] = body["root"]


def _add_timeouts(request: coordinator_pb2.ReportRequest, item: LogItem) -> None:
    timeouts = agent_pb2.Frame.FromString(item.body).timeouts
    request.timeouts.add(job_id=item.job_id, rank=item.rank, timeouts=timeouts)


def _add_balance(request: coordinator_pb2.ReportRequest, item: LogItem) -> None:
    status = IterationStatus(**json.loads(item.body))
    request.iterations.append(views.iteration_to_wire(status))


_ADD = {
    ItemKind.SESSION: _add_session,
    ItemKind.TIMEOUTS: _add_timeouts,
    ItemKind.BALANCE: _add_balance,
}

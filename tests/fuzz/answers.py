"""Targets for reports of agents to a coordinator, and answers to users and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.input_pieces import chosen, pieces
from google.protobuf.message import DecodeError

from rankdump._config.control_changes import make_plan_change
from rankdump._core.execution_order import (
    format_finding_line,
    format_order_line,
    parse_finding_line,
    parse_order_line,
)
from rankdump._core.job_control import ControlOrder
from rankdump._core.plan import DumpPlan, OutputSettings, plan_from_json, plan_to_json
from rankdump._wire import status_messages
from rankdump._wire.black_box_messages import relayed_freeze_from_wire, relayed_freeze_to_wire
from rankdump._wire.control_messages import (
    answer_from_wire,
    answer_to_wire,
    control_request_from_wire,
    control_request_to_wire,
    order_from_wire,
    order_to_wire,
    result_from_wire,
    result_to_wire,
)
from rankdump._wire.session_messages import session_grant_from_wire, session_grant_to_wire
from rankdump.errors import RankdumpError
from rankdump.wire.v1 import agent_pb2, control_pb2, coordinator_pb2, metrics_pb2, status_pb2
from rankdumpd.coordinator.fleet_views import PublicationResult
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.reports.report_reader import ReportReader
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import build_status_view
from rankdumpd.coordinator.service.fleet_status import select_jobs as chosen_jobs


def reports(data: bytes) -> None:
    """Reports of one stream, up to the order that is merged from them, and its lines."""
    reader, gather = ReportReader(), ReportStore(deadline_s=1.0)
    for at, piece in enumerate(pieces(data)):
        try:
            report = reader.read(coordinator_pb2.ReportRequest.FromString(piece))
        except (DecodeError, RankdumpError):
            reader = ReportReader()
            continue
        answer = gather.add_report(report, now_s=float(at))
        for relayed in answer.freezes:
            # What is handed on can be read by the next agent, and reported again.
            assert relayed_freeze_from_wire(relayed_freeze_to_wire(relayed)) == relayed
        for alarm in gather.find_outliers(now_us=at):
            gather.add_alarm(alarm, now_s=float(at))
    while view := gather.take_next_ready(now_s=1e6, every=True):
        order = merge_iteration(view)
        for finding in order.findings:
            assert parse_finding_line(format_finding_line(finding)) == finding
        for entry in order.entries():
            parse_order_line(format_order_line(entry))
        gather.finish_publication(view.job_id, PublicationResult(None, False, order.findings, ""))
    fleet = gather.build_fleet_view(now_s=1e6)
    status_messages.view_to_wire(build_status_view(fleet, chosen_jobs(fleet, ""), ""))


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


def _read_order(message: control_pb2.ControlOrder) -> ControlOrder:
    """Read an order as a rank does, up to the change of its plan."""
    order = order_from_wire(message)
    change = make_plan_change(order.action, order.values)
    plan = change.apply_to(DumpPlan(OutputSettings("/trees/a")))
    assert plan_from_json(plan_to_json(plan)) == plan
    return order


_ANSWERS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (agent_pb2.OpenSessionResponse, session_grant_from_wire, session_grant_to_wire),
    (status_pb2.StatusView, status_messages.view_from_wire, status_messages.view_to_wire),
    (coordinator_pb2.OrderEntry, status_messages.entry_from_wire, status_messages.entry_to_wire),
    (status_pb2.Finding, status_messages.finding_from_wire, status_messages.finding_to_wire),
    (
        status_pb2.TimeoutHint,
        status_messages.timeout_hint_from_wire,
        status_messages.timeout_hint_to_wire,
    ),
    (
        metrics_pb2.MetricsResponse,
        status_messages.samples_from_wire,
        status_messages.samples_to_wire,
    ),
    (
        coordinator_pb2.RelayedFreeze,
        relayed_freeze_from_wire,
        relayed_freeze_to_wire,
    ),
    (control_pb2.ControlOrder, _read_order, order_to_wire),
    (control_pb2.ControlAnswer, answer_from_wire, answer_to_wire),
    (
        coordinator_pb2.JobControlRequest,
        control_request_from_wire,
        control_request_to_wire,
    ),
    (coordinator_pb2.JobControlResponse, result_from_wire, result_to_wire),
)

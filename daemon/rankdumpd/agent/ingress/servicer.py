"""The agent's gRPC service: conversion of messages, and errors as status codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import grpc

from rankdump._core.job_control import ControlAnswer
from rankdump._core.status import StatusView
from rankdump._wire import session_messages, status_messages
from rankdump._wire.black_box_messages import freeze_notice_to_wire
from rankdump._wire.control_messages import answer_from_wire, order_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.blackbox.freeze_state import FreezeAnswer
from rankdumpd.agent.ingress.push_stream import OpenPushStreams, PushStreamReader
from rankdumpd.agent.session.openings import SessionOpenings, read_final_balance
from rankdumpd.agent.session.rank_session import RankSession, StreamMailbox
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.server.grpc_server import abort_on_error
from rankdumpd.server.metrics import MetricCounters

MAX_DRAIN_S = 3600.0

SERVICE_NAME = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Serves ranks, and clients for status and control."""

    def __init__(
        self,
        registry: SessionRegistry,
        streams: OpenPushStreams,
        rings: RingRegistry,
        openings: SessionOpenings,
        *,
        reader: Callable[[RankSession, StreamMailbox], PushStreamReader],
        changed: Callable[[RankSession], None],
        view: Callable[[], StatusView],
        wait_idle: Callable[[float], int],
        counters: MetricCounters,
        pin: Callable[[str, bool], None],
        freeze: Callable[[agent_pb2.Freeze], FreezeAnswer],
        take_answer: Callable[[RankSession, ControlAnswer], None],
    ) -> None:
        """Call `changed` when the state of a session may have changed.

        `wait_idle` waits until everything received is committed and reported.
        """
        self._registry, self._streams, self._rings = registry, streams, rings
        self._openings = openings
        self._reader, self._changed = reader, changed
        self._view, self._wait_idle, self._pin = view, wait_idle, pin
        self._freeze, self._take_answer = freeze, take_answer
        self._counters = counters

    def OpenSession(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.OpenSessionResponse:
        """Open or resume the session of a rank, or reject it with a reason."""
        with abort_on_error(context, self._counters):
            session_request = session_messages.session_request_from_wire(request)
            if request.HasField("left"):
                self._openings.take_final_balance(
                    session_request, read_final_balance(session_request, request.left.frames)
                )
                return agent_pb2.OpenSessionResponse(opening="the rank waits no longer")
            grant = self._openings.open(session_request)
            if grant.opening:
                return session_messages.session_grant_to_wire(grant)
            session = self._registry.get(request.session_id)
            slab = self._rings.grant(session)
            self._changed(session)
            return session_messages.session_grant_to_wire(dataclasses.replace(grant, slab=slab))

    def Push(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[agent_pb2.PushRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.PushResponse]:
        """Receive frames from a rank and acknowledge them until its stream ends."""
        mailbox = StreamMailbox()
        if not context.add_callback(lambda: mailbox.end("the rank disconnected")):
            return
        with abort_on_error(context, self._counters):
            hello = _read_hello(request_iterator)
            session = self._registry.connect(hello.session_id, hello.token, mailbox)
            try:
                self._changed(session)
                self._streams.add(mailbox, self._reader(session, mailbox), request_iterator)
                for news in mailbox.answers():
                    yield agent_pb2.PushResponse(
                        acknowledged_sequence=news.sequence,
                        draining=news.draining,
                        warnings=news.warnings,
                        slab_ready=news.slab_ready,
                        orders=map(order_to_wire, news.orders),
                        freeze=None if news.freeze is None else freeze_notice_to_wire(news.freeze),
                    )
            finally:
                was_connected = session.disconnect(mailbox)
                # After that: who waits for the end of streams looks at their sessions next.
                self._streams.discard(mailbox)
                if was_connected:
                    self._rings.drop_closed(session)
                    self._changed(session)

    def AnswerOrder(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AnswerOrderRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AnswerOrderResponse:
        """Take the answer of a rank to an order."""
        with abort_on_error(context, self._counters):
            answer = answer_from_wire(request.answer)
            session = self._registry.check_token(request.hello.session_id, request.hello.token)
            self._take_answer(session, answer)
            return agent_pb2.AnswerOrderResponse()

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AgentStatusRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentStatusResponse:
        """Return the status of the agent."""
        return agent_pb2.AgentStatusResponse(view=status_messages.view_to_wire(self._view()))

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.ControlRequest, context: grpc.ServicerContext
    ) -> agent_pb2.ControlResponse:
        """Pin, unpin or freeze a job, or wait until everything received is written and reported,
        up to a deadline.
        """
        with abort_on_error(context, self._counters):
            if request.HasField("pin"):
                self._pin(request.pin.job_id, request.pin.pinned)
                return agent_pb2.ControlResponse()
            if request.HasField("freeze"):
                answer = self._freeze(request.freeze)
                return agent_pb2.ControlResponse(trees=answer.trees, notes=answer.notes)
            if not request.HasField("drain"):
                raise ProtocolError("the control request names no action")
            left = self._wait_idle(limit_drain_s(request.drain))
            return agent_pb2.ControlResponse(drained=left == 0, queued_records=left)


def limit_drain_s(drain: agent_pb2.Drain) -> float:
    """Return how long a drain may take: it occupies a thread of the server."""
    return min(drain.timeout_ms / 1000, MAX_DRAIN_S)


def _read_hello(requests: Iterator[agent_pb2.PushRequest]) -> agent_pb2.Hello:
    first = next(requests, None)
    if first is None or not first.HasField("hello"):
        raise ProtocolError("the first message of a stream must be a hello")
    return first.hello

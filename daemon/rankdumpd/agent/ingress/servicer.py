"""The agent's gRPC service: messages in, messages out, errors as status codes. It decides
nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import grpc

from rankdump._core.status import StatusView
from rankdump._wire import session_messages, status_messages
from rankdump._wire.channel import get_status_code
from rankdump.errors import ProtocolError, RankdumpError, RetryableError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.ingress.push_stream import OpenPushStreams, PushStreamReader, StreamMailbox
from rankdumpd.agent.session.openings import SessionOpenings, read_final_balance
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.server.metrics import MetricCounters

_logger = logging.getLogger(__name__)

MAX_DRAIN_S = 3600.0

SERVICE_NAME = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Answers ranks and people."""

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
        settle: Callable[[float], int],
        meters: MetricCounters,
        pin: Callable[[str, bool], None],
    ) -> None:
        """Call `changed` when a session's state may have; `settle` waits for all that arrived."""
        self._registry, self._streams, self._rings = registry, streams, rings
        self._openings = openings
        self._reader, self._changed = reader, changed
        self._view, self._settle, self._pin = view, settle, pin
        self._meters = meters

    def OpenSession(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> agent_pb2.OpenSessionResponse:
        """Let a rank in, or say why not."""
        with abort_on_error(context, self._meters):
            wanted = session_messages.session_request_from_wire(request)
            if request.HasField("left"):
                self._openings.take_final_balance(
                    wanted, read_final_balance(wanted, request.left.frames)
                )
                return agent_pb2.OpenSessionResponse(opening="the rank waits no longer")
            grant = self._openings.open(wanted)
            if grant.opening:
                return session_messages.session_grant_to_wire(grant)
            session = self._registry.get(request.session_id)
            slab = self._rings.grant(session)
            self._changed(session)
            return session_messages.session_grant_to_wire(dataclasses.replace(grant, slab=slab))

    def Push(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[agent_pb2.PushRequest], context: grpc.ServicerContext
    ) -> Iterator[agent_pb2.PushResponse]:
        """Take frames from a rank and acknowledge them for as long as its stream lives."""
        mailbox = StreamMailbox()
        if not context.add_callback(lambda: mailbox.end("the rank is gone")):
            return
        with abort_on_error(context, self._meters):
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
                    )
            finally:
                self._streams.discard(mailbox)
                if session.disconnect(mailbox):
                    self._rings.drop_closed(session)
                    self._changed(session)

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.AgentStatusRequest, context: grpc.ServicerContext
    ) -> agent_pb2.AgentStatusResponse:
        """Say how everything stands."""
        return agent_pb2.AgentStatusResponse(view=status_messages.view_to_wire(self._view()))

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: agent_pb2.ControlRequest, context: grpc.ServicerContext
    ) -> agent_pb2.ControlResponse:
        """Pin a job or let it go; or wait until everything received is in the tree and reported,
        or the deadline strikes.
        """
        with abort_on_error(context, self._meters):
            if request.HasField("pin"):
                self._pin(request.pin.job_id, request.pin.pinned)
                return agent_pb2.ControlResponse()
            if not request.HasField("drain"):
                raise ProtocolError("control without an action")
            left = self._settle(limit_drain_s(request.drain))
            return agent_pb2.ControlResponse(drained=left == 0, queued_records=left)


def limit_drain_s(drain: agent_pb2.Drain) -> float:
    """Return how long a drain may take: who waits has a thread that others may need."""
    return min(drain.timeout_ms / 1000, MAX_DRAIN_S)


def _read_hello(requests: Iterator[agent_pb2.PushRequest]) -> agent_pb2.Hello:
    first = next(requests, None)
    if first is None or not first.HasField("hello"):
        raise ProtocolError("a stream's first message says hello")
    return first.hello


@contextmanager
def abort_on_error(context: grpc.ServicerContext, meters: MetricCounters) -> Generator[None]:
    """Turn an error of the block into the call's status, and count it."""
    try:
        yield
    except RankdumpError as error:
        level = logging.INFO if isinstance(error, RetryableError) else logging.WARNING
        _logger.log(level, "a call ends with %s: %s", get_status_code(error).name, error)
        meters.add("rankdump_refused_calls_total", code=get_status_code(error).name)
        context.abort(get_status_code(error), str(error))

"""The agent's gRPC service: receives the frames of connected Push streams, each in a thread of its
own, converts messages, and reports errors as status codes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from rankdump._core.job_control import ControlAnswer
from rankdump._core.status import StatusView
from rankdump._wire import session_messages, status_messages
from rankdump._wire.black_box_messages import freeze_notice_to_wire
from rankdump._wire.control_messages import answer_from_wire, order_to_wire
from rankdump.errors import ProtocolError, RankdumpError
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc
from rankdumpd.agent.blackbox.black_box import BlackBox
from rankdumpd.agent.blackbox.freeze_state import FreezeAnswer
from rankdumpd.agent.ingress.session_intake import SessionIntake
from rankdumpd.agent.session.openings import SessionOpenings, read_final_balance
from rankdumpd.agent.session.rank_session import RankSession, StreamMailbox
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.server.grpc_server import abort_on_error
from rankdumpd.server.logs import log_about
from rankdumpd.server.metrics import MetricCounters

_logger = logging.getLogger(__name__)


class PushStreamReader:
    """Reads the frames that a rank sends on one stream; blocks while the queue is full."""

    def __init__(
        self,
        session: RankSession,
        mailbox: StreamMailbox,
        *,
        intake: SessionIntake,
        rings: RingRegistry,
        black_box: BlackBox,
    ) -> None:
        self._session, self._mailbox = session, mailbox
        self._intake, self._rings, self._black_box = intake, rings, black_box

    def read(self, requests: Iterator[agent_pb2.PushRequest]) -> None:
        """Read frames until the rank closes its side of the stream or violates the protocol."""
        try:
            self._read_slab(0)
            self._mailbox.at_rest = self._is_between_records()
            for request in requests:
                self._mailbox.at_rest = False
                if request.HasField("batch"):
                    self._handle_batch(request.batch)
                elif request.HasField("doorbell"):
                    self._read_slab(request.doorbell.written)
                elif request.HasField("step_states"):
                    self._black_box.take_steps(self._session, request.step_states)
                elif request.HasField("step_tensors"):
                    self._black_box.rings.take_tensors(self._session, request.step_tensors)
                elif request.HasField("fault"):
                    self._black_box.take_fault(self._session, request.fault)
                else:
                    raise ProtocolError("only the first message of a stream may be a hello")
                self._mailbox.at_rest = self._is_between_records()
            self._intake.finish()
            ring = self._rings.find_ring(self._session)
            last = self._intake.last_sequence
            self._mailbox.complete(max(last, ring.intake.last_sequence) if ring else last)
        except RankdumpError as error:
            self._mailbox.fail(error)
        except grpc.RpcError:
            self._mailbox.end("the rank disconnected")
        except Exception:
            request = self._session.request
            log_about(_logger, request).exception(
                "the stream of session %s failed", request.session_id
            )
            self._mailbox.end("the agent failed to process a frame")
        finally:
            self._intake.release_budget()

    def _handle_batch(self, batch: agent_pb2.FrameBatch) -> None:
        if not self._intake.last_sequence:
            self._rings.drop_unused(self._session)
        try:
            for frame in batch.frames:
                self._intake.handle_frame(frame)
        finally:
            self._intake.flush()

    def _read_slab(self, announced: int) -> None:
        ring = self._rings.find_ring(self._session)
        if ring is not None:
            ring.read(announced)
        elif announced:
            session_id = self._session.request.session_id
            raise ProtocolError(
                f"session {session_id!r} sent a doorbell but has no shared-memory ring"
            )

    def _is_between_records(self) -> bool:
        ring = self._rings.find_ring(self._session)
        return not self._intake.within_record and (ring is None or not ring.intake.within_record)


class OpenPushStreams:
    """The streams that are connected now, and the threads that read them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mailboxes: set[StreamMailbox] = set()
        self._threads: list[threading.Thread] = []
        self._draining = False

    def add(
        self,
        mailbox: StreamMailbox,
        reader: PushStreamReader,
        requests: Iterator[agent_pb2.PushRequest],
    ) -> None:
        """Start to read a stream; while the agent drains, announce the drain on it at once."""
        thread = threading.Thread(target=reader.read, args=(requests,), name="rankdumpd-reader")
        with self._changed:
            self._mailboxes.add(mailbox)
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)
            if self._draining:
                mailbox.drain()

    def discard(self, mailbox: StreamMailbox) -> None:
        """Note that a stream has ended."""
        with self._changed:
            self._mailboxes.discard(mailbox)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Announce the drain, and wait until streams end; return how many are left after
        `timeout_s`.
        """
        with self._changed:
            self._draining = True
            for mailbox in self._mailboxes:
                mailbox.drain()
            self._changed.wait_for(lambda: not self._mailboxes, timeout_s)
            return len(self._mailboxes)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `holds` returns true after the end of a stream, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(holds, timeout_s)

    def end(self, reason: str) -> None:
        """End the remaining streams with a reason."""
        with self._changed:
            for mailbox in self._mailboxes:
                mailbox.end(reason)

    def join(self, timeout_s: float) -> None:
        """Wait until all reader threads have ended, at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


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
        """`changed` is called when the state of a session may have changed.

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
        """Receive the frames of a rank and acknowledge them until its stream ends."""
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
                # Discarded after the disconnection, because callers that wait for the end of
                # streams look at their sessions next.
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
        """Pin, unpin or freeze a job, or wait up to a deadline until everything received is written
        and reported.
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
    """Return the longest time of a drain in seconds, limited because a drain occupies a thread of
    the server.
    """
    return min(drain.timeout_ms / 1000, MAX_DRAIN_S)


def _read_hello(requests: Iterator[agent_pb2.PushRequest]) -> agent_pb2.Hello:
    first = next(requests, None)
    if first is None or not first.HasField("hello"):
        raise ProtocolError("the first message of a stream must be a hello")
    return first.hello

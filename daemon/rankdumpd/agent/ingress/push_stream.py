"""Connected Push streams: a thread for each receives its frames, and a mailbox holds the answers
for its rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc

from rankdump._core.black_box import FreezeNotice
from rankdump._core.job_control import ControlOrder
from rankdump._core.session_protocol import Acknowledgement
from rankdump.errors import ProtocolError, RankdumpError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.black_box import BlackBox
from rankdumpd.agent.ingress.session_intake import SessionIntake
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.server.logs import build_log_fields


class StreamMailbox:
    """Answers that are due on one stream; filled by many threads, emptied by one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._acknowledged = 0
        self._draining = self._slab_ready = False
        self._warnings: list[str] = []
        self._freeze: FreezeNotice | None = None
        self._orders: list[ControlOrder] = []
        self._last: int | None = None
        self._error: RankdumpError | None = None
        self.at_rest = False
        """Whether everything that arrived is handled, to the end of a record; set by the reader."""

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge all frames up to this number."""
        with self._changed:
            self._acknowledged = max(self._acknowledged, sequence)
            self._changed.notify_all()

    def warn(self, text: str) -> None:
        """Send a warning, which the rank logs."""
        with self._changed:
            self._warnings.append(text)
            self._changed.notify_all()

    def drain(self) -> None:
        """Announce that the agent is about to stop."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def offer_slab(self) -> None:
        """Announce that a slab is ready for a rank that reopens the session."""
        with self._changed:
            self._slab_ready = True
            self._changed.notify_all()

    def freeze(self, notice: FreezeNotice) -> None:
        """Send that the black box was frozen; of several notices the last one."""
        with self._changed:
            self._freeze = notice
            self._changed.notify_all()

    def send_order(self, order: ControlOrder) -> None:
        """Send an order that controls the job."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """End the stream with a retryable error."""
        self.fail(UnavailableError(reason))

    def fail(self, error: RankdumpError) -> None:
        """End the stream with an error; the first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def complete(self, last_sequence: int) -> None:
        """End the stream once this number is acknowledged: no more frames will arrive."""
        with self._changed:
            self._last = last_sequence
            self._changed.notify_all()

    def answers(self) -> Iterator[Acknowledgement]:
        """Yield acknowledgements until the stream is complete; raise its error."""
        sent = Acknowledgement(0)
        while True:
            with self._changed:
                self._changed.wait_for(lambda sent=sent: self._has_news(sent))
                news = self._make_answer()
                self._warnings, self._freeze, self._orders = [], None, []
                error, complete = self._error, self._is_complete()
            if news != sent:
                sent = replace(news, warnings=(), freeze=None, orders=())
                yield news
            elif error:
                raise error
            elif complete:
                return

    def _has_news(self, sent: Acknowledgement) -> bool:
        news = self._make_answer() != sent
        return news or self._error is not None or self._is_complete()

    def _make_answer(self) -> Acknowledgement:
        warnings = tuple(self._warnings)
        return Acknowledgement(
            *(self._acknowledged, self._draining, warnings, self._slab_ready, self._freeze),
            tuple(self._orders),
        )

    def _is_complete(self) -> bool:
        return self._last is not None and self._acknowledged >= self._last


_logger = logging.getLogger(__name__)


class PushStreamReader:
    """Reads what a rank sends on one stream; blocks while the queue is full."""

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
        """Read frames until the rank closes its side or violates the protocol."""
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
                    self._black_box.take_tensors(self._session, request.step_tensors)
                elif request.HasField("fault"):
                    self._black_box.take_fault(self._session, request.fault)
                else:
                    raise ProtocolError("only the first message of a stream may be a hello")
                self._mailbox.at_rest = self._is_between_records()
            self._intake.finish()
            ring = self._rings.find_ring(self._session)
            last = self._intake.last_sequence
            self._mailbox.complete(max(last, ring.last_sequence) if ring else last)
        except RankdumpError as error:
            self._mailbox.fail(error)
        except grpc.RpcError:
            self._mailbox.end("the rank disconnected")
        except Exception:
            request = self._session.request
            _logger.exception(
                "the stream of session %s failed",
                request.session_id,
                extra=build_log_fields(request),
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
        return not self._intake.within_record and (ring is None or not ring.within_record)


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
        """Start to read a stream; while the agent drains, that is announced on it at once."""
        thread = threading.Thread(target=reader.read, args=(requests,), name="rankdumpd-reader")
        with self._changed:
            self._mailboxes.add(mailbox)
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)
            if self._draining:
                mailbox.drain()

    def discard(self, mailbox: StreamMailbox) -> None:
        """Note that a stream is over."""
        with self._changed:
            self._mailboxes.discard(mailbox)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Announce the drain, and wait until streams end; return how many are left then."""
        with self._changed:
            self._draining = True
            for mailbox in self._mailboxes:
                mailbox.drain()
            self._changed.wait_for(lambda: not self._mailboxes, timeout_s)
            return len(self._mailboxes)

    def end(self, reason: str) -> None:
        """End the streams that are left."""
        with self._changed:
            for mailbox in self._mailboxes:
                mailbox.end(reason)

    def join(self, timeout_s: float) -> None:
        """Wait until all reader threads have ended, up to a timeout."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

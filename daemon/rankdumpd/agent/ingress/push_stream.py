"""Connected Push streams: a thread for each receives its frames."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from rankdump.errors import ProtocolError, RankdumpError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.black_box import BlackBox
from rankdumpd.agent.ingress.session_intake import SessionIntake
from rankdumpd.agent.session.rank_session import RankSession, StreamMailbox
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.server.logs import log_about

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

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait for something that the end of a stream brings about, up to a timeout."""
        with self._changed:
            self._changed.wait_for(holds, timeout_s)

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

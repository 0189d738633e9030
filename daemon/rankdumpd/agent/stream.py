"""The Push streams that are connected: a thread for each takes its frames in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import grpc

from rankdump.contract.errors import ProtocolError, RankdumpError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.intake import Intake
from rankdumpd.agent.mailbox import Mailbox
from rankdumpd.agent.rings import Rings
from rankdumpd.agent.sessions import Session
from rankdumpd.logs import about

_log = logging.getLogger(__name__)


class Reader:
    """Takes in what one stream brings or announces, and waits where there is no room for more."""

    def __init__(self, session: Session, mailbox: Mailbox, *, intake: Intake, rings: Rings) -> None:
        self._session, self._mailbox = session, mailbox
        self._intake, self._rings = intake, rings

    def read(self, requests: Iterator[agent_pb2.PushRequest]) -> None:
        """Take frames until the rank closes its side or breaks a rule."""
        try:
            self._read_slab(0)
            self._mailbox.at_rest = self._between_records()
            for request in requests:
                self._mailbox.at_rest = False
                if request.HasField("batch"):
                    self._take(request.batch)
                elif request.HasField("doorbell"):
                    self._read_slab(request.doorbell.written)
                else:
                    raise ProtocolError("a stream's first message says hello, and no other")
                self._mailbox.at_rest = self._between_records()
            self._intake.finish()
            self._mailbox.complete(max(self._last_in_slab(), self._intake.last_sequence))
        except RankdumpError as error:
            self._mailbox.fail(error)
        except grpc.RpcError:
            self._mailbox.end("the rank is gone")
        except Exception:
            request = self._session.request
            _log.exception("stream of session %s", request.session_id, extra=about(request))
            self._mailbox.end("the agent failed to take a frame")
        finally:
            self._intake.give_back()

    def _take(self, batch: agent_pb2.FrameBatch) -> None:
        if not self._intake.last_sequence:
            self._rings.not_used(self._session)
        try:
            for frame in batch.frames:
                self._intake.take(frame)
        finally:
            self._intake.hand_on()

    def _read_slab(self, announced: int) -> None:
        ring = self._rings.of(self._session)
        if ring is not None:
            ring.read(announced)
        elif announced:
            session_id = self._session.request.session_id
            raise ProtocolError(f"session {session_id!r} rings a bell without a slab")

    def _between_records(self) -> bool:
        ring = self._rings.of(self._session)
        return not self._intake.within_record and (ring is None or not ring.within_record)

    def _last_in_slab(self) -> int:
        ring = self._rings.of(self._session)
        return ring.last_sequence if ring else 0


class OpenStreams:
    """The streams that are connected now, and the threads that read them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mailboxes: set[Mailbox] = set()
        self._threads: list[threading.Thread] = []
        self._draining = False

    def add(
        self, mailbox: Mailbox, reader: Reader, requests: Iterator[agent_pb2.PushRequest]
    ) -> None:
        """Begin to read a stream; one that comes late learns at once that the end is near."""
        thread = threading.Thread(target=reader.read, args=(requests,), name="rankdumpd-reader")
        with self._changed:
            self._mailboxes.add(mailbox)
            self._threads = [t for t in self._threads if t.is_alive()]
            thread.start()
            self._threads.append(thread)
            if self._draining:
                mailbox.drain()

    def discard(self, mailbox: Mailbox) -> None:
        """Note that a stream is over."""
        with self._changed:
            self._mailboxes.discard(mailbox)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> int:
        """Ask the ranks to finish their streams; return how many have not by the deadline."""
        with self._changed:
            self._draining = True
            for mailbox in self._mailboxes:
                mailbox.drain()
            self._changed.wait_for(lambda: not self._mailboxes, timeout_s)
            return len(self._mailboxes)

    def end(self, reason: str) -> None:
        """Break off the streams that are left."""
        with self._changed:
            for mailbox in self._mailboxes:
                mailbox.end(reason)

    def join(self, timeout_s: float) -> None:
        """Wait until no thread reads any more, or no longer."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

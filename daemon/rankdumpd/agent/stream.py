"""The Push streams that are connected: a thread for each takes its frames in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc

from rankdump.contract.errors import ProtocolError, RankdumpError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.selection import Verdict
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.committer import Committer, cost_bytes
from rankdumpd.agent.mailbox import Mailbox
from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.receive import Assembler
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, Parcel

_log = logging.getLogger(__name__)


class Reader:
    """Takes the frames of one stream in, and waits where there is no room for more."""

    def __init__(
        self,
        session: Session,
        mailbox: Mailbox,
        *,
        budget: Budget,
        workers: Workers,
        committer: Committer,
        admit: Callable[[Session, RecordHead], Verdict],
    ) -> None:
        self._session, self._mailbox = session, mailbox
        self._budget, self._workers, self._committer = budget, workers, committer
        self._decide = admit
        self._taken_bytes: int | None = None
        self._assembler = Assembler(
            session.request.session_id,
            rank=session.request.rank,
            net_name=session.plan.output.net_name,
            highest_first=session.watermark + 1,
            figures=session.outlet.figures,
            known=session.known,
            admit=self._admit,
        )

    def read(self, requests: Iterator[agent_pb2.PushRequest]) -> None:
        """Take frames until the rank closes its side or breaks a rule."""
        try:
            for request in requests:
                if not request.HasField("batch"):
                    raise ProtocolError("a stream's first message says hello, and no other")
                for frame in request.batch.frames:
                    self._take(frame)
            self._assembler.finish()
            self._mailbox.complete(self._assembler.last_sequence)
        except RankdumpError as error:
            self._mailbox.fail(error)
        except grpc.RpcError:
            self._mailbox.end("the rank is gone")
        except Exception:
            _log.exception("stream of session %s", self._session.request.session_id)
            self._mailbox.end("the agent failed to take a frame")
        finally:
            self._give_back()

    def _admit(self, head: RecordHead) -> Verdict:
        answer = self._decide(self._session, head)
        if answer.accepted:
            self._occupy(cost_bytes(head.data_bytes))
        return answer

    def _take(self, frame: agent_pb2.Frame) -> None:
        item = self._assembler.feed(frame)
        if item is None:
            return
        if self._taken_bytes is None:
            self._occupy(cost_bytes(len(item.raw) if isinstance(item, Declared) else 0))
        if not self._session.claim(item.ticket.sequence):
            self._give_back()
            return
        cost, self._taken_bytes = self._taken_bytes or 0, None
        if isinstance(item, Parcel):
            self._workers.submit(item)
        else:
            self._committer.submit(item, cost)

    def _occupy(self, cost: int) -> None:
        self._budget.take(cost)
        self._taken_bytes = cost

    def _give_back(self) -> None:
        if self._taken_bytes is not None:
            self._budget.give(self._taken_bytes)
            self._taken_bytes = None


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
        """Wait until no thread reads any more."""
        for thread in self._threads:
            thread.join(timeout_s)

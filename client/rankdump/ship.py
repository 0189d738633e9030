"""Room 4: numbered frames on one stream to the agent, resent after a reconnect.

One thread owns the connection. No error leaves it: what cannot be delivered stays in the
window until the session closes, and is counted then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import grpc

from rankdump.contract.errors import PermanentError, RankdumpError
from rankdump.contract.exchange import Declaration, SessionRequest
from rankdump.values import Staged
from rankdump.wire.convert import session_grant_from_wire, session_request_to_wire
from rankdump.wire.errors import error_of
from rankdump.wire.frames import batches, declaration_frame, record_frames
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
BACKOFF_S = (0.05, 5.0)
# An agent that restarts is back by then; a job should not hang at its end for one that is gone.
RETURN_AT_EXIT_S = 10.0
# Declarations are small, but an agent that never comes must not make them grow for ever.
MAX_WAITING_DECLARATIONS = 10_000
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
    # A stream that gRPC itself repeats on another connection can end up without any answer; what
    # is resent is decided here.
    ("grpc.enable_retries", 0),
)


class Link(Enum):
    """How the connection stands."""

    CONNECTING = "connecting"
    """No answer yet, of any kind."""
    ABSENT = "absent"
    """Nobody has answered so far."""
    UP = "up"
    AWAY = "away"
    """It was there before."""
    REFUSED = "refused"
    """It said no for good."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: int
    item: Staged | Declaration

    def frames(self) -> Iterator[agent_pb2.Frame]:
        """Yield the item as it goes over the wire."""
        if isinstance(self.item, Staged):
            return record_frames(self.sequence, self.item.head, self.item.data)
        return iter((declaration_frame(self.sequence, self.item),))


class Ship:
    """Delivers a session's frames in order, at least once; the agent drops repetitions."""

    def __init__(
        self,
        request: SessionRequest,
        address: str,
        *,
        on_taken: Callable[[Staged], None],
        on_idle: Callable[[], None],
        on_link: Callable[[Link, str], None],
    ) -> None:
        self._request = request
        self._address = address
        self._on_taken, self._on_idle, self._on_link = on_taken, on_idle, on_link
        self._changed = threading.Condition()
        self._unsent: deque[_Waiting] = deque()
        self._unacknowledged: deque[_Waiting] = deque()
        self._next_sequence = 1
        self._declarations = 0
        self._stream = 0  # number of the present connection; an older generator ends itself
        self._closing = self._abandoned = False
        self._call: grpc.Call | None = None
        self._link = Link.CONNECTING
        self._progress_s = time.monotonic()
        self.lost_declarations = 0
        self._thread = threading.Thread(target=self._run, name="rankdump-ship", daemon=True)

    def start(self, patience_s: float) -> None:
        """Begin to connect; returns when the first attempt succeeded or failed."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._link is not Link.CONNECTING, patience_s)

    @property
    def link(self) -> Link:
        """How the connection stands."""
        return self._link

    @property
    def closing(self) -> bool:
        """Whether the session is saying goodbye."""
        return self._closing

    @property
    def busy(self) -> bool:
        """Whether a tensor waits for the agent to take it."""
        with self._changed:
            return self._waiting() > self._declarations

    def idle_s(self) -> float:
        """Return seconds since the agent last took something, or since nothing was waiting."""
        with self._changed:
            return time.monotonic() - self._progress_s if self._waiting() else 0.0

    def submit(self, item: Staged | Declaration) -> None:
        """Put an item at the end of the stream; never blocks."""
        with self._changed:
            if not isinstance(item, Staged):
                if self._declarations >= MAX_WAITING_DECLARATIONS:
                    self.lost_declarations += 1
                    return
                self._declarations += 1
            if not self._waiting():
                self._progress_s = time.monotonic()
            self._unsent.append(_Waiting(self._next_sequence, item))
            self._next_sequence += 1
            self._changed.notify_all()

    def close(self, patience_s: float) -> int:
        """Deliver what waits, as long as the agent makes progress; return the tensors left."""
        with self._changed:
            self._closing = True
            # Training no longer waits: even an agent that was stuck gets its time again.
            self._progress_s = time.monotonic()
            self._changed.notify_all()
            while self._waiting() and self._link in (Link.UP, Link.AWAY):
                away = self._link is Link.AWAY
                allowed_s = min(patience_s, RETURN_AT_EXIT_S) if away else patience_s
                if time.monotonic() - self._progress_s > allowed_s:
                    break
                self._changed.wait(0.1)
            self._abandoned = True
            self._stream += 1
            self._changed.notify_all()
            waiting = (*self._unacknowledged, *self._unsent)
            left = sum(isinstance(each.item, Staged) for each in waiting)
        # A stream that said everything ends by itself; one that hangs is cut.
        self._thread.join(timeout=0.0 if waiting else 2.0)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=2.0)
        return left

    def _run(self) -> None:
        wait_s = BACKOFF_S[0]
        while not self._finished():
            try:
                with grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
                    self._connect(agent_pb2_grpc.AgentServiceStub(channel))
                wait_s = BACKOFF_S[0]
            except (grpc.RpcError, RankdumpError) as failure:
                error = error_of(failure) if isinstance(failure, grpc.RpcError) else failure
                if isinstance(error, PermanentError):
                    self._set_link(Link.REFUSED, str(error))
                    return
                known = self._link in (Link.UP, Link.AWAY)
                self._set_link(Link.AWAY if known else Link.ABSENT, str(error))
            except Exception as error:  # the one place where this thread may not die unheard
                logger.exception("rankdump: the sender stopped")
                self._set_link(Link.REFUSED, f"internal error: {error}")
                return
            with self._changed:
                # Only the end cuts the pause short: new items must not turn it into a storm.
                self._changed.wait_for(self._finished, wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    def _finished(self) -> bool:
        gone = self._abandoned or self._link in (Link.ABSENT, Link.REFUSED)
        return self._closing and (gone or not self._waiting())

    def _waiting(self) -> int:
        return len(self._unsent) + len(self._unacknowledged)

    def _connect(self, stub: agent_pb2_grpc.AgentServiceStub) -> None:
        """Open or resume the session, then push until the stream ends."""
        answer = stub.OpenSession(session_request_to_wire(self._request), timeout=OPEN_TIMEOUT_S)
        grant = session_grant_from_wire(answer)
        with self._changed:
            self._stream += 1
            stream = self._stream
            # The last stream's generator is over; what it took may not have arrived.
            self._unsent.extendleft(reversed(self._unacknowledged))
            self._unacknowledged.clear()
        self._take_out(self._unsent, grant.acknowledged)
        self._set_link(Link.UP, grant.excluded)
        responses = stub.Push(self._requests(stream, grant.token))
        with self._changed:
            self._call = responses
        try:
            for response in responses:
                self._take_out(self._unacknowledged, response.acknowledged_sequence)
                if response.draining:
                    self._end_stream()
        finally:
            self._end_stream()
        self._set_link(Link.AWAY, "the agent ended the stream")

    def _end_stream(self) -> None:
        with self._changed:
            self._stream += 1
            self._changed.notify_all()

    def _requests(self, stream: int, token: bytes) -> Iterator[agent_pb2.PushRequest]:
        """Yield what waits, as it comes, until this stream is no longer the present one."""
        hello = agent_pb2.Hello(session_id=self._request.session_id, token=token)
        yield agent_pb2.PushRequest(hello=hello)
        while (waiting := self._next(stream)) is not None:
            yield from batches(frame for each in waiting for frame in each.frames())

    def _next(self, stream: int) -> list[_Waiting] | None:
        """Wait for unsent items; None when this stream has nothing more to say."""
        while True:
            with self._changed:
                if self._stream != stream:
                    return None
                if self._unsent:
                    # A few at a time, so that a long backlog does not hold the lock.
                    some = [self._unsent.popleft() for _ in range(min(len(self._unsent), 64))]
                    self._unacknowledged.extend(some)
                    return some
                if self._closing:
                    return None
                woken = self._changed.wait(0.5)
            if not woken:
                self._on_idle()

    def _take_out(self, queue: deque[_Waiting], acknowledged: int) -> None:
        """Let go of what the agent has accounted for."""
        taken: list[Staged] = []
        with self._changed:
            while queue and queue[0].sequence <= acknowledged:
                item = queue.popleft().item
                self._progress_s = time.monotonic()
                if isinstance(item, Staged):
                    taken.append(item)
                else:
                    self._declarations -= 1
            self._changed.notify_all()
        for item in taken:
            self._on_taken(item)

    def _set_link(self, link: Link, reason: str) -> None:
        with self._changed:
            # While nothing connects, every attempt tells its reason; the listener says it once.
            self._link = link
            self._changed.notify_all()
        self._on_link(link, reason)

"""Client of an agent: opens and resumes the session, selects shared memory or the stream, and
delivers frames in order and at least once.

One thread owns the connection. No error leaves this thread: undelivered items stay in the buffer
until the session closes, and are counted then.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from rankdump._core.backoff import RetryBackoff
from rankdump._core.black_box import FreezeNotice
from rankdump._core.job_control import ControlAnswer, ControlOrder
from rankdump._core.session_protocol import SessionGrant, SessionRequest, SlabPlace
from rankdump._transport.frame_queue import make_loss_frames
from rankdump._transport.push_stream import FrameTooLargeError, PushStream
from rankdump._transport.send_buffer import LinkState, SendBuffer
from rankdump._transport.send_ring import SendRing
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.black_box_messages import freeze_notice_from_wire
from rankdump._wire.channel import (
    TlsCredentials,
    explain_unavailable,
    is_answer,
    make_error,
    open_channel,
)
from rankdump._wire.control_messages import answer_to_wire, order_from_wire
from rankdump._wire.session_messages import session_grant_from_wire, session_request_to_wire
from rankdump.errors import (
    CorruptedError,
    ForbiddenError,
    PermanentError,
    ProtocolError,
    RankdumpError,
    UnavailableError,
)
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, control_pb2

_logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0
MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Longest pause between attempts to connect, in seconds; pauses double up to it."""
EXIT_PAUSE_S = 0.5
"""Longest pause between attempts to connect while the session is closing, in seconds."""
# An agent that restarts is back within this time; a job should not wait longer at its end for an
# agent that is gone.
RETURN_AT_EXIT_TIMEOUT_S = 10.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),
    # A stream that gRPC itself repeats on another connection may never get an answer; this client
    # decides what is sent again.
    ("grpc.enable_retries", 0),
)


class TransportSelector:
    """Opens and abandons slabs; used by the thread that connects."""

    def __init__(
        self,
        buffer: SendBuffer,
        address: str,
        *,
        wanted: bool,
        on_slab_unused: Callable[[str], None],
    ) -> None:
        self._buffer, self._address = buffer, address
        self._wanted = wanted
        self._on_slab_unused = on_slab_unused
        self._given_up: set[tuple[int, int]] = set()
        self._avoid = ""

    def select_transport(self, grant: SessionGrant) -> None:
        """Keep the slab that is in use, or move unacknowledged items to the new slab or to the
        stream.
        """
        ring = self._buffer.ring
        place = grant.slab and resolve_slab_place(grant.slab, self._address)
        if ring is not None and place is not None and not self._avoid and ring.mapping.is_at(place):
            if not ring.has_broken_record(grant.acknowledged):
                return
            self._avoid = "the agent restarted inside a large tensor"
        if ring is not None:
            self._given_up.add(ring.mapping.identity)
        self._buffer.abandon_ring()
        reason = self._open_slab(place, had_one=ring is not None) if self._wanted else ""
        if reason:
            self._on_slab_unused(reason)

    def update_request(self, request: SessionRequest) -> SessionRequest:
        """Return the request for the next connection, which asks for no slab if slabs are to be
        avoided.

        An agent that was restarted does not know that a slab is damaged, and would read it again.
        """
        return replace(request, wants_slab=False) if self._avoid else request

    def avoid_slabs(self, reason: str) -> None:
        """Use the stream from the next connection on."""
        self._avoid = reason

    def _open_slab(self, place: SlabPlace | None, *, had_one: bool) -> str:
        """Use a slab; return why the stream is used instead if that is worth a log line, else an
        empty text.
        """
        if self._avoid:
            return self._avoid
        if place is None:
            # An agent that never grants a slab is configured like that, which needs no log line.
            return "the agent no longer grants shared memory" if had_one else ""
        try:
            ring = SendRing(place)
        except (OSError, RankdumpError) as error:
            return str(error)
        if ring.mapping.identity in self._given_up:
            # The lock of the new mapping would end with the last view of the earlier mapping of the
            # same file.
            ring.close()
            return f"{place.path} was abandoned before"
        self._buffer.use_ring(ring)
        return ""


def resolve_slab_place(place: SlabPlace, address: str) -> SlabPlace:
    """Return the place of a slab as this process sees it, given the address of the agent's socket.

    A container may see the agent's runtime folder, with its socket and slabs, at another path.
    """
    granted = Path(place.path)
    if granted.exists() or not address.startswith("unix:"):
        return place
    socket = Path(address.removeprefix("unix:").removeprefix("//"))
    # If the agent has several workers, the slabs of a worker are one folder deeper.
    for depth in (2, 3):
        beside = socket.parent.joinpath(*granted.parts[-depth:])
        if beside.exists():
            return replace(place, path=str(beside))
    return place


def resolve_redirect(address: str, redirect: str) -> str:
    """Return the address after a redirect; ProtocolError if it is not beside the first address.

    A redirect is relative, because a container may have another path to the folder of the socket.

    >>> resolve_redirect("unix:/run/rankdump/agent.sock", "agent.sock.1")
    'unix:/run/rankdump/agent.sock.1'
    >>> resolve_redirect("localhost:7420", "41321")
    'localhost:41321'
    """
    if address.startswith("unix:"):
        legal = "/" not in redirect and redirect not in (".", "..")
        folder, slash, _ = address.removeprefix("unix:").rpartition("/")
        found = f"unix:{folder}{slash}{redirect}"
    else:
        legal = redirect.isascii() and redirect.isdecimal() and 0 < int(redirect) <= 0xFFFF
        found = f"{address.rpartition(':')[0]}:{redirect}"
    if not legal:
        raise ProtocolError(
            f"agent {address} redirects to {redirect!r}, which is not beside its own address"
        )
    return found


_IDLE_LINKS = (LinkState.ABSENT, LinkState.WAITING, LinkState.REJECTED)
"""States in which nothing is sent, and an end does not wait."""


class _SessionOpeningError(RankdumpError):
    """The agent has not opened the session yet; the text of the error is the agent's reason."""


class AgentClient:
    """Delivers the frames of a session in order and at least once; the agent drops repetitions."""

    def __init__(
        self,
        request: SessionRequest,
        buffer: SendBuffer,
        address: str,
        credentials: TlsCredentials | None = None,
        *,
        outbox: StepOutbox | None = None,
        on_freeze: Callable[[FreezeNotice], None] = lambda notice: None,
        on_order: Callable[[ControlOrder], ControlAnswer] | None = None,
        on_tick: Callable[[], None],
        on_warning: Callable[[str], None],
        on_link_change: Callable[[LinkState, str], None],
        on_slab_unused: Callable[[str], None],
        is_starting: Callable[[], bool] | None = None,
    ) -> None:
        """Sends the items of `buffer` after `start`.

        `is_starting` returns whether an agent that this job started does not serve yet but may do
        so soon; it raises UnavailableError if the agent never will. `on_tick` is called about twice
        a second while connected; `on_warning` with the warnings of the agent, which repeats them;
        `on_slab_unused` with the reason why a requested slab is not used; `on_freeze` when the
        agent has frozen the black box, whose steps are in `outbox`; `on_order` with each order that
        controls the job.
        """
        self._request, self._address, self._on_link_change = request, address, on_link_change
        self._credentials = credentials
        self._is_starting = is_starting
        self._on_warning = on_warning
        self._buffer = buffer
        self._selector = TransportSelector(
            buffer, address, wanted=request.wants_slab, on_slab_unused=on_slab_unused
        )
        self._outgoing = PushStream(buffer, outbox, on_tick=on_tick)
        self._outbox, self._on_freeze, self._on_order = outbox, on_freeze, on_order
        self._answering: deque[object] = deque(maxlen=8)
        """Calls that are running; they are kept here because gRPC cancels a call that nobody refers
        to.
        """
        self._abandoned = False
        self.changes_plans = False
        """Whether the agent reads frames that change the plan."""
        self.was_opened = False
        """Whether an agent has opened the session."""
        self._opening_address = address
        self._call: grpc.Call | None = None
        self.left_in_slab = 0
        """Number of tensors that `close` left to the agent in shared memory."""
        self._thread = threading.Thread(target=self._run, name="rankdump-sender", daemon=True)

    def start(self, patience_s: float) -> None:
        """Begin to connect; return when the first attempt has succeeded or failed.

        An agent that is being started is not waited for.
        """
        if self._is_starting is not None:
            self._buffer.set_link(LinkState.STARTING)
        self._thread.start()
        with self._buffer.changed:
            self._buffer.changed.wait_for(lambda: self.link is not LinkState.CONNECTING, patience_s)

    @property
    def link(self) -> LinkState:
        """State of the connection."""
        return self._buffer.link

    @property
    def closing(self) -> bool:
        """Whether the session is closing."""
        return self._outgoing.closing

    @property
    def lost_metadata(self) -> int:
        """Number of metadata frames that were dropped for lack of space."""
        return self._buffer.items.lost_metadata

    def disarm(self) -> None:
        """Accept nothing more, in a forked child; takes no lock, because another thread may have
        held it during the fork.
        """
        self._buffer.closed = True
        self._buffer.ring = None

    def close(self, patience_s: float) -> int:
        """Deliver the waiting items while the agent makes progress; return the number of lost
        tensors.
        """
        buffer, outgoing = self._buffer, self._outgoing
        with buffer.changed:
            outgoing.closing = True
            buffer.renew_patience()
            outgoing.wake()
            while buffer.items.outstanding and self.link not in _IDLE_LINKS:
                away = self.link in (LinkState.AWAY, LinkState.UNRESPONSIVE)
                allowed_s = min(patience_s, RETURN_AT_EXIT_TIMEOUT_S) if away else patience_s
                if buffer.idle_s() > allowed_s:
                    break
                buffer.changed.wait(0.1)
            self._abandoned = buffer.closed = True
            done = not buffer.items.outstanding
            outgoing.end_stream()
        # A stream that has sent everything ends by itself; a stream that hangs is cancelled.
        self._thread.join(timeout=2.0 if done else 0.0)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=2.0)
        if self.link in (LinkState.OPENING, LinkState.WAITING) and not self.was_opened:
            self._report_losses()
        return self._release_slab()

    def _release_slab(self) -> int:
        """Release the slab; return the number of tensors that will not be written."""
        buffer = self._buffer
        with buffer.changed:
            ring, buffer.ring = buffer.ring, None
        if ring is not None:
            # The agent still reads the slab after this process has ended, but the memory must be
            # unmapped here.
            buffer.on_journal(None)
            buffer.wait_for_copies(ring, 2.0)
        with buffer.changed:
            left, in_slab = buffer.items.tensors, 0
            if ring is not None:
                # An agent that rejects the rank also reads the slab, if it knows the session.
                if self.link in (LinkState.UP, LinkState.AWAY, LinkState.REJECTED):
                    in_slab = left - buffer.items.held_tensors
                # Memory that an accelerator is still writing to stays mapped until the process
                # ends.
                if not ring.open_entries:
                    ring.close()
        self.left_in_slab = in_slab
        return left - in_slab

    def _report_losses(self) -> None:
        """Report the losses to an agent that has not opened the session, for its balance."""
        request = session_request_to_wire(self._request)
        with self._buffer.changed:
            request.left.frames.extend(make_loss_frames(self._buffer.items.waiting))
        try:
            with open_channel(self._opening_address, self._credentials, CHANNEL_OPTIONS) as channel:
                stub = agent_pb2_grpc.AgentServiceStub(channel)
                stub.OpenSession(request, timeout=LEAVE_TIMEOUT_S)
        except (grpc.RpcError, RankdumpError) as failure:
            _logger.debug("rankdump: losses were not reported to the agent: %s", failure)

    def _run(self) -> None:
        self._wait_for_start()
        backoff = RetryBackoff(MIN_PAUSE_S, MAX_PAUSE_S)
        while not self._finished():
            taken = self._buffer.items.acknowledged
            try:
                self._connect()
                backoff.reset()
            except _SessionOpeningError as error:
                # The agent itself delays this answer, so the pause need not grow.
                backoff.reset()
                self._set_link(LinkState.OPENING, str(error))
            except (grpc.RpcError, RankdumpError) as failure:
                error = make_error(failure) if isinstance(failure, grpc.RpcError) else failure
                if isinstance(error, CorruptedError) and self._buffer.ring is not None:
                    # The entries in shared memory are lost; later items use the stream.
                    self._selector.avoid_slabs(str(error))
                elif isinstance(error, PermanentError):
                    self._set_link(LinkState.REJECTED, str(error))
                    return
                unopened = LinkState.ABSENT
                if _is_timed_out(failure):
                    error = UnavailableError(f"no answer within {OPEN_TIMEOUT_S:g} s")
                    unopened = LinkState.UNRESPONSIVE
                elif is_answer(failure):
                    unopened = LinkState.WAITING
                elif isinstance(error, UnavailableError):
                    error = explain_unavailable(error, self._address, self._credentials)
                link = LinkState.AWAY if self.was_opened else unopened
                if self._buffer.items.acknowledged > taken:
                    # The stream made progress before it broke, so the next attempt need not wait
                    # long.
                    backoff.reset()
                self._set_link(link, str(error))
            except Exception as error:  # this thread must not end without a log line
                _logger.exception("rankdump: the sender thread stopped")
                self._set_link(LinkState.REJECTED, f"internal error: {error}")
                return
            self._pause(backoff.next_pause_s())

    def _wait_for_start(self) -> None:
        """Wait until an agent that is being started serves, or will never serve."""
        try:
            while self._is_starting is not None and not self._finished() and self._is_starting():
                self._pause(MIN_PAUSE_S)
        except UnavailableError as error:
            self._set_link(LinkState.ABSENT, str(error))

    def _pause(self, pause_s: float) -> None:
        """Wait before the next attempt to connect; the wait is short at the end of the session."""
        buffer, closing = self._buffer, self.closing
        with buffer.changed:
            # New items must not cause frequent attempts, so only the closing of the session cuts
            # the pause short. An attempt then follows at once, because the agent may have come back
            # unnoticed.
            buffer.changed.wait_for(
                lambda: self._finished() or self.closing is not closing,
                min(pause_s, EXIT_PAUSE_S) if closing else pause_s,
            )

    def _finished(self) -> bool:
        gone = self._abandoned or self.link in _IDLE_LINKS
        return self.closing and (gone or not self._buffer.items.outstanding)

    def _connect(self) -> None:
        """Open or resume the session, after at most one redirect; push frames until the stream
        ends.
        """
        request = session_request_to_wire(self._selector.update_request(self._request))
        address = self._address
        for _ in ("here", "redirected"):
            with open_channel(address, self._credentials, CHANNEL_OPTIONS) as channel:
                stub = agent_pb2_grpc.AgentServiceStub(channel)
                self._opening_address = address
                answer = stub.OpenSession(request, timeout=OPEN_TIMEOUT_S)
                grant = session_grant_from_wire(answer)
                if grant.opening:
                    raise _SessionOpeningError(grant.opening)
                if not grant.redirect:
                    self._push(stub, grant)
                    return
                address = resolve_redirect(address, grant.redirect)
        raise ProtocolError(
            f"redirect loop: agent {self._address} redirected to an agent that redirected to "
            f"{address}"
        )

    def _push(self, stub: agent_pb2_grpc.AgentServiceStub, grant: SessionGrant) -> None:
        with self._buffer.changed:
            # After the losses were reported, none of the lost items may be sent.
            if self._abandoned:
                return
            self.was_opened = True
        stream = self._outgoing.begin_stream()
        self._buffer.acknowledge(grant.acknowledged)
        self._selector.select_transport(grant)
        self.changes_plans = grant.changes_plans
        if self._outbox is not None:
            self._outbox.set_agent(
                keeps_steps=grant.keeps_steps, keeps_tensors=grant.keeps_step_tensors
            )
            if not grant.keeps_steps:
                self._on_warning("the agent keeps no black box: it is of an earlier release")
        self._set_link(LinkState.UP, grant.excluded)
        slab_ready = False
        hello = agent_pb2.Hello(session_id=self._request.session_id, token=grant.token)
        responses = stub.Push(self._requests(hello, stream))
        with self._buffer.changed:
            self._call = responses
        try:
            for response in responses:
                self._buffer.acknowledge(response.acknowledged_sequence)
                for warning in response.warnings:
                    self._on_warning(warning)
                slab_ready = slab_ready or response.slab_ready
                if response.HasField("freeze"):
                    self._on_freeze(freeze_notice_from_wire(response.freeze))
                for order in response.orders:
                    self._answer_order(stub, hello, order)
                if response.draining or response.slab_ready:
                    self._outgoing.end_stream()
        except grpc.RpcError as failure:
            error = make_error(failure)
            if not isinstance(error, ForbiddenError):
                raise
            # An earlier, slow OpenSession of this client arrived after the one that returned this
            # token.
            raise UnavailableError(str(error)) from None
        finally:
            self._outgoing.end_stream()
        # If the session gave up waiting, it ended the stream itself, so the agent is still there.
        if not slab_ready and not self._abandoned:
            self._set_link(LinkState.AWAY, "the agent ended the stream")

    def _answer_order(
        self,
        stub: agent_pb2_grpc.AgentServiceStub,
        hello: agent_pb2.Hello,
        message: control_pb2.ControlOrder,
    ) -> None:
        try:
            order = order_from_wire(message)
        except ProtocolError as error:
            # The action is one of a later release; the rank answers, so that the coordinator does
            # not wait for it.
            applied = message.HasField("iteration")
            answer = ControlAnswer(message.id, applied, 0, refused=f"it is not understood: {error}")
        else:
            if self._on_order is None:
                return
            answer = self._on_order(order)
        said = agent_pb2.AnswerOrderRequest(hello=hello, answer=answer_to_wire(answer))
        # The call is not waited for, because the agent repeats an order that it has no answer to.
        self._answering.append(stub.AnswerOrder.future(said, timeout=OPEN_TIMEOUT_S))

    def _requests(self, hello: agent_pb2.Hello, stream: int) -> Iterator[agent_pb2.PushRequest]:
        yield agent_pb2.PushRequest(hello=hello)
        try:
            yield from self._outgoing.requests(stream)
        except FrameTooLargeError as error:
            # This stream ends here, and the next one is opened without the slab.
            self._selector.avoid_slabs(str(error))

    def _set_link(self, link: LinkState, reason: str) -> None:
        # Every failed attempt reports its reason, which the listener logs once.
        self._buffer.set_link(link)
        self._on_link_change(link, reason)


def _is_timed_out(failure: Exception) -> bool:
    """Return whether a call ended because its deadline had passed; a stream has no deadline."""
    return isinstance(failure, grpc.Call) and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED

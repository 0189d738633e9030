"""HTTP server: accepts connections up to a limit, with TLS if there is a guard, and ends
connections whose certificate is revoked. A connection is uvicorn's protocol, extended by the caller
that its certificate identifies, and by time limits for each request to arrive and for each answer
to be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import partial
from types import FrameType
from typing import Any

import anyio.to_thread
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rankdump._core.caller_roles import LOCAL_CALLER, CallerIdentity, build_unknown_caller
from rankdump._http.server_guard import HttpsGuard, RefusalSink, format_peer, identify_caller

CALLER_KEY = "rankdump.caller"
"""Key of the caller in the ASGI scope of a request."""
_MIN_PROGRESS_BYTES = 1 << 16
"""Number of bytes of an answer that the client must read in each span of `timeout_s`, until the
answer is complete.
"""
_MAX_LINE = 200
"""Maximum number of characters of a request's first line that are logged."""


class HttpConnection(H11Protocol):
    """A connection that is closed if the client is too slow.

    A whole request must arrive within `timeout_s` of the begin of its connection or the end of the
    previous answer; the time that the application takes does not count.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        refusals: RefusalSink,
        timeout_s: float,
        on_end: Callable[[HttpConnection], None],
    ) -> None:
        """`config` has the application and the limits of sizes."""
        super().__init__(config, state, {})
        self._on_end = on_end
        self.caller: CallerIdentity = LOCAL_CALLER
        self._refusals, self._timeout_s = refusals, timeout_s
        self._line = b""
        self._timer: asyncio.TimerHandle | None = None
        self._buffered = 0
        self._is_paused = self._is_malformed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection, and identify its caller."""
        super().connection_made(transport)
        peer = format_peer(transport.get_extra_info("peername"))
        self.caller = identify_caller(transport.get_extra_info("ssl_object"), peer)
        self.app = partial(_hand_on, self.app, self.caller)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._stop_watch()
        self._on_end(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request."""
        if self._is_malformed:
            return
        if b"\n" not in self._line and len(self._line) < _MAX_LINE:
            self._line += data[:_MAX_LINE]
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._line = b""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Stop writing until the client has read."""
        super().pause_writing()
        self._is_paused = True
        self._watch()

    def resume_writing(self) -> None:
        """Continue to write, because the client has read."""
        self._is_paused = False
        super().resume_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, after noting the refusal."""
        if not self._is_malformed:
            self._is_malformed = True
            task = self.loop.create_task(self._refuse_malformed(msg))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _refuse_malformed(self, text: str) -> None:
        line = self._line.partition(b"\n")[0].strip().decode("latin-1")[:_MAX_LINE]
        await asyncio.to_thread(self._refusals.add, "malformed", self.caller, line, text)
        if not self.transport.is_closing():
            super().send_400_response(text)

    def _watch(self) -> None:
        """Start or stop the time limit, depending on whether the client has something to do."""
        if self.cycle and not self.cycle.response_complete and not self._is_paused:
            self._stop_watch()
        elif self._timer is None:
            self._buffered = self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(self._timeout_s, self._end_late)

    def _stop_watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        """End the connection, unless the client is still reading its answer."""
        self._timer = None
        left = self.transport.get_write_buffer_size()
        if left and left <= self._buffered - _MIN_PROGRESS_BYTES:
            self._watch()
        else:
            self.transport.abort()


async def _hand_on(
    inner: ASGIApp, caller: CallerIdentity, scope: Scope, receive: Receive, send: Send
) -> None:
    await inner({**scope, CALLER_KEY: caller}, receive, send)


REQUEST_TIMEOUT_S = 10.0
"""Seconds for a handshake, for a request to arrive, and for 64 KiB of an answer to be read."""
_BACKLOG = 64
"""Maximum number of connections that wait to be accepted."""
_TICK_S = 1.0
"""Seconds between two checks for revoked certificates."""
_ACCEPT_PAUSE_S = 1.0
"""Seconds to wait after a failure to accept a connection, such as too many open files."""
_END_S = 1.0
"""Seconds in which running answers may finish when the server ends."""

_logger = logging.getLogger(__name__)


def bind_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; OSError if the address cannot be bound."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


class HttpServer:
    """Serves an ASGI application on a listening socket, which it closes when it ends."""

    def __init__(
        self,
        application: ASGIApp,
        listening: socket.socket,
        *,
        refusals: RefusalSink,
        guard: HttpsGuard | None = None,
        max_connections: int,
        threads: int,
        timeout_s: float = REQUEST_TIMEOUT_S,
        end_streams: Callable[[], None] | None = None,
    ) -> None:
        """At most `threads` blocking functions of the application run at a time. `end_streams` ends
        answers that have no end of their own; it is called on the event loop of the server.
        """
        self._listening, self._refusals, self._guard = listening, refusals, guard
        self._max_connections, self._threads = max_connections, threads
        self._timeout_s, self._end_streams = timeout_s, end_streams
        self._state = ServerState()
        self._config = uvicorn.Config(
            application,
            interface="asgi3",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            # uvicorn's warnings are about requests, which anyone can send, so only errors are
            # logged.
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            # Clients are identified by their certificate or by the mode of a socket, not by
            # headers.
            proxy_headers=False,
        )
        self._connections: set[HttpConnection] = set()
        """All open connections, including those in their handshake."""
        self._openings: set[asyncio.Task[None]] = set()
        # The lock is reentrant, because a signal may arrive in the thread that holds it.
        self._lock = threading.RLock()
        self._end: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_stopping = False

    def run(self, *, signals: Sequence[signal.Signals] = ()) -> None:
        """Serve until a stop is requested, or until one of `signals` arrives in the main thread.

        Signals are handled from the start: the handler of `asyncio.run` loses an interrupt that
        arrives while it is being installed, and the server would end with an error.
        """
        before = {each: signal.signal(each, self._handle_signal) for each in signals}
        try:
            asyncio.run(self._serve())
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def request_stop(self) -> None:
        """Make `run` return soon; may be called from any thread or signal handler, also before
        `run`.
        """
        with self._lock:
            self._is_stopping = True
            if self._end is not None:
                loop, event = self._end
                with contextlib.suppress(RuntimeError):  # the loop is closed already
                    loop.call_soon_threadsafe(event.set)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.request_stop()

    async def _serve(self) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        anyio.to_thread.current_default_thread_limiter().total_tokens = self._threads
        with self._lock:
            self._end = loop, stopping
            if self._is_stopping:
                stopping.set()
        self._listening.setblocking(False)
        tasks = [loop.create_task(self._accept()), loop.create_task(self._check_connections())]
        try:
            await stopping.wait()
        finally:
            for task in (*tasks, *self._openings):
                task.cancel()
            await asyncio.gather(*tasks, *self._openings, return_exceptions=True)
            self._listening.close()
            if self._end_streams is not None:
                self._end_streams()
            await self._close_connections()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(self._listening)
            except OSError as error:
                _logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= self._max_connections:
                # This refusal is only counted and not audited, because all other connections wait
                # meanwhile.
                self._refusals.count("busy")
                connected.close()
                continue
            made = HttpConnection(
                self._config,
                self._state,
                self._refusals,
                self._timeout_s,
                self._connections.discard,
            )
            self._connections.add(made)
            peer = format_peer(address)
            task = loop.create_task(self._open_connection(connected, made, peer))
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)

    async def _open_connection(
        self, connected: socket.socket, made: HttpConnection, peer: str
    ) -> None:
        """Perform the handshake of a connection, and pass the connection to its protocol."""
        secure: dict[str, Any] = {}
        if self._guard is not None:
            context = self._guard.get_context()
            secure = {"ssl": context, "ssl_handshake_timeout": self._timeout_s}
        loop, why = asyncio.get_running_loop(), ""
        try:
            await loop.connect_accepted_socket(lambda: made, connected, **secure)
            return
        except ssl.SSLEOFError:
            pass  # the client left before it sent anything
        except ssl.SSLError as error:
            cause = (error.reason or str(error)).lower().replace("_", " ")
            why = f"a handshake failed: {cause}"
        except OSError as error:
            _logger.debug("a connection from %s failed: %s", peer, error)
        except BaseException:
            self._connections.discard(made)
            raise
        self._connections.discard(made)
        if why:
            caller = build_unknown_caller(peer)
            await asyncio.to_thread(self._refusals.add, "certificate", caller, "", why)

    async def _check_connections(self) -> None:
        """Enforce the time limits of answers, and end connections whose certificate was revoked."""
        while True:
            date = formatdate(usegmt=True).encode()
            self._state.default_headers = [(b"date", date)]
            for each in self._list_connections():
                if self._guard is not None and self._guard.is_revoked(each.caller):
                    _logger.warning("a connection of %s is ended: revoked", each.caller.name)
                    each.transport.abort()
            await asyncio.sleep(_TICK_S)

    async def _close_connections(self) -> None:
        for each in self._list_connections():
            each.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_END_S)
        for task in self._state.tasks:
            task.cancel()
        for each in self._list_connections():
            each.transport.abort()

    def _list_connections(self) -> list[HttpConnection]:
        return [each for each in self._state.connections if isinstance(each, HttpConnection)]

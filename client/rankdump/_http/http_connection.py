"""One connection of the HTTP server: uvicorn's protocol with the caller of its certificate, and a
time for each request to arrive and for each answer to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rankdump._core.caller_roles import LOCAL_CALLER, CallerIdentity
from rankdump._http.server_guard import RefusalSink, format_peer, identify_caller

CALLER_KEY = "rankdump.caller"
"""Key of the caller in the scope of a request."""
_MIN_PROGRESS_BYTES = 1 << 16
"""Bytes of an answer that have to be read in each span of `timeout_s`, until it is over."""
_MAX_LINE = 200
"""Characters of a first line that are noted."""


class HttpConnection(H11Protocol):
    """A connection that is closed when it is late.

    A request has `timeout_s` to arrive as a whole, from the beginning of its connection or the
    end of the answer before; the time that the application takes does not count.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        refusals: RefusalSink,
        timeout_s: float,
        on_end: Callable[[HttpConnection], None],
    ) -> None:
        """The application and the limits of sizes are those of the configuration."""
        super().__init__(config, state, {})
        self._on_end = on_end
        self.caller: CallerIdentity = LOCAL_CALLER
        self._refusals, self._timeout_s = refusals, timeout_s
        self._line = b""
        self._timer: asyncio.TimerHandle | None = None
        self._buffered = 0
        self._is_paused = self._is_malformed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin with the caller of the connection."""
        super().connection_made(transport)
        peer = format_peer(transport.get_extra_info("peername"))
        self.caller = identify_caller(transport.get_extra_info("ssl_object"), peer)
        self.app = partial(_hand_on, self.app, self.caller)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_watch()
        self._on_end(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in bytes of a request."""
        if self._is_malformed:
            return
        if b"\n" not in self._line and len(self._line) < _MAX_LINE:
            self._line += data[:_MAX_LINE]
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._line = b""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Wait until the client has read."""
        super().pause_writing()
        self._is_paused = True
        self._watch()

    def resume_writing(self) -> None:
        """Go on when the client has read."""
        self._is_paused = False
        super().resume_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, once that is noted."""
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
        """Begin or end to count the time, by whether the client has something to do."""
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
        """End the connection unless the client goes on to read its answer."""
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

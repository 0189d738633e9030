"""A running job for the live page: its status, a way to change what it dumps, and the stream of its
states. `rankdump web` gets them from a daemon; the pages of a coordinator get them from that
coordinator.

States are read once for all browsers that watch, and only while any does. A slow browser gets the
latest state when it is ready for it, so no states queue up in memory.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import anyio
from starlette.types import Receive, Scope, Send

from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.status import StatusView
from rankdump.errors import RankdumpError


@dataclass(frozen=True, slots=True)
class ControlOutcome:
    """Result of an order."""

    lines: tuple[str, ...]
    """Sentences about the result; each names all ranks that it is true for."""
    is_complete: bool
    """Whether every rank carries out the order, and in the same iteration."""


class JobSource(Protocol):
    """Source of the states of jobs, and receiver of orders to them; safe to use from
    all threads.
    """

    @property
    def address(self) -> str:
        """Address of the daemon, for people."""
        ...

    def read_status(self) -> StatusView:
        """Return the status of all jobs; an error of rankdump if it cannot be determined now."""
        ...

    def list_actions(self) -> tuple[ControlAction, ...]:
        """Return the actions that may be requested, as far as that is known in advance; none
        without the role.
        """
        ...

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        """Let a job carry out an order, which takes seconds; the same order is carried out only
        once.

        ForbiddenError without the role, RejectedError for a job that is unknown or has ended.
        """
        ...


READ_INTERVAL_S = 1.0
_RECONNECT_MS = 2000
_END_S = 0.5
_LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends in an event stream; other line separators of Unicode are none."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """Result of one read of the status."""

    number: int = 0
    """Number of the read; 0 before the first one."""
    read_s: float = 0.0
    """Time of the read, on a monotonic clock."""
    view: StatusView | None = None
    """The latest known status; None before the first one."""
    time_text: str = ""
    """Time of the latest known status, as text."""
    problem: str = ""
    """Why there is no newer status; empty if there is no problem."""
    html: str = ""


class LiveFeed:
    """Reads states while anyone requests them, at most one in each interval."""

    def __init__(
        self,
        read_status: Callable[[], StatusView],
        render: Callable[[LiveState], str],
        *,
        interval_s: float = READ_INTERVAL_S,
    ) -> None:
        self._read_status, self._render, self._interval_s = read_status, render, interval_s
        self._latest = LiveState()
        self._lock = asyncio.Lock()
        # A thread pool of its own: a daemon that does not answer must block neither the threads of
        # pages nor the end of a stream.
        self._thread = ThreadPoolExecutor(1)
        self.closed = asyncio.Event()
        """Set when the server ends; it ends all event streams."""

    async def get_fresh(self) -> LiveState:
        """Return the latest state; it is read now, unless a browser watches or someone has just
        requested it.
        """
        latest = self._latest
        is_fresh = time.monotonic() - latest.read_s < self._interval_s
        if latest.number and (is_fresh or self._lock.locked()):
            return latest
        return await self.get_newer(latest.number)

    async def get_newer(self, number: int) -> LiveState:
        """Return a state that is newer than the one with this number; the first caller reads it for
        all.
        """
        async with self._lock:
            if self._latest.number > number:
                return self._latest
            if self._latest.number:
                due_s = self._latest.read_s + self._interval_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            loop = asyncio.get_running_loop()
            self._latest = await loop.run_in_executor(self._thread, self._read)
            return self._latest

    def _read(self) -> LiveState:
        last = replace(self._latest, number=self._latest.number + 1, problem="")
        try:
            view = self._read_status()
            made = replace(last, view=view, time_text=time.strftime("%H:%M:%S"))
        except (RankdumpError, OSError) as error:
            made = replace(last, problem=" ".join(str(error).split()))
        made = replace(made, read_s=time.monotonic())
        return replace(made, html=self._render(made))


class EventStream:
    """Answer to a browser that watches, as an ASGI application: one event for each new state."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser disconnects or the server ends."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with anyio.create_task_group() as group:

            async def end_when_closed() -> None:
                await self._feed.closed.wait()
                group.cancel_scope.cancel()

            async def end_with_connection() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(end_when_closed)
            group.start_soon(end_with_connection)
            async for text in iter_events(self._feed):
                body = text.encode(errors="replace")
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if self._feed.closed.is_set():
            with anyio.move_on_after(_END_S):  # the browser may not accept anything
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def iter_events(feed: LiveFeed) -> AsyncIterator[str]:
    """Yield events without end: the time of each read, and the changed part of the page if it
    differs.
    """
    yield f"retry: {_RECONNECT_MS}\n\n"
    state, shown = await feed.get_fresh(), ""
    while True:
        text = format_event("time", state.time_text)
        if state.html != shown:
            text, shown = format_event("state", state.html) + text, state.html
        yield text
        state = await feed.get_newer(state.number)


def format_event(kind: str, text: str) -> str:
    """Return an event with a text that may have several lines."""
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {kind}\n{lines}\n"

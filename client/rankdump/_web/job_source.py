"""A running job as the live page sees it: its status, a way to change what it dumps, and the stream
of its states. The command asks a daemon; a daemon can serve itself.

States are read once for all who watch, and only while somebody does. A browser that is slow gets
the latest state when it is ready for it: none wait for it in memory.
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
    """What became of an order."""

    lines: tuple[str, ...]
    """Sentences for people, one for all ranks of which it is true."""
    is_complete: bool
    """Whether every rank does it, and where the others do."""


class JobSource(Protocol):
    """Source of the states of jobs, and receiver of orders to them; for all threads."""

    @property
    def address(self) -> str:
        """Whom it asks, for people."""
        ...

    def read_status(self) -> StatusView:
        """Return the status of all jobs; an error of rankdump when it is not known now."""
        ...

    def list_actions(self) -> tuple[ControlAction, ...]:
        """Return what may be asked, as far as that is known before; nothing without the role."""
        ...

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        """Carry out an order, which takes seconds; the same order is carried out once.

        ForbiddenError without the role, RejectedError for a job that is not known or has ended.
        """
        ...


READ_INTERVAL_S = 1.0
_RECONNECT_MS = 2000
_END_S = 0.5
_LINE_END = re.compile(r"\r\n|\r|\n")
"""What ends a line of a stream of events; other separators of Unicode do not."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """What was read at one time."""

    number: int = 0
    """Counts the reads; 0 before the first."""
    read_s: float = 0.0
    """When, by a monotonic clock."""
    view: StatusView | None = None
    """The latest status that is known; None before there was one."""
    time_text: str = ""
    """When that was, for people."""
    problem: str = ""
    """Why there is no later one; else empty."""
    html: str = ""


class LiveFeed:
    """Reads states while somebody asks for them, at most one each interval."""

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
        # Of its own: a daemon that does not answer must not hold the threads of pages, nor the end
        # of a stream.
        self._thread = ThreadPoolExecutor(1)
        self.closed = asyncio.Event()
        """Set when the server ends; it ends all streams of events."""

    async def get_fresh(self) -> LiveState:
        """Return the latest state, read now unless somebody watches or has just asked."""
        latest = self._latest
        is_fresh = time.monotonic() - latest.read_s < self._interval_s
        if latest.number and (is_fresh or self._lock.locked()):
            return latest
        return await self.get_newer(latest.number)

    async def get_newer(self, number: int) -> LiveState:
        """Return a later state than the one of a number; the first who asks reads it for all."""
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
    """Answer to a browser that watches, an ASGI application: an event for each new state."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser goes, or the server ends."""
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
            with anyio.move_on_after(_END_S):  # it may not take anything
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def iter_events(feed: LiveFeed) -> AsyncIterator[str]:
    """Yield events without end: the time of each read, and the part of the page when it differs."""
    yield f"retry: {_RECONNECT_MS}\n\n"
    state, shown = await feed.get_fresh(), ""
    while True:
        text = format_event("time", state.time_text)
        if state.html != shown:
            text, shown = format_event("state", state.html) + text, state.html
        yield text
        state = await feed.get_newer(state.number)


def format_event(kind: str, text: str) -> str:
    """Return an event with a text of any lines."""
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {kind}\n{lines}\n"

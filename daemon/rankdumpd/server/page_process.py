"""Process that shows pages of dump trees and running jobs. The daemon starts it, sends it the list
of trees and the status, restarts it when it ends, and forwards page requests to it over a socket in
a private folder. It is a separate interpreter, so that reading for a page does not delay calls of
agents. The status is sent over a socket that answers each connection with one message.

Other users cannot enter the private folder. The process holds a lock in it while it lives, so a
later process can remove the folders of killed ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from rankdump._core.backoff import RetryBackoff
from rankdump._core.log_once import LogOnce
from rankdump._core.status import StatusView
from rankdump._http.request_gate import format_request_line, get_caller
from rankdump._wire.status_messages import view_to_wire
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.background_thread import BackgroundThread

_logger = logging.getLogger(__name__)

_MAX_TRIES = 3
_LOCK_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """One folder, from its creation to `remove`."""

    def __init__(self, prefix: str) -> None:
        """Make a folder; remove those of the same prefix and user whose processes are gone."""
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            lock = _lock_own_folder(path)
            if lock >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        self._lock = -1
        for tries_left in reversed(range(_MAX_TRIES)):
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = _lock_own_folder(self.path)
            # On a disk without locks every attempt fails, and no process can lock the folder to
            # remove it.
            if self._lock >= 0 or not tries_left:
                return
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder with its files; may be repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock_own_folder(path: Path) -> int:
    """Return a locked descriptor; -1 when the folder is another user's, in use or removed."""
    with contextlib.suppress(OSError):
        lock = os.open(path, _LOCK_FLAGS)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(lock)
            # After another process has removed the folder, its lock file has no name any more.
            if found.st_uid == os.geteuid() and found.st_nlink:
                return lock
        except BlockingIOError:
            pass
        os.close(lock)
    return -1


_SEND_TIMEOUT_S = 5.0
_STATUS_BACKLOG = 4


class StatusSocket:
    """Serves the status of jobs; one connection at a time, because its only reader asks at most
    once a second.
    """

    def __init__(self, build_status: Callable[[], StatusView]) -> None:
        self._build_status = build_status
        self._listening: socket.socket | None = None
        self._logged = LogOnce(_logger)
        self._thread = BackgroundThread(self._run, "rankdumpd-status")

    def start(self, path: str) -> None:
        """Listen at a socket path in a folder that other users cannot enter."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(_STATUS_BACKLOG)
        self._thread.start()

    def stop(self) -> None:
        """Stop; may be repeated, and called without `start`."""
        if self._listening is None:
            return
        self._thread.request_stop()
        # Closing the socket alone would not end the thread's wait for a connection.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SEND_TIMEOUT_S)
        self._listening.close()
        self._listening = None

    def _run(self) -> None:
        assert self._listening is not None
        while not self._thread.is_stopping:
            try:
                asking, _ = self._listening.accept()
            except OSError as error:
                if self._thread.is_stopping:
                    return
                self._logged.log(logging.ERROR, f"the pages cannot ask for the status: {error}")
                self._thread.wait(1.0)
                continue
            with asking:
                self._answer(asking)

    def _answer(self, asking: socket.socket) -> None:
        """Send the status over an accepted connection; send nothing if it cannot be determined."""
        try:
            asking.settimeout(_SEND_TIMEOUT_S)
            asking.sendall(view_to_wire(self._build_status()).SerializeToString())
        except Exception:
            # An error here must not end the daemon, which has other work.
            _logger.exception("the status cannot be told to the pages")


_MODULE = "rankdump._web.tree_server"
_FOLDER_PREFIX = "rankdumpd-pages-"
_PAGES, _STATUS = "pages.sock", "status.sock"
_INTERVAL_S = 1.0
"""Seconds between two checks of the list of trees and of the process."""
_MAX_RESTART_DELAY_S = 60.0
_STEADY_RUN_S = 60.0
_END_S = 3.0
_BACKLOG = 256
_CHUNK_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_MAX_ANSWER_S = 120.0
"""Longest wait in seconds for the first byte of a page; pages have limits of their own."""
_NO_ANSWER = (
    asyncio.TimeoutError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
    ValueError,
    OSError,
)
_FORWARDED_HEADERS = ("accept", "hx-request", "if-none-match", "if-modified-since")


class AnswerHead(NamedTuple):
    """Status code and headers of an HTTP answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class PageProcess:
    """Runs the process of pages and forwards requests to it; usable as an ASGI application."""

    def __init__(
        self,
        list_trees: Callable[[], Sequence[str]],
        build_status: Callable[[], StatusView],
        audit: AuditLog | None = None,
    ) -> None:
        """`list_trees` returns the roots of trees that have pages; it is called every second.
        `build_status` returns the status of all jobs; it is called while a page of jobs is open.
        """
        self._list_trees, self._audit = list_trees, audit
        self._status = StatusSocket(build_status)
        self._folder: PrivateFolder | None = None
        self._listening: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._known: tuple[str, ...] | None = None
        self._thread = BackgroundThread(self._run, "rankdumpd-pages")

    @property
    def pid(self) -> int | None:
        """Process id of the process of pages; None while it does not run."""
        process = self._process
        return process.pid if process else None

    def start(self) -> None:
        """Start the process without waiting for it; requests wait until it answers."""
        self._folder = PrivateFolder(_FOLDER_PREFIX)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self._find_path(_PAGES))
        self._listening.listen(_BACKLOG)
        self._status.start(self._find_path(_STATUS))
        self._thread.start()

    def stop(self) -> None:
        """End the process of pages; may be repeated, and called without `start`."""
        self._thread.stop(_END_S)
        self._end_process()
        self._status.stop()
        if self._listening is not None and self._folder is not None:
            self._listening.close()
            self._folder.remove()
            self._listening = self._folder = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an HTTP request to the process of pages, and audit it."""
        status = "CANCELLED"

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._forward(scope, receive, send_noted)
        finally:
            if self._audit and not scope["path"].startswith("/static/"):
                who = get_caller(scope).audit_fields()
                fields = {"method": format_request_line(scope), **who, "result": status}
                await asyncio.to_thread(self._audit.add, "call", fields)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._find_path(_PAGES), limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            text = f"rankdump: the pages do not answer: {error.strerror}; try again\n"
            await PlainTextResponse(text, 503)(scope, receive, send)
            return
        writer.write(make_request(scope))
        copying = asyncio.ensure_future(_copy_answer(reader, send))
        leaving = asyncio.ensure_future(_wait_until_gone(receive))
        try:
            await asyncio.wait({copying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_answered = copying.done() and copying.result()
        finally:
            copying.cancel()
            leaving.cancel()
            writer.close()
        if not is_answered and not leaving.done():
            text = "rankdump: the process of pages has ended, or is late: try again\n"
            await PlainTextResponse(text, 503)(scope, receive, send)

    def _find_path(self, name: str) -> str:
        return str(self._folder.path / name) if self._folder else ""

    def _run(self) -> None:
        backoff = RetryBackoff(_INTERVAL_S, _MAX_RESTART_DELAY_S)
        while not self._thread.is_stopping:
            pause_s = _INTERVAL_S
            try:
                if self._process is None:
                    self._start_process()
                    self._started_s = time.monotonic()
                elif self._process.poll() is not None:
                    if time.monotonic() - self._started_s > _STEADY_RUN_S:
                        backoff.reset()
                    code = self._process.returncode
                    _logger.error("the process of pages ended with code %d; it is restarted", code)
                    self._end_process()
                    pause_s = backoff.next_pause_s()
                self._send_trees()
            except Exception:
                # An error here must not end the daemon, which has other work.
                _logger.exception("the process of pages cannot be started or told of trees")
                pause_s = backoff.next_pause_s()
            self._thread.wait(pause_s)

    def _start_process(self) -> None:
        assert self._listening is not None
        assert self._folder is not None
        number = self._listening.fileno()
        self._known = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(number), self._find_path(_STATUS)],
            # `-m` searches the working folder for modules first, so this must be a folder without
            # modules.
            cwd=self._folder.path,
            stdin=subprocess.PIPE,
            pass_fds=(number,),
            # A new session, so that Ctrl-C in a terminal reaches the daemon only.
            start_new_session=True,
        )

    def _send_trees(self) -> None:
        """Send the list of trees to the process if the list has changed."""
        process, trees = self._process, tuple(self._list_trees())
        if process is None or process.stdin is None or trees == self._known:
            return
        line = json.dumps({"trees": trees}).encode() + b"\n"
        # the process has ended and gets the trees after its restart
        with contextlib.suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
            self._known = trees

    def _end_process(self) -> None:
        """End the process and its child processes; they only read, so nothing is lost."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            process.communicate()


def make_request(scope: Scope) -> bytes:
    """Return the bytes of an HTTP/1.0 request for the process, whose answer ends when the
    connection closes.
    """
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = Headers(scope=scope)
    kept = [(name, headers[name]) for name in _FORWARDED_HEADERS if name in headers]
    lines = [b"GET " + target + b" HTTP/1.0", *(f"{n}: {v}".encode("latin-1") for n, v in kept)]
    return b"\r\n".join((*lines, b"", b""))


def parse_head(head: bytes) -> AnswerHead:
    """Return status and headers from the head of an HTTP answer; ValueError when it is not HTTP."""
    first, *lines = head.split(b"\r\n")
    status = int(first.split(b" ", 2)[1])
    fields = (line.partition(b":") for line in lines if line)
    headers = [(name.strip().lower(), value.strip()) for name, _, value in fields]
    return AnswerHead(status, [each for each in headers if each[0] not in (b"connection", b"date")])


async def _copy_answer(reader: asyncio.StreamReader, send: Send) -> bool:
    """Forward an answer piece by piece; return whether there was an answer.

    An answer that breaks off is not completed, so that the server closes the client's connection.
    """
    try:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _MAX_ANSWER_S)
        head = parse_head(text)
    except _NO_ANSWER:
        return False
    start = {"type": "http.response.start", "status": head.status, "headers": head.headers}
    await send(start)
    left = next((int(value) for name, value in head.headers if name == b"content-length"), None)
    with contextlib.suppress(OSError):
        while piece := await reader.read(_CHUNK_BYTES):
            left = None if left is None else left - len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    return True


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

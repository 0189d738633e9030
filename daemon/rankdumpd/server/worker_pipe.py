"""Both ends of the pipes between a worker and the process that started it; there is one pipe in
each direction.

The supervisor keeps the worker's standard input open. A line on it requests a drain or contains new
settings. The end of standard input means that the supervisor is gone; the worker then exits at
once, because the next worker needs the ledger and ranks resend records that were not acknowledged.
On its standard output the worker reports its address and, after a drain, the number of items left.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_DRAIN_WORD, _RELOAD_WORD = "drain", "reload"
_READY_WORD, _LEFT_WORD = "ready", "left"
_EXIT_ABANDONED = 3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Report of a worker that it serves."""

    address: str


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """Report of a worker that it has drained."""

    unfinished_items: int
    """Items that were not finished by the deadline."""


class WorkerPipe:
    """The worker's end of the pipes; uses standard input and output, which nothing else may use."""

    def follow_requests(
        self, drain: Callable[[], None], reload: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Handle requests of the supervisor: call `drain`, or `reload` with an environment of
        settings; exit when the supervisor is gone.
        """
        thread = threading.Thread(
            target=_follow_pipe,
            args=(sys.stdin.fileno(), drain, reload),
            name="rankdumpd-worker-pipe",
            daemon=True,
        )
        thread.start()

    def send_ready(self, address: str) -> None:
        """Report the address at which this process serves."""
        _print_line(f"{_READY_WORD} {address}")

    def send_drained(self, items: int) -> None:
        """Report the number of items that a drain left unfinished."""
        _print_line(f"{_LEFT_WORD} {items}")


def request_drain(process: subprocess.Popen[bytes]) -> None:
    """Request a worker to drain and exit; do nothing when the worker is gone."""
    _write_line(process, _DRAIN_WORD)


def send_settings(process: subprocess.Popen[bytes], environ: Mapping[str, str]) -> None:
    """Request a worker to reload its settings from this environment; do nothing when the worker is
    gone.
    """
    _write_line(process, f"{_RELOAD_WORD} {json.dumps(dict(environ))}")


def parse_worker_line(line: bytes) -> WorkerReady | WorkerDrained | None:
    """Return the report in a line of a worker's output; None when the line is something else."""
    word, _, rest = line.decode(errors="replace").strip().partition(" ")
    if word == _READY_WORD and rest:
        return WorkerReady(rest)
    if word == _LEFT_WORD and rest.isdecimal():
        return WorkerDrained(int(rest))
    return None


def _write_line(process: subprocess.Popen[bytes], line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        assert process.stdin is not None
        os.write(process.stdin.fileno(), f"{line}\n".encode())


def _follow_pipe(
    descriptor: int, drain: Callable[[], None], reload: Callable[[Mapping[str, str]], None]
) -> None:
    # Read without a buffer: at exit this thread would hold the lock of a buffered file, and the
    # interpreter aborts then.
    partial = b""
    while data := os.read(descriptor, 4096):
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == _DRAIN_WORD:
                drain()
            elif word == _RELOAD_WORD:
                reload(json.loads(rest))
    _logger.error("the supervisor of this worker is gone; the worker exits")
    os._exit(_EXIT_ABANDONED)


def _print_line(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())

"""What holds a worker to the process that started it: one pipe each way, both ends.

The upper process keeps the worker's standard input open. A line on it asks for a drain, or brings
new settings; its end means that the upper process is gone, however it went, and ends the worker at
once: the next one wants the ledger, and ranks send again what was not acknowledged. On its standard
output the worker says where it listens and, after a drain, what is left.
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

_DRAIN, _RELOAD = "drain", "reload"
_READY, _LEFT = "ready", "left"
_EXIT_ABANDONED = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker serves."""

    address: str


@dataclass(frozen=True, slots=True)
class Left:
    """The worker has drained."""

    items: int
    """What is unfinished."""


class Leash:
    """The worker's end; it takes standard input and output for itself."""

    def follow(
        self, drain: Callable[[], None], reload: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Call `drain` when one is wanted and `reload` with an environment that brings settings;
        end this process when nobody holds the leash.
        """
        thread = threading.Thread(
            target=_follow,
            args=(sys.stdin.fileno(), drain, reload),
            name="rankdumpd-leash",
            daemon=True,
        )
        thread.start()

    def ready(self, address: str) -> None:
        """Say that this process serves, and where."""
        _say(f"{_READY} {address}")

    def left(self, items: int) -> None:
        """Say what a drain left unfinished."""
        _say(f"{_LEFT} {items}")


def ask_to_drain(process: subprocess.Popen[bytes]) -> None:
    """Ask a worker to drain and leave; nothing when it is gone."""
    _tell(process, _DRAIN)


def give_settings(process: subprocess.Popen[bytes], environ: Mapping[str, str]) -> None:
    """Let a worker read its settings again, from this environment; nothing when it is gone."""
    _tell(process, f"{_RELOAD} {json.dumps(dict(environ))}")


def heard(line: bytes) -> Ready | Left | None:
    """Return what a worker's line says; None when it says nothing of the kind."""
    word, _, rest = line.decode(errors="replace").strip().partition(" ")
    if word == _READY and rest:
        return Ready(rest)
    if word == _LEFT and rest.isdecimal():
        return Left(int(rest))
    return None


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        assert process.stdin is not None
        os.write(process.stdin.fileno(), f"{line}\n".encode())


def _follow(
    descriptor: int, drain: Callable[[], None], reload: Callable[[Mapping[str, str]], None]
) -> None:
    # Not through a buffered file: its lock, held by this thread, would abort the exit.
    begun = b""
    while some := os.read(descriptor, 4096):
        *lines, begun = (begun + some).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == _DRAIN:
                drain()
            elif word == _RELOAD:
                reload(json.loads(rest))
    _log.error("the process that started this one is gone")
    os._exit(_EXIT_ABANDONED)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())

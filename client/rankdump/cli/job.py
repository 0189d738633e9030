"""The user's command as a child: its own streams, our signals, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

import click

_Handler: TypeAlias = Callable[[int, FrameType | None], None]

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
NOT_FOUND, NOT_EXECUTABLE = 127, 126


def run_job(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command to its end; return its code as a shell would, 128 + n after signal n."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif not (number == signal.SIGINT and _terminal_reaches_all()):
            child.send_signal(number)

    with _handling(forward):
        try:
            child = subprocess.Popen(command, env=dict(environ))
        except FileNotFoundError:
            return _not_started(command[0], "no such command", NOT_FOUND)
        except OSError as error:
            return _not_started(command[0], str(error.strerror), NOT_EXECUTABLE)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def ending_orderly() -> Generator[None, None, None]:
    """Turn a termination outside the job into an exit that still runs every clean-up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    with _handling(leave, numbers=(signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _handling(
    handler: _Handler, numbers: tuple[signal.Signals, ...] = _FORWARDED
) -> Generator[None, None, None]:
    # What is ignored stays so: nohup means that a hang-up is nobody's business.
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _terminal_reaches_all() -> bool:
    """Return whether Ctrl-C reached the child too: the terminal signals its whole group."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp() if sys.__stdin__ else False
    except (OSError, ValueError):
        return False


def _not_started(name: str, cause: str, code: int) -> int:
    click.echo(f"rankdump: {name}: {cause}", err=True)
    return code

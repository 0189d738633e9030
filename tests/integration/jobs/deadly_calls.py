"""Calls of which one kills the process: before it where its number is odd, else behind it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from typing import Any

TABLE_CALLS = ("open", "fsync", "rename", "unlink", "mkdir", "fchmod", "close")
"""Of `os`, by which the table of statistics is written."""
_counter = itertools.count(1)
_kill = os.kill


def make_deadly(place: Any, name: str, last: int, victims: Sequence[int] = ()) -> None:
    """Replace a function of a module or class; the call of number `last` of all such kills.

    `victims` are the processes, in this order; by default this one.
    """
    real: Any = getattr(place, name)
    pids = victims or (os.getpid(),)

    def call(*args: Any, **fields: Any) -> Any:
        number = next(_counter)
        if number == last and number % 2:
            _kill_each(pids)
        try:
            return real(*args, **fields)
        finally:
            # Also behind a call that failed.
            if number == last:
                _kill_each(pids)

    setattr(place, name, call)


def _kill_each(pids: Sequence[int]) -> None:
    for pid in pids:
        _kill(pid, signal.SIGKILL)

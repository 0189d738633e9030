"""Calls of which one kills the process: before it where its number is odd, else behind it."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

_counter = itertools.count(1)
_kill = os.kill


def make_deadly(place: Any, name: str, last: int) -> None:
    """Replace a function of a module or class; the call of number `last` of all such kills."""
    real: Any = getattr(place, name)
    own_pid = os.getpid()

    def call(*args: Any, **fields: Any) -> Any:
        number = next(_counter)
        if number == last and number % 2:
            _kill(own_pid, signal.SIGKILL)
        try:
            return real(*args, **fields)
        finally:
            # Also behind a call that failed.
            if number == last:
                _kill(own_pid, signal.SIGKILL)

    setattr(place, name, call)

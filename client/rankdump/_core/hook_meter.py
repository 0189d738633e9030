"""Time that calls of rankdump take from the threads of a job: hooks of adapters and calls of a
session, including everything that they do, such as copies, statistics and waits for space.

It is off by default; a plan that limits the overhead switches it on. A measured call reads the
clock twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock, get_ident


class HookMeter:
    """Sum of the times of the outermost calls of each thread; safe to use from several threads."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._since: dict[int, int] = {}
        self._users = 0
        self.is_on = False
        """Whether calls are to be measured; callers check it first."""
        self.ended_ns = 0
        """Nanoseconds of all calls that have ended; it never decreases."""

    def start(self) -> None:
        """Measure calls for one more session."""
        self._users += 1
        self.is_on = True

    def stop(self) -> None:
        """Measure calls for one session less; after the last session, measuring stops."""
        self._users -= 1
        if self._users <= 0:
            self.disarm()

    def disarm(self) -> None:
        """Stop measuring in a forked child; takes no lock, because another thread may have held it
        during the fork.
        """
        self._users = 0
        self.is_on = False
        self._since = {}

    def begin(self) -> bool:
        """Begin a call; return False for a call within another call of the thread, for which `end`
        must not be called.
        """
        thread = get_ident()
        if thread in self._since:
            return False
        self._since[thread] = self._clock_ns()
        return True

    def end(self) -> None:
        """End the call of this thread for which `begin` returned True."""
        since_ns = self._since.pop(get_ident(), None)
        if since_ns is not None:
            spent_ns = self._clock_ns() - since_ns
            with self._lock:
                self.ended_ns += spent_ns

    def split(self) -> tuple[int, int]:
        """Return the present time and the total time of all calls so far, including the running
        call of this thread, in nanoseconds.
        """
        now_ns, thread = self._clock_ns(), get_ident()
        since_ns = self._since.get(thread)
        with self._lock:
            if since_ns is not None:
                self._since[thread] = now_ns
                self.ended_ns += now_ns - since_ns
            return now_ns, self.ended_ns


HOOK_METER = HookMeter()
"""Meter of this process, for all of its sessions."""

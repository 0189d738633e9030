"""What the service manager is told: readiness, how it stands, the end, and that this one lives.

The words are those of sd_notify(3). Without a service manager nothing is said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping

TICK_S = 10.0
"""How often a process looks after itself, where the service manager does not say."""
_US = 1_000_000

_log = logging.getLogger(__name__)


class Notifier:
    """Tells the service manager, which an environment names; safe to use from any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Read here and not in the settings: these belong to systemd, not to the operator.
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_us = _watchdog_us(environ) if self._address else 0

    @property
    def tick_s(self) -> float:
        """Seconds between two signs of life: twice as often as the watchdog wants them."""
        return min(TICK_S, self._watchdog_us / _US / 2) if self._watchdog_us else TICK_S

    def ready(self, status: str) -> None:
        """Say that this process serves, also after a reload."""
        self._say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Say that settings are read again; `ready` follows."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """Say that the end begins."""
        self._say("STOPPING=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Say how it stands, in a line."""
        self._say(f"STATUS={text}")

    def alive(self, status: str) -> None:
        """Say that all is well, and how it stands."""
        self._say(*self._ping(), f"STATUS={status}")

    @contextlib.contextmanager
    def busy(
        self, limit_s: float, *, unless: Callable[[], bool] = lambda: False
    ) -> Generator[None]:
        """Ask for more time while a start or a stop goes on, for no longer than that."""
        if not self._address:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(
            target=self._ask_for_time,
            args=(over, limit_s, unless),
            name="rankdumpd-notify",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _ask_for_time(
        self, over: threading.Event, limit_s: float, unless: Callable[[], bool]
    ) -> None:
        deadline_s = time.monotonic() + limit_s
        while not over.wait(self.tick_s) and time.monotonic() < deadline_s and not unless():
            # It counts from now on, and has to reach beyond the next one.
            self._say(f"EXTEND_TIMEOUT_USEC={round(3 * self.tick_s * _US)}", *self._ping())

    def _ping(self) -> tuple[str, ...]:
        return ("WATCHDOG=1",) if self._watchdog_us else ()

    def _say(self, *assignments: str) -> None:
        if not self._address:
            return
        address = self._address
        target = "\0" + address[1:] if address.startswith("@") else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            try:
                notifier.sendto("\n".join(assignments).encode(), target)
            except OSError as error:
                _log.warning("cannot tell %s to %s: %s", assignments[0], address, error)


def _watchdog_us(environ: Mapping[str, str]) -> int:
    """Return after how long without a sign of life this process is killed; 0: never."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or pid not in ("", str(os.getpid())):
        return 0
    return int(text)

"""What signals ask of a process, waited for in one place."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from enum import Enum
from types import FrameType


def ask_to_stop() -> None:
    """Ask this process to stop, as an operator would: whatever runs it ends it in its own order."""
    os.kill(os.getpid(), signal.SIGTERM)


class Wish(Enum):
    """What somebody wants of this process."""

    NOTHING = "nothing"
    RELOAD = "reload"
    STOP = "stop"


class Signals:
    """SIGTERM and SIGINT ask for a stop, SIGHUP for a reload where there is one; waited for on a
    pipe.

    An Event would not do: its lock may be held by the very thread that the handler interrupts,
    and a signal that another thread receives would not wake a thread that waits for a lock.
    """

    def __init__(self, *, reloads: bool = False) -> None:
        """Without `reloads` SIGHUP is left alone."""
        self._stop = self._reload = self._signalled = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._earlier_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if reloads else ()))
        self._earlier = {number: signal.signal(number, self._on_signal) for number in numbers}

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop

    def wait(self, timeout_s: float | None = None) -> Wish:
        """Return the next wish, NOTHING after so long without one; a stop goes before all else."""
        while not (self._stop or self._reload):
            ready, _, _ = select.select([self._read_end], [], [], timeout_s)
            if not ready:
                return Wish.NOTHING
            os.read(self._read_end, 64)
        if self._stop:
            return Wish.STOP
        self._reload = False
        return Wish.RELOAD

    def ask(self, wish: Wish = Wish.STOP) -> None:
        """Ask as a first signal does, from any thread; a signal beside it is no second one."""
        self._stop = self._stop or wish is Wish.STOP
        self._reload = self._reload or wish is Wish.RELOAD
        with contextlib.suppress(OSError):  # full, or closed: the wait is over then
            os.write(self._write_end, b"x")

    def close(self) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_wakeup)
        write_end, self._write_end = self._write_end, -1
        os.close(self._read_end)
        os.close(write_end)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload = True
            return
        if self._signalled:
            os.write(sys.stderr.fileno(), b"second signal: stopping at once\n")
            os._exit(1)
        self._signalled = self._stop = True

"""Start, readiness, signals and stop of a daemon process; knows no room by name."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Protocol

from rankdumpd.leash import Leash

_log = logging.getLogger(__name__)
_GRACE_S = 1.0


class Room(Protocol):
    """A part of the process with a life of its own."""

    def start(self) -> None:
        """Begin to work."""
        ...

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, finish what is there; return how much is left at the deadline."""
        ...

    def stop(self) -> None:
        """End at once; may be repeated, and called without `start`."""
        ...


class Door(Protocol):
    """What lets the world in: the gRPC server."""

    def start(self) -> str:
        """Bind and serve; return the address."""
        ...

    def refuse(self) -> None:
        """Say in health checks that the end is near."""
        ...

    def stop(self, grace_s: float) -> None:
        """End all calls."""
        ...


def run(
    rooms: Sequence[Room], server: Door, *, drain_timeout_s: float, leash: Leash | None = None
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the exit status of the process.

    Rooms are listed in the order in which tensors pass through them. A leash asks as well.
    """
    asked = StopSignals()
    started: list[Room] = []
    try:
        if leash:
            leash.follow(asked.ask)
        for room in reversed(rooms):
            room.start()
            started.insert(0, room)
        address = server.start()
        _log.info("listening on %s", address)
        _notify("READY=1")
        if leash:
            leash.ready(address)
        asked.wait()
        _notify("STOPPING=1")
        server.refuse()
        left = _drain(rooms, drain_timeout_s)
        if leash:
            leash.left(left)
    finally:
        server.stop(_GRACE_S)
        for room in started:
            room.stop()
        asked.close()
    _log.info("stopped")
    return 0


def stop_at_end_of(descriptor: int) -> None:
    """Ask this process to stop when that file ends: who started it is gone, however it went."""

    def wait() -> None:
        # Not through a buffered file: its lock, held by this thread, would abort the exit.
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="rankdumpd-lifeline", daemon=True).start()


class StopSignals:
    """SIGTERM and SIGINT, waited for on a pipe.

    An Event would not do: its lock may be held by the very thread that the handler interrupts,
    and a signal that another thread receives would not wake a thread that waits for a lock.
    """

    def __init__(self) -> None:
        self._asked = self._signalled = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._earlier_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._earlier = {number: signal.signal(number, self._on_signal) for number in numbers}

    def wait(self) -> None:
        """Return once a signal has asked this process to stop."""
        while not self._asked:
            os.read(self._read_end, 64)

    def ask(self) -> None:
        """Ask as a first signal does, from any thread; a signal beside it is no second one."""
        self._asked = True
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
        if self._signalled:
            os.write(sys.stderr.fileno(), b"second signal: stopping at once\n")
            os._exit(1)
        self._signalled = self._asked = True


def _drain(rooms: Sequence[Room], timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    unfinished = 0
    for room in rooms:
        left = room.drain(max(0.0, deadline - time.monotonic()))
        unfinished += left
        if left:
            _log.error(
                "%s: %d items unfinished after %g s; what was not acknowledged will be sent again",
                type(room).__name__,
                left,
                timeout_s,
            )
    return unfinished


def _notify(state: str) -> None:
    # Read here and not in the settings: the address belongs to systemd, not to the operator.
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        try:
            notifier.sendto(state.encode(), target)
        except OSError as error:
            _log.warning("cannot tell %s to %s: %s", state, address, error)

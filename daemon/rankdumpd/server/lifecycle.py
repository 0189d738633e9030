"""Lifecycle of a daemon process: start, readiness, reload and stop of its components, the signals
that request them, and the notifications to the service manager (sd_notify(3)). Knows no
component by name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Protocol

from rankdump.errors import ConfigError
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import DaemonSettings, adopt_settings


def request_stop() -> None:
    """Ask this process to stop, as an operator would: whatever runs it ends it in its own order."""
    os.kill(os.getpid(), signal.SIGTERM)


class ProcessRequest(Enum):
    """What somebody wants of this process."""

    NOTHING = "nothing"
    RELOAD = "reload"
    STOP = "stop"


class SignalWaiter:
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

    def wait(self, timeout_s: float | None = None) -> ProcessRequest:
        """Return the next wish, NOTHING after so long without one; a stop goes before all else."""
        while not (self._stop or self._reload):
            ready, _, _ = select.select([self._read_end], [], [], timeout_s)
            if not ready:
                return ProcessRequest.NOTHING
            os.read(self._read_end, 64)
        if self._stop:
            return ProcessRequest.STOP
        self._reload = False
        return ProcessRequest.RELOAD

    def request(self, wish: ProcessRequest = ProcessRequest.STOP) -> None:
        """Ask as a first signal does, from any thread; a signal beside it is no second one."""
        self._stop = self._stop or wish is ProcessRequest.STOP
        self._reload = self._reload or wish is ProcessRequest.RELOAD
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


LIVENESS_INTERVAL_S = 10.0
"""How often a process looks after itself, where the service manager does not say."""
_US = 1_000_000

_logger = logging.getLogger(__name__)


class ServiceManagerNotifier:
    """Tells the service manager, which an environment names; safe to use from any thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Read here and not in the settings: these belong to systemd, not to the operator.
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_us = _read_watchdog_us(environ) if self._address else 0

    @property
    def tick_s(self) -> float:
        """Seconds between two signs of life: twice as often as the watchdog wants them."""
        return (
            min(LIVENESS_INTERVAL_S, self._watchdog_us / _US / 2)
            if self._watchdog_us
            else LIVENESS_INTERVAL_S
        )

    def send_ready(self, status: str) -> None:
        """Say that this process serves, also after a reload."""
        self._say("READY=1", f"STATUS={status}")

    def send_reloading(self) -> None:
        """Say that settings are read again; `ready` follows."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def send_stopping(self, status: str) -> None:
        """Say that the end begins."""
        self._say("STOPPING=1", f"STATUS={status}")

    def send_status(self, text: str) -> None:
        """Say how it stands, in a line."""
        self._say(f"STATUS={text}")

    def send_alive(self, status: str) -> None:
        """Say that all is well, and how it stands."""
        self._say(*self._ping(), f"STATUS={status}")

    @contextlib.contextmanager
    def extend_timeout(
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
                _logger.warning("cannot tell %s to %s: %s", assignments[0], address, error)


def _read_watchdog_us(environ: Mapping[str, str]) -> int:
    """Return after how long without a sign of life this process is killed; 0: never."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or pid not in ("", str(os.getpid())):
        return 0
    return int(text)


_CALL_GRACE_S = 1.0
_USE_POLL_INTERVAL_S = 0.2
_REQUIRED_FILES_INTERVAL_S = 2.0
"""Longest until a process sees that its files were taken away."""
_START_TIMEOUT_S = 3600.0
"""Longest start for which the service manager is asked to wait."""
_EXIT_FAILED = 1

SettingsReader = Callable[[Mapping[str, str]], DaemonSettings]
"""Reads the settings again, with an environment; ConfigError when they cannot be."""


class Component(Protocol):
    """A part of the process with a life of its own."""

    leave_s = 6.0
    """Seconds beyond the deadline of a drain in which `stop` is over, unless a disk hangs."""

    def start(self) -> None:
        """Begin to work."""
        ...

    def drain(self, timeout_s: float) -> int:
        """Take nothing new, finish what is there; return how much is left at the deadline."""
        ...

    def stop(self) -> None:
        """End at once; may be repeated, and called without `start`."""
        ...

    def reload(self, settings: DaemonSettings) -> None:
        """Take over those settings that may change while it works."""

    def fault(self) -> str:
        """Say which part of it has died, which only another process can mend; a disk that hangs
        is none.
        """
        return ""

    def brief(self) -> str:
        """Say how it stands in a few words with numbers, at once."""
        return ""


class ServerListener(Protocol):
    """Server that accepts calls while the components work."""

    def start(self) -> str:
        """Bind and serve; return the address."""
        ...

    def refuse(self) -> None:
        """Say in health checks that the end is near."""
        ...

    def show(self, *, well: bool) -> None:
        """Say in health checks how it stands; calls work all the same."""
        ...

    def stop(self, grace_s: float) -> None:
        """End all calls."""
        ...


def run_process(
    rooms: Sequence[Component],
    server: ServerListener,
    *,
    settings: DaemonSettings,
    reread: SettingsReader,
    leash: WorkerPipe | None = None,
    required: RequiredFiles | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the exit status of the process.

    Rooms are listed in the order in which tensors pass through them. A leash asks as well. SIGHUP
    reads the settings again. What is missing of `required` is said within seconds. A stop that a
    disk holds up ends the process with status 1.
    """
    life = _ProcessLife(rooms, server, settings, reread, leash)
    life.required = required or life.required
    try:
        life.start()
        life.serve()
    except BaseException:
        life.end(drains=False)
        raise
    return life.end(drains=True)


def stop_at_end_of_file(descriptor: int, *, still_used: Callable[[], bool] = lambda: False) -> None:
    """Ask this process to stop when that file has ended and it is no longer used.

    The end means that who started the process is gone, however that ended.
    """

    def wait() -> None:
        # Not through a buffered file: its lock, held by this thread, would abort the exit.
        while os.read(descriptor, 4096):
            pass
        while still_used():
            time.sleep(_USE_POLL_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="rankdumpd-lifeline", daemon=True).start()


class _ProcessLife:
    """One process from start to end."""

    def __init__(
        self,
        rooms: Sequence[Component],
        server: ServerListener,
        settings: DaemonSettings,
        reread: SettingsReader,
        leash: WorkerPipe | None,
    ) -> None:
        self._rooms, self._server = rooms, server
        self._settings, self._reread, self._leash = settings, reread, leash
        self._environ: Mapping[str, str] = os.environ
        self._notifier = ServiceManagerNotifier(os.environ)
        self._signals = SignalWaiter(reloads=True)
        self._started: list[Component] = []
        self._failed = False
        self._fault = ""
        self._gone: tuple[str, ...] = ()
        self.required = RequiredFiles()
        """Files without which it is not well."""

    def start(self) -> None:
        """Start everything, the last room first, then let the world in."""
        if self._leash:
            self._leash.follow_requests(self._signals.request, self._given)
        with self._notifier.extend_timeout(_START_TIMEOUT_S, unless=lambda: self._signals.stopping):
            for room in reversed(self._rooms):
                self._started.insert(0, room)
                room.start()
            address = self._server.start()
        _logger.info("listening on %s", address)
        self._notifier.send_ready(self._brief())
        if self._leash:
            self._leash.send_ready(address)

    def serve(self) -> None:
        """Wait for the wish to stop; meanwhile reload, and say that all is well."""
        tick_s = min(self._notifier.tick_s, _REQUIRED_FILES_INTERVAL_S)
        while (wish := self._signals.wait(tick_s)) is not ProcessRequest.STOP:
            self._look()
            if wish is ProcessRequest.RELOAD:
                self._reload()
            elif not self._ill():
                self._notifier.send_alive(self._brief())

    def end(self, *, drains: bool) -> int:
        """Drain and stop, or only stop; return the exit status. Leave where that does not end."""
        limit_s = max(room.leave_s for room in self._rooms)
        limit_s += self._settings.agent.drain_timeout_s if drains else 0.0
        thread = threading.Thread(
            target=self._drain_and_stop, args=(drains,), name="rankdumpd-end", daemon=True
        )
        with self._notifier.extend_timeout(limit_s):
            thread.start()
            thread.join(limit_s)
        hangs = [t.name for t in threading.enumerate() if t is thread or _keeps_process(t)]
        if hangs:
            _logger.error(
                "the stop does not end, for a disk or a call hangs (%s): %s; what was not "
                "acknowledged is sent again",
                ", ".join(hangs),
                self._brief() or "nothing is known of what is left",
            )
            os._exit(_EXIT_FAILED)
        self._signals.close()
        if drains:
            _logger.info("stopped")
        return _EXIT_FAILED if self._failed else 0

    def _drain_and_stop(self, drains: bool) -> None:
        try:
            if drains:
                self._notifier.send_stopping(self._brief())
                self._server.refuse()
                left = self._drain()
                self._notifier.send_status(f"drained, {left} items are left")
                if self._leash:
                    self._leash.send_drained(left)
        except Exception:
            self._failed = True
            _logger.exception("the drain failed")
        try:
            self._server.stop(_CALL_GRACE_S)
            for room in self._started:
                room.stop()
        except Exception:
            self._failed = True
            _logger.exception("the stop failed")

    def _drain(self) -> int:
        timeout_s = self._settings.agent.drain_timeout_s
        deadline = time.monotonic() + timeout_s
        unfinished = 0
        for room in self._rooms:
            begun = time.monotonic()
            left = room.drain(max(0.0, deadline - begun))
            unfinished += left
            if left:
                _logger.error(
                    "%s: %d items unfinished after %.1f s; what was not acknowledged is sent again",
                    type(room).__name__,
                    left,
                    time.monotonic() - begun,
                )
        return unfinished

    def _given(self, environ: Mapping[str, str]) -> None:
        """Take note of new settings that came on the leash."""
        self._environ = environ
        self._signals.request(ProcessRequest.RELOAD)

    def _reload(self) -> None:
        self._notifier.send_reloading()
        try:
            news = adopt_settings(self._settings, self._reread(self._environ))
        except ConfigError as error:
            _logger.error("the settings stay as they are: %s", error)
        else:
            self._settings = news.settings
            logging.getLogger().setLevel(news.settings.log.level.upper())
            for room in self._rooms:
                room.reload(news.settings)
            _logger.info("settings were read again; changed: %s", ", ".join(news.changed) or "none")
            if news.pending_restart:
                _logger.warning("only a new start changes %s", ", ".join(news.pending_restart))
        self._notifier.send_ready(self._brief())

    def _look(self) -> None:
        """Say what somebody took away. It is no fault: a new process would know less than this."""
        gone = self.required.find_missing()
        for sentence in gone:
            if sentence not in self._gone:
                _logger.error(sentence)
        if bool(gone) is not bool(self._gone):
            self._server.show(well=not gone)
        self._gone = gone

    def _ill(self) -> bool:
        """Return whether a room has died; a worker ends then, and its front starts another."""
        faults = [f"{type(r).__name__}: {fault}" for r in self._rooms if (fault := r.fault())]
        said = "; ".join(faults)
        if said and said != self._fault:
            _logger.error("%s; only a new process can mend that", said)
            self._notifier.send_status(said)
        self._fault = said
        if said and self._leash:
            os._exit(_EXIT_FAILED)
        return bool(said)

    def _brief(self) -> str:
        return "; ".join(filter(None, (*self._gone, *(room.brief() for room in self._rooms))))


def _keeps_process(thread: threading.Thread) -> bool:
    """Return whether the interpreter would wait for a thread of ours at its end."""
    return not thread.daemon and thread.name.startswith("rankdumpd")

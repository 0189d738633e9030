"""Lifecycle of a daemon process: start, readiness, reload and stop of its components, the signals
that request them, and the notifications to the service manager (sd_notify(3)). Depends on no
particular component.
"""

from __future__ import annotations

import contextlib
import gc
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
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.server.worker_pipe import WorkerPipe
from rankdumpd.settings import DaemonSettings, adopt_settings


def request_stop() -> None:
    """Request an orderly stop of this process, as SIGTERM from an operator does."""
    os.kill(os.getpid(), signal.SIGTERM)


class ProcessRequest(Enum):
    """What a signal or the supervisor requests from this process."""

    NOTHING = "nothing"
    RELOAD = "reload"
    STOP = "stop"


class SignalWaiter:
    """Waits for signals on a pipe: SIGTERM and SIGINT request a stop, SIGHUP a reload.

    An Event is not used: the thread that the handler interrupts may hold its lock, and a signal
    that another thread receives does not wake a thread that waits for a lock.
    """

    def __init__(self, *, reloads: bool = False) -> None:
        """Without `reloads`, SIGHUP keeps its previous handler."""
        self._stop = self._reload = self._signalled = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._earlier_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if reloads else ()))
        self._earlier = {number: signal.signal(number, self._on_signal) for number in numbers}

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stop

    def wait(self, timeout_s: float | None = None) -> ProcessRequest:
        """Return the next request, a stop before a reload; NOTHING if there is none within
        `timeout_s`.
        """
        while not (self._stop or self._reload):
            ready, _, _ = select.select([self._read_end], [], [], timeout_s)
            if not ready:
                return ProcessRequest.NOTHING
            os.read(self._read_end, 64)
        if self._stop:
            return ProcessRequest.STOP
        self._reload = False
        return ProcessRequest.RELOAD

    def request(self, request: ProcessRequest = ProcessRequest.STOP) -> None:
        """Request a stop or a reload from any thread; unlike SIGTERM this does not count as a first
        signal.
        """
        self._stop = self._stop or request is ProcessRequest.STOP
        self._reload = self._reload or request is ProcessRequest.RELOAD
        with contextlib.suppress(OSError):  # the pipe is full or closed
            os.write(self._write_end, b"x")

    def close(self) -> None:
        """Restore the previous signal handlers."""
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
"""Seconds between two checks of the process, unless the watchdog needs a shorter interval."""
_US = 1_000_000

_logger = logging.getLogger(__name__)


class ServiceManagerNotifier:
    """Sends notifications to the service manager that the environment names; safe to use from any
    thread.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Read here and not in the settings: systemd sets these variables, not the operator.
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_us = _read_watchdog_us(environ) if self._address else 0

    @property
    def tick_s(self) -> float:
        """Seconds between two keep-alive messages: half of the watchdog's interval, or less."""
        return (
            min(LIVENESS_INTERVAL_S, self._watchdog_us / _US / 2)
            if self._watchdog_us
            else LIVENESS_INTERVAL_S
        )

    def send_ready(self, status: str) -> None:
        """Notify the service manager that this process serves; also used after a reload."""
        self._send("READY=1", f"STATUS={status}")

    def send_reloading(self) -> None:
        """Notify the service manager that settings are being reloaded; `send_ready` has
        to follow.
        """
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def send_stopping(self, status: str) -> None:
        """Notify the service manager that this process begins to stop."""
        self._send("STOPPING=1", f"STATUS={status}")

    def send_status(self, text: str) -> None:
        """Send a status line."""
        self._send(f"STATUS={text}")

    def send_alive(self, status: str) -> None:
        """Send a keep-alive message with a status line."""
        self._send(*self._ping(), f"STATUS={status}")

    @contextlib.contextmanager
    def extend_timeout(
        self, limit_s: float, *, unless: Callable[[], bool] = lambda: False
    ) -> Generator[None]:
        """Request more time while the block starts or stops the process, for at most `limit_s`
        seconds.
        """
        if not self._address:
            yield
            return

        def extend() -> None:
            deadline_s = time.monotonic() + limit_s
            while not extender.wait(self.tick_s) and time.monotonic() < deadline_s and not unless():
                # The requested time counts from this message and must be longer than the interval
                # to the next one.
                self._send(f"EXTEND_TIMEOUT_USEC={round(3 * self.tick_s * _US)}", *self._ping())

        extender = BackgroundThread(extend, "rankdumpd-notify")
        extender.start()
        try:
            yield
        finally:
            extender.stop()

    def _ping(self) -> tuple[str, ...]:
        return ("WATCHDOG=1",) if self._watchdog_us else ()

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        address = self._address
        target = "\0" + address[1:] if address.startswith("@") else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            try:
                notifier.sendto("\n".join(assignments).encode(), target)
            except OSError as error:
                _logger.warning(
                    "the service manager cannot be notified of %s at %s: %s",
                    assignments[0],
                    address,
                    error,
                )


def _read_watchdog_us(environ: Mapping[str, str]) -> int:
    """Return the watchdog's interval in microseconds; 0 where there is no watchdog."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text.isdecimal() or pid not in ("", str(os.getpid())):
        return 0
    return int(text)


_CALL_GRACE_S = 1.0
_USE_POLL_INTERVAL_S = 0.2
_REQUIRED_FILES_INTERVAL_S = 2.0
"""Seconds between two checks of the required files."""
_PROGRESS_INTERVAL_S = 0.5
"""Seconds between two checks for progress while the daemon ends."""
_NOTICE_INTERVAL_S = 10.0
"""Seconds between two log lines while the daemon ends."""
_START_TIMEOUT_S = 3600.0
"""Upper limit in seconds of the time that a start requests from the service manager."""
_EXIT_FAILED = 1

SettingsReader = Callable[[Mapping[str, str]], DaemonSettings]
"""Reads the settings again with an environment; ConfigError when they are not valid."""


class Component(Protocol):
    """A part of the process with a start, a stop and a health."""

    max_stop_s = 6.0
    """Longest time in seconds that `stop` takes after the deadline of a drain, unless a
    disk hangs.
    """

    def start(self) -> None:
        """Start the threads of the component."""
        ...

    def drain(self, timeout_s: float) -> int:
        """Accept nothing new and finish the rest; return the number of items left after
        `timeout_s`.
        """
        ...

    def explain_unfinished(self) -> str:
        """Return for the log what happens to the items that `drain` left unfinished."""
        return "ranks send them again"

    def count_finished(self) -> int:
        """Return a number that grows with each item that a drain finishes; never waits."""
        return 0

    def stop(self) -> None:
        """Stop at once; may be repeated, and called without `start`."""
        ...

    def reload(self, settings: DaemonSettings) -> None:
        """Apply the settings that may change while the component works."""

    def fault(self) -> str:
        """Return which part failed, if only a restart of the process repairs it; empty if none
        failed.

        A disk that hangs is not a fault, because a new process would hang too.
        """
        return ""

    def summarize(self) -> str:
        """Return a short status line with numbers, without waiting."""
        return ""


class EndWatch:
    """Decides how long to wait for an end that makes progress."""

    def __init__(self, start_s: float, *, idle_s: float, limit_s: float) -> None:
        self._idle_s, self._finished, self._changed_s = idle_s, -1, start_s
        self._deadline_s = start_s + limit_s

    def is_overdue(self, finished: int, *, now_s: float) -> bool:
        """Return whether nothing was finished for `idle_s`, or the time limit has passed.

        `finished` is the number of items that are finished now.
        """
        if finished != self._finished:
            self._finished, self._changed_s = finished, now_s
        return now_s >= min(self._changed_s + self._idle_s, self._deadline_s)


def wait_while_finishing(
    wait: Callable[[float], int],
    count_finished: Callable[[], int],
    *,
    idle_s: float,
    left_s: Callable[[], float],
) -> int:
    """Repeat `wait` while something is finished within each `idle_s`; return how much is left.

    `wait` waits for a given time and returns how much is left after it; `left_s` returns the
    remaining seconds until the time limit.
    """
    while True:
        finished = count_finished()
        left = wait(min(left_s(), idle_s))
        if not left or left_s() <= 0 or count_finished() == finished:
            return left


_COLLECTED_AFTER_OBJECTS = 50_000
"""Number of new objects after which Python searches them for cycles; the default is 700."""


def relax_garbage_collector() -> None:
    """Make Python search for cyclic garbage less often, and never among the objects that exist now.

    Most values in a daemon are tuples without cycles, and one batch consists of thousands of them.
    """
    gc.collect()
    gc.freeze()
    _, second, third = gc.get_threshold()
    gc.set_threshold(_COLLECTED_AFTER_OBJECTS, second, third)


def stop_at_end_of_file(descriptor: int, *, still_used: Callable[[], bool] = lambda: False) -> None:
    """Stop this process after the end of a pipe, unless `still_used` returns true.

    The pipe ends when the process at its other end exits or is killed.
    """

    def wait() -> None:
        # Read without a buffer: at exit this thread would hold the lock of a buffered file, and the
        # interpreter aborts then.
        while os.read(descriptor, 4096):
            pass
        while still_used():
            time.sleep(_USE_POLL_INTERVAL_S)
        request_stop()

    threading.Thread(target=wait, name="rankdumpd-lifeline", daemon=True).start()


class DaemonRun:
    """Runs one daemon process from its start to its end."""

    def __init__(
        self,
        components: Sequence[Component],
        server: GrpcServer,
        *,
        settings: DaemonSettings,
        reread: SettingsReader,
        pipe: WorkerPipe | None = None,
        required: RequiredFiles | None = None,
        max_drain_s: float = 0.0,
    ) -> None:
        """`components` are in the order in which tensors pass through them.

        A supervisor requests a stop or a reload over `pipe`. When a file of `required` is missing,
        this is logged within seconds. `max_drain_s` is set if no later process continues the work
        of this one: the process then drains for at most that time, while something is finished
        within each `agent.drain_timeout_s`, and fails if anything is left.
        """
        self._max_drain_s, self._lost = max_drain_s, list[str]()
        self._components, self._server = components, server
        self._settings, self._reread, self._pipe = settings, reread, pipe
        self._environ: Mapping[str, str] = os.environ
        self._notifier = ServiceManagerNotifier(os.environ)
        self._signals = SignalWaiter(reloads=True)
        self._started: list[Component] = []
        self._failed = False
        self._fault = ""
        self._missing: tuple[str, ...] = ()
        self._required = required or RequiredFiles()

    def run(self, begin_watch: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM or SIGINT, then drain; return the exit status of the process.

        SIGHUP reloads the settings. If a hanging disk blocks the stop, the process ends with status
        1. `begin_watch` is called once signals are handled, because the watch may send one at once.
        """
        try:
            begin_watch()
            self._start()
            self._serve()
        except BaseException:
            self._end(drains=False)
            raise
        return self._end(drains=True)

    def _start(self) -> None:
        """Start all components, the last one first, then the server."""
        if self._pipe:
            self._pipe.follow_requests(self._signals.request, self._accept_environment)
        with self._notifier.extend_timeout(_START_TIMEOUT_S, unless=lambda: self._signals.stopping):
            for component in reversed(self._components):
                self._started.insert(0, component)
                component.start()
            address = self._server.start()
        _logger.info("listening on %s", address)
        self._notifier.send_ready(self._summarize())
        if self._pipe:
            self._pipe.send_ready(address)

    def _serve(self) -> None:
        """Wait for the request to stop; in the meantime handle reloads and notify the service
        manager.
        """
        tick_s = min(self._notifier.tick_s, _REQUIRED_FILES_INTERVAL_S)
        while (request := self._signals.wait(tick_s)) is not ProcessRequest.STOP:
            self._check_required_files()
            if request is ProcessRequest.RELOAD:
                self._reload()
            elif not self._has_fault():
                self._notifier.send_alive(self._summarize())

    def _end(self, *, drains: bool) -> int:
        """Stop all components, with `drains` after a drain; return the exit status. If that hangs,
        exit the process at once.
        """
        stop_s = max(component.max_stop_s for component in self._components)
        idle_s = stop_s + (self._settings.agent.drain_timeout_s if drains else 0.0)
        limit_s = stop_s + (self._drain_limit_s if drains else 0.0)
        thread = threading.Thread(
            target=self._drain_and_stop, args=(drains,), name="rankdumpd-end", daemon=True
        )
        with self._notifier.extend_timeout(limit_s):
            thread.start()
            self._wait_for_end(thread, idle_s=idle_s, limit_s=limit_s)
        hanging = [t.name for t in threading.enumerate() if t is thread or _keeps_process(t)]
        if hanging:
            _logger.error(
                "the stop does not end because a disk or a call hangs (threads: %s): %s; ranks "
                "resend what was not acknowledged",
                ", ".join(hanging),
                self._summarize() or "what is left is not known",
            )
            os._exit(_EXIT_FAILED)
        self._signals.close()
        if self._lost:
            _logger.error("stopped; not finished: %s", "; ".join(self._lost))
        elif drains:
            _logger.info("stopped")
        return _EXIT_FAILED if self._failed or self._lost else 0

    @property
    def _drain_limit_s(self) -> float:
        """Time limit of a drain in seconds."""
        return self._max_drain_s or self._settings.agent.drain_timeout_s

    def _wait_for_end(self, thread: threading.Thread, *, idle_s: float, limit_s: float) -> None:
        """Wait while something is finished within each `idle_s`, for at most `limit_s` seconds."""
        start_s = noticed_s = time.monotonic()
        watch = EndWatch(start_s, idle_s=idle_s, limit_s=limit_s)
        while thread.is_alive():
            finished = sum(component.count_finished() for component in self._components)
            now_s = time.monotonic()
            if watch.is_overdue(finished, now_s=now_s):
                return
            if now_s >= noticed_s + _NOTICE_INTERVAL_S:
                noticed_s = now_s
                _logger.info("stopping for %.0f s: %s", now_s - start_s, self._summarize())
            thread.join(min(_PROGRESS_INTERVAL_S, idle_s))

    def _drain_and_stop(self, drains: bool) -> None:
        try:
            if drains:
                self._notifier.send_stopping(self._summarize())
                self._server.refuse()
                left = self._drain()
                self._notifier.send_status(f"drained, {left} items are left")
                if self._pipe:
                    self._pipe.send_drained(left)
        except Exception:
            self._failed = True
            _logger.exception("the drain failed")
        try:
            self._server.stop(_CALL_GRACE_S)
            for component in self._started:
                component.stop()
        except Exception:
            self._failed = True
            _logger.exception("the stop failed")

    def _drain(self) -> int:
        deadline_s = time.monotonic() + self._drain_limit_s
        unfinished = 0
        for component in self._components:
            start_s = time.monotonic()
            left = component.drain(max(0.0, deadline_s - start_s))
            unfinished += left
            if left:
                text = f"{type(component).__name__}: {left} items are unfinished after "
                text += f"{time.monotonic() - start_s:.1f} s; {component.explain_unfinished()}"
                _logger.error("%s", text)
                self._lost += [text] if self._max_drain_s else []
        return unfinished

    def _accept_environment(self, environ: Mapping[str, str]) -> None:
        """Adopt the environment with settings that the supervisor sent, and request a reload."""
        self._environ = environ
        self._signals.request(ProcessRequest.RELOAD)

    def _reload(self) -> None:
        self._notifier.send_reloading()
        try:
            change = adopt_settings(self._settings, self._reread(self._environ))
        except ConfigError as error:
            _logger.error("the settings were not reloaded and stay as they are: %s", error)
        else:
            self._settings = change.settings
            logging.getLogger().setLevel(change.settings.log.level.upper())
            for component in self._components:
                component.reload(change.settings)
            _logger.info(
                "the settings were reloaded; changed: %s", ", ".join(change.changed) or "none"
            )
            if change.pending_restart:
                _logger.warning(
                    "these settings change only with a restart: %s",
                    ", ".join(change.pending_restart),
                )
        self._notifier.send_ready(self._summarize())

    def _check_required_files(self) -> None:
        """Log missing required files. A missing file is no fault, because a restart would lose
        more.
        """
        missing = self._required.find_missing()
        for sentence in missing:
            if sentence not in self._missing:
                _logger.error("%s", sentence)
        if bool(missing) is not bool(self._missing):
            self._server.set_serving(is_serving=not missing)
        self._missing = missing

    def _has_fault(self) -> bool:
        """Return whether a component has a fault; a worker with a fault exits here and is
        restarted.
        """
        faults = [f"{type(c).__name__}: {text}" for c in self._components if (text := c.fault())]
        fault = "; ".join(faults)
        if fault and fault != self._fault:
            _logger.error("%s; only a restart of this process repairs that", fault)
            self._notifier.send_status(fault)
        self._fault = fault
        if fault and self._pipe:
            os._exit(_EXIT_FAILED)
        return bool(fault)

    def _summarize(self) -> str:
        summaries = (component.summarize() for component in self._components)
        return "; ".join(filter(None, (*self._missing, *summaries)))


def _keeps_process(thread: threading.Thread) -> bool:
    """Return whether the interpreter would wait at its exit for this thread of the daemon."""
    return not thread.daemon and thread.name.startswith("rankdumpd")

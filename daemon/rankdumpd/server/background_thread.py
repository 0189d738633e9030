"""Thread that one component owns: started, stopped, waited for, and reported when it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs a function in a thread until that returns; safe to use from several threads.

    The function is expected to return soon after `is_stopping` has become true. Where it sleeps it
    calls `wait`, which a stop ends.
    """

    def __init__(self, run: Callable[[], object], name: str, *, daemon: bool = True) -> None:
        """A thread that is not a `daemon` keeps the process until it ends."""
        self.name = name
        self._run, self._daemon = run, daemon
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._cause = ""

    @property
    def is_running(self) -> bool:
        """Whether the function was started and has not returned."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Run the function, also again after a stop."""
        self._stopping.clear()
        self._cause = ""
        self._thread = threading.Thread(
            target=self._run_logged, name=self.name, daemon=self._daemon
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is requested, at most for that long; return whether one was."""
        return self._stopping.wait(timeout_s)

    def request_stop(self) -> None:
        """Ask the function to return, and do not wait for it."""
        self._stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the function has returned; return whether it has, or never started."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Request a stop and wait for it, as `join` does; may be repeated."""
        self.request_stop()
        return self.join(timeout_s)

    def fault(self) -> str:
        """Return what ended the function without a stop; empty when nothing did."""
        if self._thread is None or self.is_running or self.is_stopping:
            return ""
        return f"thread {self.name} has ended: {self._cause or 'its function returned'}"

    def _run_logged(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._cause = repr(error)
            _logger.exception("thread %s has ended", self.name)

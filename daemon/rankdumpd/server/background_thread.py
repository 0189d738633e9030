"""Thread of one component, with start, stop, join and a report of its failure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs a function in a thread until the function returns; safe to use from several threads.

    The function must return soon after `is_stopping` has become true, and must sleep with `wait`,
    which returns at a stop.
    """

    def __init__(self, run: Callable[[], object], name: str, *, daemon: bool = True) -> None:
        """Without `daemon`, the interpreter waits at its exit until the thread ends."""
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
        """Whether a stop has been requested."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Run the function in a new thread; may be called again after a stop."""
        self._stopping.clear()
        self._cause = ""
        self._thread = threading.Thread(
            target=self._run_logged, name=self.name, daemon=self._daemon
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Sleep for `timeout_s` or until a stop is requested; return whether a stop was
        requested.
        """
        return self._stopping.wait(timeout_s)

    def request_stop(self) -> None:
        """Request that the function returns, without waiting for it."""
        self._stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the function has returned; return whether it has returned or was never
        started.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_running

    def stop(self, timeout_s: float | None = None) -> bool:
        """Request a stop and wait for it; return as `join` does. May be repeated."""
        self.request_stop()
        return self.join(timeout_s)

    def fault(self) -> str:
        """Return why the function ended without a stop; empty when it did not end so."""
        if self._thread is None or self.is_running or self.is_stopping:
            return ""
        return f"thread {self.name} has ended: {self._cause or 'its function returned'}"

    def _run_logged(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._cause = repr(error)
            _logger.exception("thread %s has ended", self.name)

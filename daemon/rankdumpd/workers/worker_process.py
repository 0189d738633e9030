"""Worker process of an agent: started, watched, and restarted with a growing delay when it dies."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rankdump._core.backoff import RetryBackoff
from rankdump.errors import UnavailableError
from rankdumpd.server import worker_pipe
from rankdumpd.server.background_thread import BackgroundThread

MIN_RESTART_DELAY_S = 0.1
MAX_RESTART_DELAY_S = 10.0
STEADY_RUN_S = 60.0
"""Run time in seconds after which the delay before a restart starts at its minimum again."""
_KILL_AFTER_S = 5.0

_logger = logging.getLogger(__name__)


class WorkerProcess:
    """One worker process with its restarts; safe to use from several threads."""

    def __init__(self, index: int, *, folder: Path, environ: Mapping[str, str]) -> None:
        """The worker runs in `folder`, which must not contain Python modules, because `-m` imports
        from it first.
        """
        self.index = index
        self._folder, self._environ = folder, dict(environ)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._unfinished: int | None = None
        self.restarts = 0
        """Number of restarts of the worker."""
        self._last_end = ""
        self._over = False
        self._thread = BackgroundThread(self._run, f"rankdumpd-worker-{index}")

    @property
    def address(self) -> str:
        """Address of the worker; UnavailableError while it does not serve."""
        with self._changed:
            if not self._address:
                raise UnavailableError(
                    f"worker {self.index} is being restarted: it {self._last_end}"
                )
            return self._address

    def wait_up(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the worker serves."""
        with self._changed:
            self._changed.wait_for(lambda: self._address, timeout_s)

    def findings(self) -> list[str]:
        """Return findings about the worker, one sentence each."""
        with self._changed:
            if not self.restarts:
                return []
            times = "once" if self.restarts == 1 else f"{self.restarts} times"
            return [f"worker {self.index} was restarted {times}; the last process {self._last_end}"]

    def start(self) -> None:
        """Start the worker without waiting for it."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the worker serves; UnavailableError when the worker ends before that."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._over)
            if not self._address:
                raise UnavailableError(f"worker {self.index} does not start: it {self._last_end}")

    def request_drain(self) -> None:
        """Request the worker to drain and exit; it is not restarted then."""
        with self._changed:
            self._thread.request_stop()
            self._changed.notify_all()
            if self._process:
                worker_pipe.request_drain(self._process)

    def send_settings(self, environ: Mapping[str, str]) -> None:
        """Send new settings to the worker; restarted processes get them, too."""
        with self._changed:
            self._environ |= environ
            if self._process:
                worker_pipe.send_settings(self._process, environ)

    def fault(self) -> str:
        """Return why the worker would not be restarted any more; empty while it would be."""
        fault = self._thread.fault()
        return f"worker {self.index} is not restarted any more: {fault}" if fault else ""

    def wait_drained(self, timeout_s: float) -> int:
        """Wait until the worker has drained; return the number of items it left, 1 if that is
        unknown.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout_s)
            return 1 if self._unfinished is None else self._unfinished

    def request_stop(self) -> None:
        """Request the worker to exit at once; it is not restarted then."""
        with self._changed:
            self._thread.request_stop()
            self._changed.notify_all()
            self._close_pipe()

    def stop(self) -> None:
        """Stop the worker and wait for its end; may be repeated, and called without `start`."""
        self.request_stop()
        with self._changed:
            if not self._changed.wait_for(lambda: self._process is None, _KILL_AFTER_S):
                assert self._process is not None
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        backoff = RetryBackoff(MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S)
        while not self._thread.is_stopping:
            begun_s = time.monotonic()
            served = self._run_once()
            if self._thread.is_stopping or not (served or self.restarts):
                break
            if time.monotonic() - begun_s > STEADY_RUN_S:
                backoff.reset()
            _logger.error(
                "worker %d %s; it is restarted",
                self.index,
                self._last_end,
                extra={"worker": self.index},
            )
            with self._changed:
                self._changed.wait_for(lambda: self._thread.is_stopping, backoff.next_pause_s())
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run_once(self) -> bool:
        """Run one process to its end; return whether it ever served."""
        served = False
        try:
            process = self._spawn()
            if process is None:
                return False
            served = self._read_reports(process)
            code = process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        except OSError as error:
            how = f"could not be run: {error}"
        with self._changed:
            self._close_pipe()
            self._process, self._address, self._last_end = None, "", how
            self._changed.notify_all()
        return served

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        with self._changed:
            if self._thread.is_stopping:
                return None
            self.restarts += bool(self._last_end)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rankdumpd", "agent", "--as-worker", str(self.index)],
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A new session, so that Ctrl-C in a terminal reaches only the supervisor, which
                # then stops its workers.
                start_new_session=True,
            )
            return self._process

    def _read_reports(self, process: subprocess.Popen[bytes]) -> bool:
        """Read the reports of a worker until it ends; return whether it ever served."""
        served = False
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                report = worker_pipe.parse_worker_line(line)
                with self._changed:
                    if isinstance(report, worker_pipe.WorkerReady):
                        self._address, served = report.address, True
                    elif isinstance(report, worker_pipe.WorkerDrained):
                        self._unfinished = report.unfinished_items
                    self._changed.notify_all()
        return served

    def _close_pipe(self) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

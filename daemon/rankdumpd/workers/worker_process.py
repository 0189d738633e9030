"""Worker process: started, watched, and restarted with a growing delay when it dies."""

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
"""A worker that lived as long died of something new."""
_KILL_AFTER_S = 5.0

_logger = logging.getLogger(__name__)


class WorkerProcess:
    """An agent in a process of its own; safe to use from several threads."""

    def __init__(self, index: int, *, folder: Path, environ: Mapping[str, str]) -> None:
        """Run it in a folder that holds no modules: `-m` looks for them there first."""
        self.index = index
        self._folder, self._environ = folder, dict(environ)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._left: int | None = None
        self._restarts = 0
        self._last_end = ""
        self._over = False
        self._thread = BackgroundThread(self._run, f"rankdumpd-worker-{index}")

    @property
    def address(self) -> str:
        """Where it serves; UnavailableError while it does not."""
        with self._changed:
            if not self._address:
                raise UnavailableError(
                    f"worker {self.index} is being started again: it {self._last_end}"
                )
            return self._address

    def wait_up(self, timeout_s: float) -> None:
        """Wait until it serves, or no longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._address, timeout_s)

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts

    def findings(self) -> list[str]:
        """Return what people should know of it."""
        with self._changed:
            if not self._restarts:
                return []
            times = "once" if self._restarts == 1 else f"{self._restarts} times"
            return [f"worker {self.index} was started again {times}; the last {self._last_end}"]

    def start(self) -> None:
        """Begin to run it."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Return once it serves; UnavailableError when it ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._address or self._over)
            if not self._address:
                raise UnavailableError(f"worker {self.index} does not start: it {self._last_end}")

    def request_drain(self) -> None:
        """Let it finish what it has, and start none in its place."""
        with self._changed:
            self._thread.request_stop()
            self._changed.notify_all()
            if self._process:
                worker_pipe.request_drain(self._process)

    def send_settings(self, environ: Mapping[str, str]) -> None:
        """Let it, and all that come after it, have other settings."""
        with self._changed:
            self._environ |= environ
            if self._process:
                worker_pipe.send_settings(self._process, environ)

    def fault(self) -> str:
        """Say that nobody looks after it any more."""
        fault = self._thread.fault()
        return f"worker {self.index} is not restarted any more: {fault}" if fault else ""

    def wait_drained(self, timeout_s: float) -> int:
        """Wait until it has drained and left; return what it left, at least one without a word."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout_s)
            return 1 if self._left is None else self._left

    def request_stop(self) -> None:
        """Let it end at once, and start none in its place."""
        with self._changed:
            self._thread.request_stop()
            self._changed.notify_all()
            self._drop_leash()

    def stop(self) -> None:
        """End it at once and wait for that; may be repeated, and called without `start`."""
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
            if self._thread.is_stopping or not (served or self._restarts):
                break
            if time.monotonic() - begun_s > STEADY_RUN_S:
                backoff.reset()
            _logger.error(
                "worker %d %s; it is started again",
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
            process = self._spawned()
            if process is None:
                return False
            served = self._listen_to(process)
            code = process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        except OSError as error:
            how = f"could not be run: {error}"
        with self._changed:
            self._drop_leash()
            self._process, self._address, self._last_end = None, "", how
            self._changed.notify_all()
        return served

    def _spawned(self) -> subprocess.Popen[bytes] | None:
        with self._changed:
            if self._thread.is_stopping:
                return None
            self._restarts += bool(self._last_end)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rankdumpd", "agent", "--as-worker", str(self.index)],
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # The terminal's Ctrl-C is for the front alone, which asks its workers then.
                start_new_session=True,
            )
            return self._process

    def _listen_to(self, process: subprocess.Popen[bytes]) -> bool:
        """Hear what a process says until it ends; return whether it ever served."""
        served = False
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                news = worker_pipe.parse_worker_line(line)
                with self._changed:
                    if isinstance(news, worker_pipe.WorkerReady):
                        self._address, served = news.address, True
                    elif isinstance(news, worker_pipe.WorkerDrained):
                        self._left = news.unfinished_items
                    self._changed.notify_all()
        return served

    def _drop_leash(self) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

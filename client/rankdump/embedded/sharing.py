"""One embedded daemon for all processes of a job on a host, as long as any of them needs it.

They meet in a folder of the job's name (`contract.daemon_folder`). Who comes first starts the
daemon; who leaves last waits for it and clears the folder. Where all of them were killed the daemon
drains, ends and clears the folder by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import time
from pathlib import Path

from rankdump.contract.daemon_folder import DaemonFolder
from rankdump.contract.errors import UnavailableError
from rankdump.embedded.process import (
    POLL_S,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    address_of,
    find_daemon,
    last_words,
    start,
    stop,
    temp_root,
    wait_until_serving,
)

_PREFIX = "rankdump-of"
_LONGEST_NAME = 24
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_TRIES = 100

logger = logging.getLogger("rankdump")


class Lease:
    """This process's share in the daemon of its job; `close` gives it back."""

    def __init__(
        self,
        job_id: str,
        *,
        merges: bool = True,
        start_timeout_s: float = START_TIMEOUT_S,
        root: Path | None = None,
    ) -> None:
        """Find or start the daemon; UnavailableError says why there is none.

        `merges` says whether it is the coordinator of the job, too. A daemon that this process
        started and that does not serve after `start_timeout_s` may do so later.
        """
        find_daemon()
        root = root or Path(temp_root())
        self._users = self._leash = -1
        self._merges, self._process = merges, None
        _sweep(root)
        name = _UNSAFE.sub("_", job_id)[-_LONGEST_NAME:]
        self._folder = DaemonFolder(root / f"{_PREFIX}-{os.getuid()}-{name}")
        try:
            self._enter()
            os.register_at_fork(after_in_child=self._forget)
            self.serves = self._wait(start_timeout_s)
            """Whether the daemon serves already."""
        except UnavailableError as error:
            self.close()
            log = f"; its log: {self.log}" if self.log.exists() else ""
            raise UnavailableError(f"{error}{log}") from None
        except OSError as error:
            self.close()
            reason = f"{error.strerror}: {error.filename}"
            raise UnavailableError(f"the embedded daemon cannot be started: {reason}") from None

    @property
    def address(self) -> str:
        """Where agent and coordinator answer."""
        return address_of(self._folder)

    @property
    def log(self) -> Path:
        """What the daemon says."""
        return self._folder.log

    @property
    def started_it(self) -> bool:
        """Whether this process started the daemon."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self._folder.has_daemon

    def close(self, *, keep_log: bool = False) -> str:
        """Need the daemon no longer; whoever is the last waits until it has written everything.

        Return how the daemon failed; its log stays then. Empty when nothing went wrong.
        """
        fault = ""
        if self._leash >= 0:
            with contextlib.suppress(OSError), self._folder.door():
                if self._folder.is_only_user(self._users):
                    fault = self._end_daemon()
                    self._folder.clear(keep_log=keep_log or bool(fault))
        self._forget()
        return fault

    def _enter(self) -> None:
        for _ in range(_TRIES):
            self._folder.make()
            with contextlib.suppress(FileNotFoundError), self._folder.door():
                self._users = self._folder.enter()
                self._leash = self._folder.hold()
                if self._leash < 0:
                    self._start()
                return
        raise UnavailableError(f"the embedded daemon's folder comes and goes: {self._folder.path}")

    def _start(self) -> None:
        """Start a daemon and hold its standard input; the door is held."""
        fifo = self._folder.leash
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._leash = self._folder.hold()
            os.set_blocking(reader, True)
            self._process = start(self._folder, reader, merges=self._merges)
        finally:
            os.close(reader)

    def _wait(self, timeout_s: float) -> bool:
        """Return whether the daemon serves; one that was about to end is followed by another."""
        if self._process is None:
            with contextlib.suppress(UnavailableError):
                return wait_until_serving(
                    self._folder, lambda: self.alive, timeout_s=START_TIMEOUT_S
                )
            with self._folder.door():
                os.close(self._leash)
                self._leash = self._folder.hold()
                if self._leash < 0:
                    self._start()
        process = self._process
        alive = (lambda: process.poll() is None) if process else (lambda: self.alive)
        return wait_until_serving(self._folder, alive, timeout_s=timeout_s)

    def _end_daemon(self) -> str:
        """Wait for the end of a daemon that nobody else holds; return how it failed, if it did."""
        if self._process is not None:
            # Before the leash is let go: that asks for a stop as well, and two are an order.
            code = stop(self._process)
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        else:
            ended_early, leash, self._leash = not self.alive, self._leash, -1
            os.close(leash)
            code = int(ended_early or not _gone(self._folder))
            how = "ended too early" if ended_early else f"does not end after {STOP_TIMEOUT_S:.0f} s"
        return f"the daemon {how}; its last words: {last_words(self._folder)}" if code else ""

    def _forget(self) -> None:
        # Also in a fork: its parent's share does not last as long as the fork.
        users, self._users, leash, self._leash = self._users, -1, self._leash, -1
        for descriptor in (users, leash):
            if descriptor >= 0:
                os.close(descriptor)
        process: subprocess.Popen[bytes] | None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            # It may outlive this process, and is nobody's child from then on.
            process.returncode = 0


def _gone(folder: DaemonFolder) -> bool:
    """Wait for the end of a daemon that nobody holds; return whether it came."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while folder.has_daemon:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _sweep(root: Path) -> None:
    """Remove what daemons of this user left that were killed together with their users."""
    for path in root.glob(f"{_PREFIX}-{os.getuid()}-*"):
        folder = DaemonFolder(path)
        with contextlib.suppress(OSError, UnavailableError):
            folder.make()
            folder.clear_unused()

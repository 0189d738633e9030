"""Endpoints of daemons: addresses (`unix:PATH` for a socket of this host, else `HOST:PORT`), and
the folder of an embedded daemon with its files, users and locks.

The standard input of an embedded daemon is the FIFO `leash`. Every user of the daemon holds it open
for writing, so the daemon notices the end of the last user, even of a killed one. Each user holds a
shared lock on the file `users`. A process holds the lock on the file `door` while it starts a
daemon, begins or ceases to use one, or removes the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import shutil
import stat
import time
from collections.abc import Generator
from pathlib import Path

from rankdump.errors import UnavailableError

DEFAULT_AGENT_ADDRESS = "unix:/run/rankdump/agent.sock"
"""Address of a host's agent unless the variable RANKDUMP_AGENT gives another."""
DEFAULT_COORDINATOR_ADDRESS = "127.0.0.1:7421"
"""Address of the coordinator unless the variable RANKDUMP_COORDINATOR gives another."""


MAX_JOB_DRAIN_S = 600.0
"""Longest time for which an embedded daemon writes after the end of its job what the job left: it
goes on as long as something is finished within each `agent.drain_timeout_s`.
"""


def is_socket_address(address: str) -> bool:
    """Return whether an address names a Unix socket."""
    return address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Return whether an address `HOST:PORT` can only be reached from this host.

    >>> is_loopback("[::1]:7420"), is_loopback("node7:29500")
    (True, False)
    """
    bare = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def parse_tcp_address(address: str) -> tuple[str, int] | None:
    """Return host and port of an address `HOST:PORT`; None for any other text.

    >>> parse_tcp_address("[::1]:7420"), parse_tcp_address("node7")
    (('::1', 7420), None)
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and int(port) <= 0xFFFF
    return (host, int(port)) if host and is_port else None


_POLL_S = 0.02
_RELEASE_TIMEOUT_S = 2.0
"""Seconds that a killed process may take to close its files on a busy host."""


class DaemonFolder:
    """Folder of an embedded daemon, whether the daemon is running or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = path / "agent.sock"
        self.state = path / "state"
        self.log = path / "rankdumpd.log"
        self.liveness_fifo = path / "leash"
        self._users, self._lock_file = path / "users", path / "door"

    def make(self) -> None:
        """Make the folder, which only this user may enter; UnavailableError if another user owns
        it.
        """
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        found = self.path.lstat()
        foreign = not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()
        if foreign or found.st_mode & 0o077:
            raise UnavailableError(
                f"the folder of the embedded daemon belongs to another user: {self.path}"
            )

    @contextlib.contextmanager
    def hold_lock(self, *, wait: bool = True) -> Generator[None, None, None]:
        """Hold the lock on `door`; FileNotFoundError if the folder was removed.

        BlockingIOError if another process holds the lock and `wait` is False.
        """
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(descriptor).st_ino != self._lock_file.stat().st_ino:
                raise FileNotFoundError(self._lock_file)
            yield
        finally:
            os.close(descriptor)

    def register_user(self) -> int:
        """Return a descriptor; while it is open, this process is a user of the folder."""
        users = os.open(self._users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        return users

    def is_only_user(self, users: int, *, within_s: float = 0.0) -> bool:
        """Return whether the descriptor `users` of `register_user` is the only one, or becomes so
        within `within_s` seconds.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_POLL_S)
            else:
                return True

    def open_liveness_fifo(self) -> int:
        """Return a descriptor for writing to the daemon's standard input; -1 if no daemon runs
        here.
        """
        try:
            return os.open(self.liveness_fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                return -1
            raise

    @property
    def has_daemon(self) -> bool:
        """Whether a daemon runs in this folder."""
        descriptor = self.open_liveness_fifo()
        if descriptor >= 0:
            os.close(descriptor)
        return descriptor >= 0

    def remove_files(self, *, keep_log: bool) -> bool:
        """Remove the folder, or all of its files except the log; return whether a log was kept."""
        if not (keep_log and self.log.exists()):
            shutil.rmtree(self.path, ignore_errors=True)
            return False
        for item in self.path.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            elif item != self.log:
                item.unlink(missing_ok=True)
        return True

    def remove_unused(self, *, keep_log: bool = False, by_daemon: bool = False) -> None:
        """Remove the folder if neither a process nor a daemon uses it and its lock is free.

        `by_daemon` is set by a daemon that ends. A folder in which only a log was kept is not
        removed.
        """
        with contextlib.suppress(OSError):
            if not self._users.exists():
                return
            with self.hold_lock(wait=False):
                users = os.open(self._users, os.O_RDWR | os.O_CLOEXEC)
                try:
                    # The files of a killed process are closed one after the other: the FIFO, then
                    # the lock.
                    within_s = _RELEASE_TIMEOUT_S if by_daemon else 0.0
                    alone = self.is_only_user(users, within_s=within_s)
                    if alone and (by_daemon or not self.has_daemon):
                        self.remove_files(keep_log=keep_log)
                finally:
                    os.close(users)

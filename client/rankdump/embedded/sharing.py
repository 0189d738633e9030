"""One embedded daemon for all processes of a job on a host, as long as any of them needs it.

They meet in a folder of the job's name. Who comes first starts the daemon; its standard input is a
FIFO that each of them holds open for writing, so it drains and ends when the last of them is gone,
however it went. Coming and going is guarded by a lock on `door`; each holds a shared lock on
`users`, so who leaves knows whether it was the last, waits for the daemon, and clears up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Generator
from pathlib import Path

from rankdump.contract.errors import UnavailableError
from rankdump.embedded.process import (
    POLL_S,
    STOP_TIMEOUT_S,
    Daemon,
    find_daemon,
    stop,
    temp_root,
)

_PREFIX = "rankdump-of"
_LONGEST_NAME = 24
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_TRIES = 100

logger = logging.getLogger("rankdump")


class Lease:
    """This process's share in the daemon of its job; `close` gives it back."""

    def __init__(self, job_id: str, root: Path | None = None) -> None:
        """Find or start the daemon; UnavailableError says why there is none."""
        find_daemon()
        self._root = root or Path(temp_root())
        self._users = self._leash = -1
        _sweep(self._root)
        name = _UNSAFE.sub("_", job_id)[-_LONGEST_NAME:]
        try:
            self._daemon = Daemon(self._root / f"{_PREFIX}-{os.getuid()}-{name}")
            self._enter()
            os.register_at_fork(after_in_child=self._forget)
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}"
            raise UnavailableError(f"the embedded daemon cannot be started: {reason}") from None

    @property
    def address(self) -> str:
        """Where agent and coordinator answer."""
        return self._daemon.address

    def close(self) -> None:
        """Need the daemon no longer; whoever is the last waits until it has written everything."""
        if self._leash < 0:
            return
        folder = self._daemon.folder
        with contextlib.suppress(OSError), _door(folder):
            lost = not _leashed(folder)
            os.close(self._leash)
            self._leash = -1
            if _only_user(self._users):
                lost |= not _gone(folder)
                kept = self._daemon.clean_up(keep_log=lost)
                if lost and kept:
                    self._tell()
        self._forget()

    def _forget(self) -> None:
        # Also in a fork: its parent's share does not last as long as the fork.
        users, self._users, leash, self._leash = self._users, -1, self._leash, -1
        for descriptor in (users, leash):
            if descriptor >= 0:
                os.close(descriptor)

    def _enter(self) -> None:
        folder = self._daemon.folder
        for _ in range(_TRIES):
            _make_private(folder)
            with contextlib.suppress(FileNotFoundError), _door(folder):
                self._users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    self._leash = self._hold()
                except BaseException:
                    self._forget()
                    raise
                fcntl.flock(self._users, fcntl.LOCK_SH)
                return
        raise UnavailableError(f"the embedded daemon's folder comes and goes: {folder}")

    def _hold(self) -> int:
        """Return the leash of the daemon that runs here, or of one that is started now."""
        folder = self._daemon.folder
        fifo = folder / "leash"
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        leash = _writer(fifo)
        if leash < 0:
            return self._start(fifo)
        try:
            self._daemon.wait_until_serving(lambda: True)
        except BaseException:
            os.close(leash)
            raise
        return leash

    def _start(self, fifo: Path) -> int:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            leash = _writer(fifo)
            os.set_blocking(reader, True)
            process = self._daemon.start(reader)
        finally:
            os.close(reader)
        try:
            self._daemon.wait_until_serving(lambda: process.poll() is None)
        except UnavailableError as error:
            os.close(leash)
            stop(process)
            words = self._daemon.last_words
            self._daemon.clean_up(keep_log=False)
            raise UnavailableError(f"{error}; its last words: {words}") from None
        # It may outlive this process, and is nobody's child from then on.
        process.returncode = 0
        return leash

    def _tell(self) -> None:
        logger.error(
            "rankdump: the embedded daemon ended too early: %s; its log: %s",
            self._daemon.last_words,
            self._daemon.log,
        )


@contextlib.contextmanager
def _door(folder: Path) -> Generator[None, None, None]:
    """Hold the door of a folder; FileNotFoundError when the folder is gone."""
    path = folder / "door"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
        yield
    finally:
        os.close(descriptor)


def _make_private(folder: Path) -> None:
    """Make a folder that is this user's alone; UnavailableError when somebody else has it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnavailableError(f"the embedded daemon's folder is somebody else's: {folder}")


def _writer(fifo: Path) -> int:
    """Open the FIFO of a daemon that runs; -1 when nobody reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return -1
        raise


def _leashed(folder: Path) -> bool:
    """Return whether the daemon of a folder runs."""
    descriptor = _writer(folder / "leash")
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _gone(folder: Path) -> bool:
    """Wait for the end of a daemon that nobody holds; return whether it came."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _leashed(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _only_user(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(root: Path) -> None:
    """Remove what daemons of this user left whose processes were all killed."""
    for folder in root.glob(f"{_PREFIX}-{os.getuid()}-*"):
        with contextlib.suppress(OSError, UnavailableError):
            _make_private(folder)
            with _door(folder):
                users = os.open(folder / "users", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    if _only_user(users) and not _leashed(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(users)

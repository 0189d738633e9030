"""Embedded daemon: a daemon that a command, or all processes of a job on a host together, start for
themselves on a host that runs none as a service; its start, the wait until it serves, and its stop
after the last process has ended.

The processes use a folder with the job's name (`DaemonFolder`). The first process starts the
daemon; the last one waits for the daemon's end and removes the folder. If all processes were
killed, the daemon drains, ends and removes the folder by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rankdump._core.daemon_endpoint import MAX_JOB_DRAIN_S, DaemonFolder
from rankdump.errors import UnavailableError

START_TIMEOUT_S = 30.0
"""Seconds that a job waits for the daemon at its start; after that, tensors are buffered."""
STOP_TIMEOUT_S = MAX_JOB_DRAIN_S + 60.0
"""Longest wait for the end of a daemon in seconds; unless it hangs, the daemon ends earlier."""
STOP_NOTICE_S = 10.0
"""Seconds after which the wait for the end of a daemon is logged."""
POLL_S = 0.05
_MEMORY_FOLDER = "/dev/shm"
# The path of a socket (`sun_path`) has at most 108 bytes; the names of folder and socket take less
# than 40.
_MAX_TEMP_ROOT_BYTES = 60
_DISK_SETTINGS = {
    "RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0",
    "RANKDUMPD_AGENT__KEEP_FREE_INODES_RATIO": "0",
}
"""Settings that let an embedded daemon fill the disk: the user who starts a dump by hand sees how
full the disk is.
"""
_SERVING_RESPONSE = b"\x08\x01"
"""The serialized answer `SERVING` of gRPC's health service."""
_REQUIRED_MODULES = ("rankdumpd", "click", "cryptography", "grpc_health", "prometheus_client")
"""Modules that a daemon needs, and that the extra `daemon` installs."""

_logger = logging.getLogger("rankdump")


def start_daemon(
    folder: DaemonFolder, liveness_fd: int, *, merges: bool
) -> subprocess.Popen[bytes]:
    """Start a daemon, which drains and ends at end of file on `liveness_fd`.

    If `merges` is False, it is only an agent, for a job that spans several hosts.
    """
    command = [sys.executable, "-m", "rankdumpd", "standalone", "--embedded", str(folder.path)]
    command += [] if merges else ["--no-coordinator"]
    with folder.log.open("wb") as log:
        # A process session of its own protects the daemon from the terminal's Ctrl-C. A working
        # directory of its own keeps the job's modules out, because `-m` looks for modules in the
        # current folder first.
        return subprocess.Popen(
            command,
            cwd=folder.path,
            env=_DISK_SETTINGS | os.environ,
            stdin=liveness_fd,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_daemon(process: subprocess.Popen[bytes], log: Path) -> int:
    """Stop a daemon: request its stop, wait, and kill it after a timeout. Return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(STOP_NOTICE_S)
        log_long_stop(log)
        return process.wait(STOP_TIMEOUT_S - STOP_NOTICE_S)
    except subprocess.TimeoutExpired:
        return process.returncode or 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def log_long_stop(log: Path) -> None:
    """Log that the end of a daemon takes long."""
    _logger.warning(
        "waiting for the embedded daemon, which still writes what the job left (%.0f s at most); "
        "its log: %s",
        MAX_JOB_DRAIN_S,
        log,
    )


def read_last_log_line(folder: DaemonFolder) -> str:
    """Return the last line of a daemon's log; `none` if the log is empty."""
    text = folder.log.read_text(errors="replace") if folder.log.exists() else ""
    return text.strip().rpartition("\n")[2] or "none"


def select_temp_root() -> str:
    """Return the folder that contains the folders of embedded daemons."""
    # Slabs are beside the socket, and should be in memory unless the user names another folder.
    if "TMPDIR" not in os.environ and os.access(_MEMORY_FOLDER, os.W_OK | os.X_OK):
        return _MEMORY_FOLDER
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= _MAX_TEMP_ROOT_BYTES else "/tmp"


def check_daemon_installed() -> None:
    """Raise UnavailableError if this Python installation cannot run a daemon."""
    missing = [name for name in _REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"no daemon can be started, because {', '.join(missing)} is not installed; "
            f"pip install 'rankdump[daemon]' installs it"
        )


def is_daemon_serving(address: str, *, timeout_s: float = 1.0) -> bool:
    """Return whether the daemon's health service answers `SERVING`.

    Messages are raw bytes, because a job need not have the package grpc_health.
    """
    # gRPC is imported here, because loading it takes as long as the start of a daemon and can be
    # done meanwhile.
    import grpc

    from rankdump._wire.channel import open_channel

    with open_channel(address) as channel:
        # The stub's type depends on its serializers, which are absent here: messages are bytes.
        unary: Any = channel.unary_unary
        check = unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(b"", timeout=timeout_s) == _SERVING_RESPONSE)
        except grpc.RpcError:
            return False


_FOLDER_PREFIX = "rankdump-of"
_MAX_NAME_CHARACTERS = 24
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_MAX_ATTEMPTS = 100


class DaemonLease:
    """This process's share in the daemon of its job, until `close`."""

    def __init__(self, job_id: str, *, merges: bool = True, root: Path | None = None) -> None:
        """Find or start the daemon, which may not serve yet; UnavailableError if that fails.

        If `merges` is True, the daemon is also the coordinator of the job.
        """
        check_daemon_installed()
        root = root or Path(select_temp_root())
        self._users = self._liveness_fd = -1
        self._merges, self._process = merges, None
        self._joined_s, self._has_served = time.monotonic(), False
        _remove_leftovers(root)
        name = _UNSAFE_CHARACTER.sub("_", job_id)[-_MAX_NAME_CHARACTERS:]
        self._folder = DaemonFolder(root / f"{_FOLDER_PREFIX}-{os.getuid()}-{name}")
        try:
            with _explain_failed_start():
                self._join()
        except UnavailableError:
            self.close()
            raise
        os.register_at_fork(after_in_child=self._forget)

    @property
    def address(self) -> str:
        """Address of the daemon, which is both agent and coordinator."""
        return f"unix:{self._folder.socket}"

    @property
    def log(self) -> Path:
        """Log file of the daemon."""
        return self._folder.log

    @property
    def started_it(self) -> bool:
        """Whether this process started the daemon."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether the daemon is running."""
        return self._folder.has_daemon

    def is_starting(self) -> bool:
        """Return whether the daemon is running but not serving yet, for at most START_TIMEOUT_S.

        UnavailableError if the daemon has ended.
        """
        if self._serves() or time.monotonic() - self._joined_s > START_TIMEOUT_S:
            return False
        self._check_running()
        return True

    def wait_until_serving(self) -> bool:
        """Wait for at most START_TIMEOUT_S; return whether the daemon serves. It may still serve
        later.

        UnavailableError if the daemon has ended.
        """
        while self.is_starting():
            time.sleep(POLL_S)
        return self._has_served

    def close(self, *, keep_log: bool = False) -> str:
        """Release the daemon; the last user waits until the daemon has written everything.

        If the daemon failed, keep its log and return how it failed; otherwise return an empty text.
        """
        fault = ""
        if self._liveness_fd >= 0:
            with contextlib.suppress(OSError), self._folder.hold_lock():
                if self._folder.is_only_user(self._users):
                    fault = self._end_daemon()
                    self._folder.remove_files(keep_log=keep_log or bool(fault))
        self._forget()
        return fault

    def _join(self) -> None:
        for _ in range(_MAX_ATTEMPTS):
            self._folder.make()
            with contextlib.suppress(FileNotFoundError), self._folder.hold_lock():
                self._users = self._folder.register_user()
                self._liveness_fd = self._folder.open_liveness_fifo()
                if self._liveness_fd < 0:
                    self._start()
                return
        raise UnavailableError(
            f"the folder of the embedded daemon was removed repeatedly: {self._folder.path}"
        )

    def _start(self) -> None:
        """Start a daemon and keep its standard input open; the folder's lock must be held."""
        fifo = self._folder.liveness_fifo
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._liveness_fd = self._folder.open_liveness_fifo()
            os.set_blocking(reader, True)
            self._process = start_daemon(self._folder, reader, merges=self._merges)
        finally:
            os.close(reader)

    def _serves(self) -> bool:
        if not self._has_served and self._folder.socket.exists():
            self._has_served = is_daemon_serving(self.address)
        return self._has_served

    def _check_running(self) -> None:
        """Start another daemon if the present one was about to end when this process joined it.

        UnavailableError if the daemon that this process started has ended.
        """
        process = self._process
        if process is not None and process.poll() is not None:
            line = read_last_log_line(self._folder)
            raise UnavailableError(
                f"the embedded daemon ended before it was ready; its last log line: {line}; log "
                f"file of the daemon: {self.log}"
            )
        if process is None and not self.alive:
            with _explain_failed_start(), self._folder.hold_lock():
                os.close(self._liveness_fd)
                self._liveness_fd = self._folder.open_liveness_fifo()
                if self._liveness_fd < 0:
                    self._start()

    def _end_daemon(self) -> str:
        """Wait for the end of a daemon that has no other users; return how it failed, or an empty
        text.
        """
        if self._process is not None:
            # The stop is requested before the descriptor is closed, because closing it is a request
            # too, and two requests force the stop.
            code = stop_daemon(self._process, self.log)
            if code == -signal.SIGTERM:  # it had not yet begun to handle signals
                return ""
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        else:
            ended_early, liveness_fd, self._liveness_fd = not self.alive, self._liveness_fd, -1
            os.close(liveness_fd)
            code = int(ended_early or not _wait_for_end(self._folder))
            late = f"has not ended after {STOP_TIMEOUT_S:.0f} s"
            how = "ended before the job" if ended_early else late
        if not code:
            return ""
        return f"the embedded daemon {how}; its last log line: {read_last_log_line(self._folder)}"

    def _forget(self) -> None:
        # This also runs in a forked child, because the share belongs to the parent, which may end
        # earlier.
        users, self._users, liveness_fd, self._liveness_fd = self._users, -1, self._liveness_fd, -1
        for descriptor in (users, liveness_fd):
            if descriptor >= 0:
                os.close(descriptor)
        process: subprocess.Popen[bytes] | None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            # The daemon may outlive this process, so Popen must not warn that it is still running.
            process.returncode = 0


@contextlib.contextmanager
def _explain_failed_start() -> Generator[None, None, None]:
    """Raise UnavailableError if the system refuses to start the daemon."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise UnavailableError(f"the embedded daemon cannot be started: {reason}") from None


def _wait_for_end(folder: DaemonFolder) -> bool:
    """Wait for the end of a daemon that has no users; return whether it ended."""
    start_s, is_logged = time.monotonic(), False
    while folder.has_daemon:
        waited_s = time.monotonic() - start_s
        if waited_s > STOP_TIMEOUT_S:
            return False
        if waited_s > STOP_NOTICE_S and not is_logged:
            is_logged = True
            log_long_stop(folder.log)
        time.sleep(POLL_S)
    return True


def _remove_leftovers(root: Path) -> None:
    """Remove the folders of daemons of this user that were killed together with all of
    their users.
    """
    for path in root.glob(f"{_FOLDER_PREFIX}-{os.getuid()}-*"):
        folder = DaemonFolder(path)
        with contextlib.suppress(OSError, UnavailableError):
            folder.make()
            folder.remove_unused()

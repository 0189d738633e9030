"""Process of an embedded daemon: started in a folder of its own, waited for, stopped."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import grpc

from rankdump.contract.daemon_folder import DaemonFolder
from rankdump.contract.errors import UnavailableError
from rankdump.wire.channel import connect

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
_MEMORY = "/dev/shm"
# sun_path holds 108 bytes; what the folder's name and the socket's add is below 40.
_LONGEST_TEMP = 60
_ON_ANY_DISK = {
    "RANKDUMPD_AGENT__KEEP_FREE_RATIO": "0",
    "RANKDUMPD_AGENT__KEEP_FREE_INODES_RATIO": "0",
}
"""Who starts a dump by hand sees how full the disk is: no share of it is kept free for others."""
_SERVING = b"\x08\x01"
"""`SERVING` as gRPC's health service answers it."""
_NEEDED = ("rankdumpd", "click", "cryptography", "grpc_health", "prometheus_client")
"""Modules without which no daemon starts; the extra `daemon` brings them."""


def address_of(folder: DaemonFolder) -> str:
    """Return where agent and coordinator of a folder's daemon answer."""
    return f"unix:{folder.socket}"


def start(folder: DaemonFolder, leash: int, *, merges: bool) -> subprocess.Popen[bytes]:
    """Start a daemon; it drains and ends when the file `leash`, a descriptor, ends.

    Without `merges` it is an agent alone: it sees the ranks of one host, and the job has more.
    """
    command = [sys.executable, "-m", "rankdumpd", "standalone", "--embedded", str(folder.path)]
    command += [] if merges else ["--no-coordinator"]
    with folder.log.open("wb") as log:
        # A session of its own keeps the terminal's Ctrl-C from it, and a folder of its own the
        # job's modules: `-m` looks for modules in the current folder first.
        return subprocess.Popen(
            command,
            cwd=folder.path,
            env=_ON_ANY_DISK | os.environ,
            stdin=leash,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until_serving(
    folder: DaemonFolder, alive: Callable[[], bool], *, timeout_s: float
) -> bool:
    """Return whether a daemon serves before the timeout; UnavailableError when it ended."""
    deadline = time.monotonic() + timeout_s
    while alive():
        if folder.socket.exists() and serving(address_of(folder)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    words = last_words(folder)
    raise UnavailableError(f"the embedded daemon ended before it served; its last words: {words}")


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ask a daemon to stop, wait, and end it at last; return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return process.returncode or 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def last_words(folder: DaemonFolder) -> str:
    """Return the last line of a daemon's log; `none` when it said nothing."""
    text = folder.log.read_text(errors="replace") if folder.log.exists() else ""
    return text.strip().rpartition("\n")[2] or "none"


def temp_root() -> str:
    """Return the folder for folders of daemons."""
    # Slabs stand beside the socket, and belong into memory unless the user names a place.
    if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK | os.X_OK):
        return _MEMORY
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= _LONGEST_TEMP else "/tmp"


def find_daemon() -> None:
    """Raise UnavailableError when this Python cannot run a daemon."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"none can be started, for {', '.join(missing)} is not installed; "
            f"pip install 'rankdump[daemon]' brings it"
        )


def serving(address: str, *, timeout_s: float = 1.0) -> bool:
    """Return whether the daemon's health service says that it serves.

    Messages as bytes: a job need not have the package that knows them.
    """
    with connect(address) as channel:
        # Typed by what makes and reads its messages, which are bytes here.
        unary: Any = channel.unary_unary
        check = unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(b"", timeout=timeout_s) == _SERVING)
        except grpc.RpcError:
            return False

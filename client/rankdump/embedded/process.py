"""The process of an embedded daemon: started in a folder of its own, waited for, stopped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

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


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon's private folder, whether it runs or not."""

    folder: Path

    @property
    def address(self) -> str:
        """Where agent and coordinator answer."""
        return f"unix:{self._socket}"

    @property
    def log(self) -> Path:
        """What the daemon says."""
        return self.folder / "rankdumpd.log"

    @property
    def last_words(self) -> str:
        """The last line of its log; `none` when it said nothing."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text.strip().rpartition("\n")[2] or "none"

    def start(self, leash: int) -> subprocess.Popen[bytes]:
        """Start it; it drains and ends when the file `leash`, a descriptor, ends."""
        command = [sys.executable, "-m", "rankdumpd", "standalone", "--until-eof"]
        command += ["--socket", str(self._socket), "--state-dir", str(self.folder / "state")]
        with self.log.open("wb") as log:
            # A session of its own keeps the terminal's Ctrl-C from it, and a folder of its own the
            # job's modules: `-m` looks for modules in the current folder first.
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=_ON_ANY_DISK | os.environ,
                stdin=leash,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_serving(self, alive: Callable[[], bool]) -> None:
        """Return once it serves; UnavailableError when it ended, or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while alive():
            if self._socket.exists() and serving(self.address):
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the embedded daemon does not serve after {START_TIMEOUT_S:.0f} s"
                )
            time.sleep(POLL_S)
        raise UnavailableError("the embedded daemon ended before it served")

    def clean_up(self, *, keep_log: bool) -> bool:
        """Remove the folder; return whether it stays, because its log is there and wanted."""
        kept = keep_log and self.log.exists()
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)
            return False
        for item in self.folder.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            elif item != self.log:
                item.unlink(missing_ok=True)
        return True

    @property
    def _socket(self) -> Path:
        return self.folder / "agent.sock"


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


def temp_root() -> str:
    """Return the folder for folders of daemons."""
    # Slabs stand beside the socket, and belong into memory unless the user names a place.
    if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK | os.X_OK):
        return _MEMORY
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= _LONGEST_TEMP else "/tmp"


def find_daemon() -> None:
    """UnavailableError when this Python has no daemon to run."""
    if importlib.util.find_spec("rankdumpd") is None:
        raise UnavailableError(
            "rankdumpd is not installed; pip install 'rankdump[daemon]' brings it"
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

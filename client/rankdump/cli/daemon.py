"""The daemon that lives as long as one command: started, waited for, stopped, cleaned up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from rankdump.cli.ask import serving
from rankdump.contract.errors import UnavailableError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_MEMORY = "/dev/shm"
# sun_path holds 108 bytes; what the folder's name and the socket's add is below 40.
_LONGEST_TEMP = 60


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon and its private folder."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Where agent and coordinator answer."""
        return f"unix:{_socket(self.folder)}"


@contextmanager
def embedded_daemon(*, keep_log: bool) -> Generator[Daemon, None, None]:
    """Run a daemon for the length of a block; UnavailableError says why it did not start.

    Its log stays behind when asked for, or when the daemon failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="rankdump-", dir=_temp_root()))
    failed = True
    try:
        daemon = Daemon(folder, _start(folder))
        try:
            _wait_until_serving(daemon)
            yield daemon
        finally:
            failed = _stop(daemon.process) != 0
            if failed:
                click.echo(f"rankdump: the daemon {_how_it_ended(daemon)}", err=True)
    finally:
        _clean_up(folder, keep_log=keep_log or failed)


def _temp_root() -> str:
    # Slabs stand beside the socket, and belong into memory unless the user names a place.
    if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK | os.X_OK):
        return _MEMORY
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= _LONGEST_TEMP else "/tmp"


def _socket(folder: Path) -> Path:
    return folder / "agent.sock"


def _log(folder: Path) -> Path:
    return folder / "rankdumpd.log"


def _start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rankdumpd", "standalone", "--until-eof"]
    command += ["--socket", str(_socket(folder)), "--state-dir", str(folder / "state")]
    with _log(folder).open("wb") as log:
        # A session of its own keeps the terminal's Ctrl-C from it, and a folder of its own the
        # job's modules: `-m` looks for modules in the current folder first.
        return subprocess.Popen(
            command,
            cwd=folder,
            # Nothing is ever written: the pipe breaks when this process ends, however it ends.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_serving(daemon: Daemon) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while daemon.process.poll() is None:
        if _socket(daemon.folder).exists() and serving(daemon.address):
            return
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the embedded daemon does not serve after {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(_POLL_S)
    raise UnavailableError("the embedded daemon ended before it served")


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Ask it to stop, wait, and end it at last; return its exit code."""
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
        if process.stdin is not None:
            process.stdin.close()


def _how_it_ended(daemon: Daemon) -> str:
    code = daemon.process.returncode
    last = _log(daemon.folder).read_text(errors="replace").strip().rpartition("\n")[2]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{how}; its last words: {last or 'none'}"


def _clean_up(folder: Path, *, keep_log: bool) -> None:
    kept = _log(folder).exists() and keep_log
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        elif not (kept and item == _log(folder)):
            item.unlink(missing_ok=True)
    if kept:
        click.echo(f"daemon log: {_log(folder)}", err=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)

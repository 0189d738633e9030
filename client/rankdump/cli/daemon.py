"""The daemon that lives as long as one command: started, waited for, stopped, cleaned up."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from rankdump.embedded import Daemon
from rankdump.embedded.process import stop, temp_root


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that runs."""

    daemon: Daemon
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Where agent and coordinator answer."""
        return self.daemon.address


@contextmanager
def embedded_daemon(*, keep_log: bool) -> Generator[Running, None, None]:
    """Run a daemon for the length of a block; UnavailableError says why it did not start.

    Its log stays behind when asked for, or when the daemon failed.
    """
    daemon = Daemon(Path(tempfile.mkdtemp(prefix="rankdump-", dir=temp_root())))
    failed = True
    try:
        # Nothing is ever written: the pipe breaks when this process ends, however it ends.
        reader, leash = os.pipe()
        try:
            process = daemon.start(reader)
        finally:
            os.close(reader)
        try:
            daemon.wait_until_serving(lambda: process.poll() is None)
            yield Running(daemon, process)
        finally:
            failed = stop(process) != 0
            os.close(leash)
            if failed:
                click.echo(f"rankdump: the daemon {_how_it_ended(daemon, process)}", err=True)
    finally:
        if daemon.clean_up(keep_log=keep_log or failed):
            click.echo(f"daemon log: {daemon.log}", err=True)


def _how_it_ended(daemon: Daemon, process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{how}; its last words: {daemon.last_words}"

"""The daemon that lives as long as one command: started, waited for, stopped, cleared away."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click

from rankdump.contract.errors import UnavailableError
from rankdump.embedded import Lease


@contextmanager
def embedded_daemon(job_id: str, *, keep_log: bool) -> Generator[Lease, None, None]:
    """Run a daemon for the length of a block; UnavailableError says why it did not start.

    Its log stays behind when asked for, or when the daemon failed.
    """
    lease = Lease(job_id)
    fault = ""
    try:
        if not lease.serves:
            raise UnavailableError(f"the embedded daemon does not serve yet; its log: {lease.log}")
        yield lease
    finally:
        fault = lease.close(keep_log=keep_log)
        if fault:
            click.echo(f"rankdump: {fault}", err=True)
        if lease.log.exists():
            click.echo(f"daemon log: {lease.log}", err=True)

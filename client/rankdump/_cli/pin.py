"""Commands `rankdump pin` and `rankdump unpin`: protection of the dump of a job from removal by age
or size, and its end.
"""

from __future__ import annotations

import json

import click

from rankdump._cli import daemon_client
from rankdump._cli.options import resolve_agent_address
from rankdump._cli.output import print_lines
from rankdump._core.status import JobUsage
from rankdump._core.units import format_bytes

_job_argument = click.argument("job_id", metavar="JOB")
_agent_option = click.option(
    "--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT."
)
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object to stdout."
)


@click.command()
@_job_argument
@_agent_option
@_json_option
def pin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Protect the dump of JOB from removal.

    Until `unpin`, the agent of this host removes no iteration of the job by age or size. A job can
    be pinned before it starts.
    """
    return _set_pinned(job_id, agent, pinned=True, as_json=as_json)


def _set_pinned(job_id: str, agent: str | None, *, pinned: bool, as_json: bool) -> int:
    """Pin or unpin a job, and print the size of its dump on the agent."""
    if not job_id:
        raise click.UsageError("JOB is empty")
    address = resolve_agent_address(agent)
    daemon_client.set_job_pin(address, job_id, pinned=pinned)
    known = {job.job_id: job for job in daemon_client.fetch_agent_status(address).usage}
    job = known.get(job_id, JobUsage(job_id, pinned=pinned))
    if as_json:
        body = {"job_id": job_id, "pinned": job.pinned, "bytes_stored": job.bytes_stored}
        click.echo(json.dumps(body))
    else:
        now = "is pinned" if job.pinned else "is not pinned"
        here = format_bytes(job.bytes_stored) if job.bytes_stored else "nothing yet"
        print_lines([f"job {job_id} {now}; its dump on this host: {here}"])
    return 0


@click.command()
@_job_argument
@_agent_option
@_json_option
def unpin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Allow removal of old iterations of JOB again."""
    return _set_pinned(job_id, agent, pinned=False, as_json=as_json)

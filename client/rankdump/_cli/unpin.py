"""Command `rankdump unpin`: removes the protection that `rankdump pin` gives to a job's dump."""

from __future__ import annotations

import click

from rankdump._cli.pin import set_pinned


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def unpin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Allow the agent to remove iterations of JOB again, by its settings."""
    return set_pinned(job_id, agent, pinned=False, as_json=as_json)

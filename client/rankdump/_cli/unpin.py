"""Command `rankdump unpin`: end of the protection that `rankdump pin` gave the dump of a job."""

from __future__ import annotations

import click

from rankdump._cli.pin import set_pinned


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("--agent", metavar="ADDRESS", help="Agent to tell; default: RANKDUMP_AGENT.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def unpin(job_id: str, agent: str | None, as_json: bool) -> int:
    """Let iterations of JOB be removed again as the agent's settings say."""
    return set_pinned(job_id, agent, pinned=False, as_json=as_json)

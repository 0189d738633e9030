"""Command `rankdump freeze`: freezes the black box of a job that runs."""

from __future__ import annotations

import json

import click

from rankdump._cli import daemon_client
from rankdump._cli.options import resolve_agent_address
from rankdump._cli.output import print_lines


@click.command()
@click.argument("job_id", metavar="JOB", default="")
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--reason", metavar="TEXT", default="", help="Why, for the report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def freeze(job_id: str, agent: str | None, reason: str, as_json: bool) -> int:
    """Freeze the black box of JOB.

    The latest steps of all its ranks become a frozen tree, whose folder on the host of the agent is
    printed; `rankdump faults` reads it. With a coordinator the agents of all hosts freeze theirs,
    else that of this host alone. JOB may be left out when one job only has a black box. Exit code 1
    when nothing is frozen.
    """
    found = daemon_client.freeze_job(resolve_agent_address(agent), job_id, reason)
    if as_json:
        click.echo(json.dumps({"trees": found.trees, "notes": found.notes}))
    else:
        print_lines([*(f"frozen tree: {tree}" for tree in found.trees), *found.notes])
    return 0

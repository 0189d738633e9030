"""`rankdump status`: how a job stands, from its coordinator, an agent or a finished tree."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.job_view import job_lines
from rankdump.cli.listing import tree_at
from rankdump.cli.options import TREE, agent_address, coordinator_address
from rankdump.cli.ranks import status_table
from rankdump.cli.room_view import room_lines
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.tally import nobody_line, sentences
from rankdump.contract.status import StatusView
from rankdump.contract.timeouts import hint_to_json


@click.command()
@click.argument("tree", type=TREE, required=False)
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@click.option("--job", "job_id", metavar="ID", default="", help="Only this job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(
    tree: Path | None,
    agent: str | None,
    coordinator: str | None,
    job_id: str,
    as_json: bool,
    watch: bool,
) -> int:
    """Show how every rank stands.

    With a TREE from its manifests; from the coordinator of the job where one is named, by an
    option or by RANKDUMP_COORDINATOR; else from the agent of this host. Exit code 3 when nobody
    answers there.
    """
    if as_json and watch:
        raise click.UsageError("--json and --watch do not go together")
    if sum(given is not None for given in (tree, agent, coordinator)) > 1:
        raise click.UsageError("TREE, --agent and --coordinator do not go together")
    if agent and job_id:
        raise click.UsageError("--agent and --job do not go together")
    look = _looker(tree, agent, coordinator, job_id)
    if watch:
        # On use: what draws a screen takes longer to import than a status to say.
        from rankdump.cli.watch import watch as watched

        return watched(look)
    view = look()
    if as_json:
        click.echo(json.dumps(view_as_json(view), indent=1))
    else:
        width = table_width()
        ranks = status_table(view, width=width)
        show_table(ranks)
        say([*job_lines(view, width=width), *([""] if ranks else []), *_lines_below(view)])
    return 1 if any(i.complete and not i.balanced for i in view.iterations) else 0


def view_as_json(view: StatusView) -> dict[str, object]:
    """Return the view as scripts read it: the fields of contract.status, and hints' shares."""
    fields: dict[str, object] = asdict(view)
    fields["hints"] = list(map(hint_to_json, view.hints))
    return fields


def _looker(
    tree: Path | None, agent: str | None, coordinator: str | None, job_id: str
) -> Callable[[], StatusView]:
    if tree is not None:
        return lambda: reader.status_of(tree_at(tree, job_id=job_id, balances_only=True))
    # With gRPC, which takes longer to load than a tree to answer.
    from rankdump.cli.ask import agent_status, job_status

    named = coordinator or os.environ.get("RANKDUMP_COORDINATOR")
    if agent is None and (named or job_id):
        address = coordinator_address(coordinator)
        return lambda: job_status(address, job_id=job_id)
    address = agent_address(agent)
    return lambda: agent_status(address)


def _lines_below(view: StatusView) -> list[str]:
    nobody = [] if view.sessions or view.iterations else [nobody_line(view)]
    trees = [f"tree: {root}" for root in view.roots]
    return [*nobody, *sentences(view), *room_lines(view), *trees]

"""`rankdump status`: how a job stands, from its coordinator, an agent or a finished tree."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankdump import reader
from rankdump.cli.ask import agent_status, job_status
from rankdump.cli.job_view import job_lines
from rankdump.cli.listing import tree_at
from rankdump.cli.options import TREE, agent_address, coordinator_address
from rankdump.cli.ranks import status_table
from rankdump.cli.room_view import room_lines
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.tally import sentences
from rankdump.cli.text import paragraph
from rankdump.contract.errors import RankdumpError
from rankdump.contract.status import StatusView
from rankdump.contract.timeouts import hint_to_json

_REFRESH_S = 1.0
_FEWEST_RANKS = 8
_HEADING = 5
"""Lines of the title, the table's head and its sum."""


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
        return _watch(look)
    view = look()
    if as_json:
        click.echo(json.dumps(view_as_json(view), indent=1))
    else:
        width = table_width()
        show_table(status_table(view, width=width))
        say([*job_lines(view, width=width), *_lines_below(view)])
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
        return lambda: reader.status_of(tree_at(tree, job_id))
    named = coordinator or os.environ.get("RANKDUMP_COORDINATOR")
    if agent is None and (named or job_id):
        address = coordinator_address(coordinator)
        return lambda: job_status(address, job_id=job_id)
    address = agent_address(agent)
    return lambda: agent_status(address)


def _lines_below(view: StatusView) -> list[str]:
    nobody = [] if view.sessions or view.iterations else ["no rank has opened a session"]
    trees = [f"tree: {root}" for root in view.roots]
    return ["", *nobody, *sentences(view), *room_lines(view), *trees]


def _watch(look: Callable[[], StatusView]) -> int:
    console = Console(highlight=False)
    try:
        # On the alternate screen a table that grows leaves nothing behind.
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(Text("\n".join(_page(look, console))), refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return 0


def _page(look: Callable[[], StatusView], console: Console) -> list[str]:
    """Return the lines of one look; what is not there yet is said, and looked for again."""
    now = time.strftime("%H:%M:%S")
    try:
        view = look()
    except RankdumpError as error:
        return [f"{now}  {error}"]
    width, height = console.width, console.height
    below = [line for text in _lines_below(view) for line in paragraph(text, width)]
    below = [*_folded(job_lines(view, width=width), width), *below]
    # Ranks give way: their sum stands below them in any case.
    most = max(_FEWEST_RANKS, height - len(below) - _HEADING)
    return [f"{now}  Ctrl-C ends", *status_table(view, width=width, most=most), *below]


def _folded(lines: list[str], width: int) -> list[str]:
    # What fits stays as it is: folding would close up the columns of a table.
    pieces = (paragraph(line, width) if len(line) > width else [line] for line in lines)
    return [line for piece in pieces for line in piece]

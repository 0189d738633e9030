"""`rankdump status`: how the ranks of a job stand, from the agent or from a finished tree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankdump import reader
from rankdump.cli.ask import agent_status
from rankdump.cli.options import TREE, agent_address
from rankdump.cli.ranks import load_line, status_table
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.tally import sentences
from rankdump.contract.status import StatusView

_REFRESH_S = 1.0


@click.command()
@click.argument("tree", type=TREE, required=False)
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(tree: Path | None, agent: str | None, as_json: bool, watch: bool) -> int:
    """Show how every rank stands.

    With a TREE from its manifests, without one from the agent of this host.
    """
    if as_json and watch:
        raise click.UsageError("--json and --watch do not go together")
    if tree and agent:
        raise click.UsageError("TREE and --agent do not go together")
    look = _looker(tree, agent_address(agent))
    if watch:
        return _watch(look)
    view = look()
    if as_json:
        click.echo(json.dumps(view_as_json(view), indent=1))
    else:
        show_table(status_table(view, width=table_width()))
        say(_lines_below(view))
    return 1 if any(i.complete and not i.balanced for i in view.iterations) else 0


def view_as_json(view: StatusView) -> dict[str, object]:
    """Return the view as scripts read it; the fields are those of contract.status."""
    return asdict(view)


def _looker(tree: Path | None, address: str) -> Callable[[], StatusView]:
    if tree is not None:
        return lambda: reader.status(tree)
    return lambda: agent_status(address)


def _lines_below(view: StatusView) -> list[str]:
    nobody = [] if view.sessions or view.iterations else ["no rank has opened a session"]
    trees = [f"tree: {root}" for root in view.roots]
    return ["", *nobody, *sentences(view), load_line(view.load), *trees]


def _watch(look: Callable[[], StatusView]) -> int:
    console = Console(highlight=False)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                view = look()
                lines = [*status_table(view, width=console.width), *_lines_below(view)]
                live.update(Text("\n".join(lines)), refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return 0

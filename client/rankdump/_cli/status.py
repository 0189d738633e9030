"""Command `rankdump status`: status of a job, from its coordinator, an agent or a tree. Imports
gRPC and the live screen only on use.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.reader.session_files import read_tree_sessions
from rankdump._cli.job_status import format_job_status, format_resource_usage
from rankdump._cli.live_tree import (
    add_tree_rows,
    fetch_live_status,
    find_live_job,
    mark_ended_sessions,
)
from rankdump._cli.options import TREE_PATH, resolve_agent_address, resolve_coordinator_address
from rankdump._cli.output import measure_width, print_lines, print_table
from rankdump._cli.rank_status import (
    format_status_sentences,
    format_status_table,
    select_attempt,
)
from rankdump._cli.tree_contents import read_tree
from rankdump._core.status import StatusView
from rankdump._core.timeouts import hint_to_json
from rankdump.errors import CorruptedError


@click.command()
@click.argument("tree", type=TREE_PATH, required=False)
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@click.option("--job", "job_id", metavar="ID", default="", help="Only this job.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    help="Only this attempt of a job that was restarted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(
    tree: Path | None,
    agent: str | None,
    coordinator: str | None,
    job_id: str,
    attempt: int | None,
    as_json: bool,
    watch: bool,
) -> int:
    """Show the status of every rank.

    With TREE it comes from the daemons of the job that runs there, and after its end from its
    files. Without, it comes from the coordinator of the job when an option or RANKDUMP_COORDINATOR
    names one; else from the agent of this host. Exit code 3 when no daemon answers, and 1 when
    tensors of an iteration are not accounted for.
    """
    if as_json and watch:
        raise click.UsageError("--json and --watch cannot be combined")
    if sum(given is not None for given in (tree, agent, coordinator)) > 1:
        raise click.UsageError("TREE, --agent and --coordinator cannot be combined")
    if agent and job_id:
        raise click.UsageError("--agent and --job cannot be combined")
    source = _status_source(tree, agent, coordinator, job_id)
    look = source if attempt is None else lambda: select_attempt(source(), attempt)
    if watch:
        # Imported on use: `rich.live` takes longer to load than a status to print.
        from rankdump._cli.live_status import watch_status

        return watch_status(look)
    view = look()
    if as_json:
        click.echo(json.dumps(view_as_json(view), indent=1))
    else:
        width = measure_width()
        ranks = format_status_table(view, width=width)
        print_table(ranks)
        print_lines(format_job_status(view, width=width))
        print_lines([""] if ranks else [])
        print_lines([*format_status_sentences(view), *format_resource_usage(view)])
        print_lines(f"tree: {root}" for root in view.roots)
    return 1 if any(i.complete and not i.is_balanced for i in view.iterations) else 0


def view_as_json(view: StatusView) -> dict[str, object]:
    """Return the JSON form of a view: the fields of StatusView, and the hints with shares."""
    fields: dict[str, object] = asdict(view)
    fields["hints"] = list(map(hint_to_json, view.hints))
    return fields


def _status_source(
    tree: Path | None, agent: str | None, coordinator: str | None, job_id: str
) -> Callable[[], StatusView]:
    if tree is not None:
        return lambda: _read_tree_status(tree, job_id)
    # Imported on use: loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_agent_status, fetch_job_status

    named = coordinator or os.environ.get("RANKDUMP_COORDINATOR")
    if agent is None and (named or job_id):
        address = resolve_coordinator_address(coordinator)
        return lambda: fetch_job_status(address, job_id=job_id)
    address = resolve_agent_address(agent)
    return lambda: fetch_agent_status(address)


def _read_tree_status(tree: Path, job_id: str) -> StatusView:
    """Return the live status of the job that runs in a tree, else the status in its files."""
    job = find_live_job(tree, job_id)
    live = fetch_live_status(job) if job else None
    try:
        walked = reader.status_of(read_tree(tree, job_id=job_id, balances_only=True))
    except CorruptedError:
        # The ranks of a job that has just begun have no folders yet.
        if live is None:
            raise
        return live
    if live is not None:
        return add_tree_rows(live, walked)
    return mark_ended_sessions(walked, read_tree_sessions(tree, job_id), socket.gethostname())

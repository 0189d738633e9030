"""Command `rankdump status`: shows the status of a job from its coordinator, an agent or a tree,
with `--watch` as a screen that is refreshed every second.

The screen shows findings in full if it is high enough for them. Everything else is shortened to
fit: first jobs that have ended, then ranks, then the tables of iterations and agents.
"""

from __future__ import annotations

import os
import socket
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.black_box.freeze_files import list_freezes
from rankdump._analysis.reader.job_sentences import format_freezes, format_resource_usage
from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._analysis.reader.rank_tallies import (
    find_ended_jobs,
    format_status_sentences,
    select_attempt,
    tally_ranks,
)
from rankdump._analysis.reader.tree_status import mark_ended_sessions
from rankdump._cli.live_tree import add_tree_rows, fetch_live_status, find_live_job
from rankdump._cli.options import (
    SELECTION_OPTIONS,
    TREE_PATH,
    resolve_agent_address,
    resolve_coordinator_address,
)
from rankdump._cli.output import measure_width, print_json, print_lines, print_table
from rankdump._cli.status_tables import (
    MAX_RANKS_SHOWN,
    format_job_findings,
    format_job_status,
    format_job_tables,
    format_status_table,
)
from rankdump._cli.tree_contents import read_tree
from rankdump._core.status import StatusView, view_as_json
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError, RankdumpError


@click.command()
@click.argument("tree", type=TREE_PATH, required=False)
@click.option("--agent", metavar="ADDRESS", help="Agent to ask; default: RANKDUMP_AGENT.")
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@SELECTION_OPTIONS["job_id"]
@SELECTION_OPTIONS["attempt"]
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

    With TREE, the status comes from the daemons of the job that writes to it, and after the end of
    the job from the files of TREE. Without TREE, it comes from the coordinator of the job when an
    option or RANKDUMP_COORDINATOR names one, and otherwise from the agent of this host. Exit code 3
    when no daemon answers, and 1 when tensors of an iteration are not accounted for, or a file of
    TREE cannot be read.
    """
    if as_json and watch:
        raise click.UsageError("--json and --watch cannot be combined")
    if sum(given is not None for given in (tree, agent, coordinator)) > 1:
        raise click.UsageError("TREE, --agent and --coordinator cannot be combined")
    if agent and job_id:
        raise click.UsageError("--agent and --job cannot be combined")
    damages: list[str] = []
    source = _status_source(tree, agent, coordinator, job_id, damages)
    look = source if attempt is None else lambda: select_attempt(source(), attempt)
    if watch:
        return _watch_status(look)
    view = look()
    if as_json:
        print_json(view_as_json(view))
    else:
        width = measure_width()
        ranks = format_status_table(view, width=width)
        print_table(ranks)
        print_lines(format_job_status(view, width=width))
        print_lines([""] if ranks else [])
        sentences = (*format_status_sentences(view), *format_freezes(view))
        print_lines([*sentences, *format_resource_usage(view)])
        print_lines(f"tree: {root}" for root in view.roots)
    is_balanced = all(each.is_balanced for each in view.iterations if each.complete)
    return 0 if is_balanced and not damages else 1


def _status_source(
    tree: Path | None,
    agent: str | None,
    coordinator: str | None,
    job_id: str,
    damages: list[str],
) -> Callable[[], StatusView]:
    """Return a function that gets the status; it adds to `damages` what cannot be read
    in a tree.
    """
    if tree is not None:
        return lambda: _add_freezes(_read_tree_status(tree, job_id, damages), tree, job_id)
    # Imported on use, because loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_agent_status, fetch_job_status

    named = coordinator or os.environ.get("RANKDUMP_COORDINATOR")
    if agent is None and (named or job_id):
        address = resolve_coordinator_address(coordinator)
        return lambda: fetch_job_status(address, job_id=job_id)
    address = resolve_agent_address(agent)
    return lambda: fetch_agent_status(address)


def _add_freezes(view: StatusView, tree: Path, job_id: str) -> StatusView:
    """Return a view with the freezes beside a tree, unless an agent has reported them."""
    if view.black_box.freezes:
        return view
    freezes, problems = list_freezes(tree, job_id)
    black_box = replace(view.black_box, freezes=freezes)
    return replace(view, black_box=black_box, findings=(*view.findings, *problems))


def _read_tree_status(tree: Path, job_id: str, damages: list[str]) -> StatusView:
    """Return the live status of the job that is running in a tree; if none is, the status in the
    files of the tree, with what cannot be read in them.
    """
    job = find_live_job(tree, job_id)
    live = fetch_live_status(job) if job else None
    try:
        found = read_tree(tree, job_id=job_id, balances_only=True)
    except CorruptedError:
        # The ranks of a job that has just begun have no folders yet.
        if live is None:
            raise
        return live
    walked = reader.status_of(found)
    if live is not None:
        return add_tree_rows(live, walked)
    damages[:] = found.problems
    return mark_ended_sessions(walked, read_tree_sessions(tree, job_id), socket.gethostname())


_REFRESH_S = 1.0
_MIN_RANKS_SHOWN = 4
_HEADING_LINES = 5
"""Lines that a job takes besides its ranks: a blank line, its name, titles, the mark of a cut, and
the sum.
"""


def _watch_status(look: Callable[[], StatusView]) -> int:
    """Show the view that `look` returns until Ctrl-C; an error is shown, and `look` is called
    again.
    """
    # Imported on use, because loading `rich.live` takes longer than printing a status.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    try:
        # On the alternate screen, a table that grows leaves nothing behind.
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                now, (width, height) = time.strftime("%H:%M:%S"), console.size
                try:
                    lines = format_screen(look(), now, width=width, height=height)
                except RankdumpError as error:
                    lines = _fold_lines([f"{now}  {error}"], width)
                text = Text("\n".join(lines), no_wrap=True, overflow="crop")
                live.update(text, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return 0


def format_screen(view: StatusView, now: str, *, width: int, height: int) -> list[str]:
    """Return the lines of one screen, at most `height`."""
    sentences = (*format_status_sentences(view), *format_freezes(view))
    found = _fold_lines([*sentences, *format_job_findings(view)], width)
    room = height - 1 - len(found)
    if room < 0:
        shown = found[: height - 2]
        more = format_count(len(found) - len(shown), "more line")
        return [f"{now}  Ctrl-C to quit", *shown, f"... {more}: rankdump status without --watch"]
    return [f"{now}  Ctrl-C to quit", *_fit_lines(view, room, width), *found]


def _fit_lines(view: StatusView, room: int, width: int) -> list[str]:
    """Return the lines above the findings in the most detailed form that fits; if none
    fits, cut.
    """
    ranks = tally_ranks(view)
    jobs = {tally.job_id for tally in ranks}
    over = find_ended_jobs(ranks)
    tables = format_job_tables(view, width=width)
    below = [
        "",
        *_fold_lines(
            [*format_resource_usage(view), *(f"tree: {root}" for root in view.roots)], width
        ),
    ]
    few = max(_MIN_RANKS_SHOWN, _max_ranks_of_job(room - len(tables) - len(below), jobs, over))
    fewest = max(1, _max_ranks_of_job(room - len(below), jobs, over))
    forms: Sequence[tuple[Collection[str], int, list[str]]] = (
        ((), MAX_RANKS_SHOWN, [*tables, *below]),
        (over, MAX_RANKS_SHOWN, [*tables, *below]),
        (over, few, [*tables, *below]),
        (over, fewest, below),
        (jobs, 1, below),
    )
    lines: list[str] = []
    for folded, most, rest in forms:
        lines = [*format_status_table(view, width=width, most=most, folded=folded), *rest]
        if len(lines) <= room:
            break
    return lines[:room]


def _max_ranks_of_job(room: int, jobs: Collection[str], over: Collection[str]) -> int:
    """Return how many ranks of each running job fit on the screen."""
    going = len(jobs) - len(over)
    return (room - len(over)) // going - _HEADING_LINES if going else MAX_RANKS_SHOWN


def _fold_lines(texts: list[str], width: int) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, width, subsequent_indent="  ", break_on_hyphens=False, drop_whitespace=True
        )
    ]

"""Screen of `rankdump status --watch`: the status of every rank, refreshed every second. Imported
on use, because `rich.live` takes long to import.

Findings are shown in full where the screen is high enough for them. Everything else is shortened
to fit: first jobs that have ended, then ranks, then the tables of iterations and agents.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankdump._cli.job_status import format_job_findings, format_job_tables, format_resource_usage
from rankdump._cli.rank_status import (
    MAX_RANKS_SHOWN,
    find_ended_jobs,
    format_status_sentences,
    format_status_table,
    tally_ranks,
)
from rankdump._cli.text_format import format_count
from rankdump._core.status import StatusView
from rankdump.errors import RankdumpError

_REFRESH_S = 1.0
_MIN_RANKS_SHOWN = 4
_HEADING_LINES = 5
"""Lines of a job besides its ranks: a blank, its name, titles, the mark of a cut and the sum."""


def watch_status(look: Callable[[], StatusView]) -> int:
    """Show the view that `look` returns until Ctrl-C; an error is shown and the call repeated."""
    console = Console(highlight=False)
    try:
        # On the alternate screen a table that grows leaves nothing behind.
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
    found = _fold_lines([*format_status_sentences(view), *format_job_findings(view)], width)
    room = height - 1 - len(found)
    if room < 0:
        shown = found[: height - 2]
        more = format_count(len(found) - len(shown), "more line")
        return [f"{now}  Ctrl-C to quit", *shown, f"... {more}: rankdump status without --watch"]
    return [f"{now}  Ctrl-C to quit", *_fit_lines(view, room, width), *found]


def _fit_lines(view: StatusView, room: int, width: int) -> list[str]:
    """Return the lines above the findings in the most detailed form that fits, or cut."""
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
    """Return how many ranks of each running job fit."""
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

"""`status --watch`: one screen of how every rank stands, again every second.

What is found stands whole on every screen that has the room for it; everything else gives way to
it: first jobs that are over, then ranks, then the tables of iterations and agents.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankdump.cli.job_view import job_findings, job_tables
from rankdump.cli.ranks import MOST_RANKS, status_table
from rankdump.cli.room_view import room_lines
from rankdump.cli.tally import jobs_over, nobody_line, sentences, tallies
from rankdump.cli.text import counted
from rankdump.contract.errors import RankdumpError
from rankdump.contract.status import StatusView

_REFRESH_S = 1.0
_FEWEST_RANKS = 4
_HEADING = 5
"""Lines of a job beside its ranks: a blank, its name, titles, the mark of a cut and the sum."""


def watch(look: Callable[[], StatusView]) -> int:
    """Show what a look returns until Ctrl-C; who does not answer is said, and asked again."""
    console = Console(highlight=False)
    try:
        # On the alternate screen a table that grows leaves nothing behind.
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                now, (width, height) = time.strftime("%H:%M:%S"), console.size
                try:
                    lines = page(look(), now, width=width, height=height)
                except RankdumpError as error:
                    lines = _folded([f"{now}  {error}"], width)
                text = Text("\n".join(lines), no_wrap=True, overflow="crop")
                live.update(text, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return 0


def page(view: StatusView, now: str, *, width: int, height: int) -> list[str]:
    """Return the lines of one screen, at most as many as it has."""
    nobody = [] if view.sessions or view.iterations else [nobody_line(view)]
    found = _folded([*nobody, *sentences(view), *job_findings(view)], width)
    room = height - 1 - len(found)
    if room < 0:
        shown = found[: height - 2]
        more = counted(len(found) - len(shown), "more line")
        return [f"{now}  Ctrl-C ends", *shown, f"... {more}: rankdump status without --watch"]
    return [f"{now}  Ctrl-C ends", *_fitting(view, room, width), *found]


def _fitting(view: StatusView, room: int, width: int) -> list[str]:
    """Return all but the findings in so many lines; the fullest form that fits, else its head."""
    ranks = tallies(view)
    jobs = {tally.job_id for tally in ranks}
    over = jobs_over(ranks)
    tables = job_tables(view, width=width)
    below = ["", *_folded([*room_lines(view), *(f"tree: {root}" for root in view.roots)], width)]
    few = max(_FEWEST_RANKS, _most(room - len(tables) - len(below), jobs, over))
    fewest = max(1, _most(room - len(below), jobs, over))
    forms: Sequence[tuple[Collection[str], int, list[str]]] = (
        ((), MOST_RANKS, [*tables, *below]),
        (over, MOST_RANKS, [*tables, *below]),
        (over, few, [*tables, *below]),
        (over, fewest, below),
        (jobs, 1, below),
    )
    lines: list[str] = []
    for folded, most, rest in forms:
        lines = [*status_table(view, width=width, most=most, folded=folded), *rest]
        if len(lines) <= room:
            break
    return lines[:room]


def _most(room: int, jobs: Collection[str], over: Collection[str]) -> int:
    """Return how many ranks of each job that is not over there is room for."""
    going = len(jobs) - len(over)
    return (room - len(over)) // going - _HEADING if going else MOST_RANKS


def _folded(texts: list[str], width: int) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, width, subsequent_indent="  ", break_on_hyphens=False, drop_whitespace=True
        )
    ]

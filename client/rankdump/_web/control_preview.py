"""Preview of an order: what it will do, shown before it is sent. Pure: the preview follows from the
order and the latest status, because daemons cannot try an order without carrying it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rankdump._analysis.reader.rank_tallies import RankTally, tally_ranks
from rankdump._config.control_changes import check_values
from rankdump._core.job_control import NO_ITERATIONS, ControlAction, ControlOrder
from rankdump._core.number_ranges import name_ranks, ranges
from rankdump._core.status import SessionState, SessionStatus, StatusView
from rankdump._core.units import format_count
from rankdump._web.page_kinds import AbsentPageError


class PreviewLine(NamedTuple):
    """A sentence of a preview, with the question that it answers."""

    title: str
    text: str


class OrderPreview(NamedTuple):
    """Description of what an order will do."""

    button: str
    lines: tuple[PreviewLine, ...]
    warnings: tuple[str, ...]
    """Sentences about surprising effects of the order."""


_BUTTONS = {
    ControlAction.START: "Dump every iteration",
    ControlAction.STOP: "Stop dumping",
    ControlAction.ITERATIONS: "Change the iterations",
    ControlAction.OPERATORS: "Change the operators",
    ControlAction.SAVED_DATA: "Change what is kept",
    ControlAction.FREEZE: "Freeze the black boxes",
}
_SAVED_WORDS = {
    "tensor": "their elements",
    "statistic": "their statistics",
    "full": "their elements and their statistics",
}


def select_job(view: StatusView, job_id: str) -> tuple[RankTally, ...]:
    """Return the ranks of a job in their last attempt; AbsentPageError for an unknown job."""
    tallies = tally_ranks(view)
    found = tuple(each for each in tallies if each.job_id == job_id and not each.is_followed)
    if not found:
        known = ", ".join(sorted({each.job_id for each in tallies})) or "none"
        raise AbsentPageError(f"no job {job_id[:200]!r}; known: {known[:1000]}")
    return found


def preview_order(view: StatusView, order: ControlOrder) -> OrderPreview:
    """Return the preview of an order.

    ConfigError for values that are not allowed, AbsentPageError for an unknown job.
    """
    warnings: list[str] = []
    check_values(order.action, order.values, warnings.append)
    tallies = select_job(view, order.job_id)
    is_freeze = order.action is ControlAction.FREEZE
    lines = (
        PreviewLine("effect", _describe_effect(order)),
        PreviewLine("ranks", _describe_ranks(tallies)),
        PreviewLine("iteration", _describe_iteration(tallies, is_freeze=is_freeze)),
        PreviewLine("written", _describe_place(view, tallies, is_freeze=is_freeze)),
        *(() if is_freeze else (PreviewLine("now", text) for text in describe_plans(tallies))),
    )
    return OrderPreview(_BUTTONS[order.action], lines, tuple(warnings))


def _describe_effect(order: ControlOrder) -> str:
    if order.action is ControlAction.FREEZE:
        why = f"; the report says why: {order.values[0]}" if order.values else ""
        return (
            "the latest steps of each rank, which its agent has in memory, become a frozen tree"
            f"{why}"
        )
    if order.action is ControlAction.START:
        return "every iteration is dumped, whatever the configuration or the script says"
    if order.action is ControlAction.STOP:
        return "no iteration is dumped; what is stored stays"
    if order.action is ControlAction.ITERATIONS:
        return f"iterations {order.values[0]} are dumped, in place of those of now"
    if order.action is ControlAction.SAVED_DATA:
        return f"of the tensors that are dumped, {_SAVED_WORDS[order.values[0]]} are kept"
    if order.values == ("all",):
        return "tensors of all operators are dumped, in all models"
    return f"tensors of operators {', '.join(order.values)} are dumped, in all models"


def _describe_ranks(tallies: Sequence[RankTally]) -> str:
    running = [each.rank for each in tallies if each.state == SessionState.OPEN.value]
    others = [each.rank for each in tallies if each.state != SessionState.OPEN.value]
    if not running:
        return f"none is running: {name_ranks(others)} ended, so the request may be refused"
    rest = f"; {name_ranks(others)} ended and cannot answer" if others else ""
    return f"all that run: {ranges(running)} ({format_count(len(running), 'rank')}){rest}"


def _describe_iteration(tallies: Sequence[RankTally], *, is_freeze: bool) -> str:
    numbers = [each.iteration for tally in tallies for each in tally.iterations]
    numbers += [tally.wait.iteration for tally in tallies if tally.wait]
    last = f"; the latest that is known here is {max(numbers)}" if numbers else ""
    if is_freeze:
        return f"the newest one of which there are steps{last}"
    return (
        "the same one for all ranks, which the coordinator chooses a second or more ahead of them, "
        f"and the answer names{last}"
    )


def _describe_place(view: StatusView, tallies: Sequence[RankTally], *, is_freeze: bool) -> str:
    roots = ", ".join(_list_roots(view, tallies)) or "the tree of the job"
    if is_freeze:
        return f"a new folder blackbox/<iteration> in {roots}, on each host; plans do not change"
    return f"from then on into {roots}, as before; nothing is removed there"


def _list_roots(view: StatusView, tallies: Sequence[RankTally]) -> Iterator[str]:
    """Yield the trees that may belong to a job, because a view does not tell which tree belongs to
    which job.
    """
    jobs = {each.job_id for each in view.sessions}
    if len(jobs) == 1 or not view.needs:
        yield from view.roots
        return
    own = {need.root for need in view.needs if need.job_id == tallies[0].job_id}
    yield from sorted(own) or view.roots


def describe_plans(tallies: Sequence[RankTally]) -> tuple[str, ...]:
    """Return one sentence for each plan about the running ranks that dump by it."""
    by_text: dict[str, list[int]] = {}
    for tally in tallies:
        if tally.state == SessionState.OPEN.value:
            by_text.setdefault(_describe_plan(tally.sessions[-1]), []).append(tally.rank)
    return tuple(f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items())


def _describe_plan(session: SessionStatus) -> str:
    if session.selected == NO_ITERATIONS.text:
        return "no iteration"
    which = "every iteration" if session.selected == "all" else f"iterations {session.selected}"
    return f"{which} of operators {session.operators or 'all'}, as {session.saved_data or 'tensor'}"

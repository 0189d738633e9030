"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump.contract.addresses import DEFAULT_AGENT
from rankdump.contract.iterations import idle_segments, parse_iterations
from rankdump.contract.key import Side
from rankdump.contract.plan import Iterations
from rankdump.reader import Query

if TYPE_CHECKING:
    from rankdump.wire.channel import Credentials

_BRACKETS = re.compile(r"\[!?\]?[^\]]*\]")
"""Classes of characters in a glob, as fnmatch reads them."""
DEFAULT_COORDINATOR = "127.0.0.1:7421"
"""Where a coordinator answers unless RANKDUMP_COORDINATOR says otherwise."""
TREE = click.Path(exists=True, file_okay=False, path_type=Path)
"""A dump tree: the folder that holds `rank_0`, a time or a device and its like."""


def iterations_of(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> Iterations | None:
    """Return the iterations an option means; a usage error says what is allowed.

    A configuration may hold segments that match nothing; who types one made a mistake.
    """
    if text is None:
        return None
    iterations = parse_iterations(text)
    idle = idle_segments(text)
    if iterations is None or idle:
        why = ", ".join(f"{segment!r} {reason}" for segment, reason in idle.items())
        raise click.BadParameter(
            f"{text!r} is not allowed{f': {why}' if iterations else ''}; "
            'allowed: "all", or numbers and ranges joined by "|", such as "0|2-3"',
            context,
            parameter,
        )
    return iterations


def glob_of(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Return the glob an option means; a usage error says where it has an open bracket."""
    if text is not None and "[" in _BRACKETS.sub("", text):
        raise click.BadParameter(
            f"{text!r} is no glob: a [ has no ] behind it; "
            "allowed: *, ?, [abc], [!abc], and [[] for a [ itself",
            context,
            parameter,
        )
    return text


def pattern_of(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> re.Pattern[str] | None:
    """Return the expression an option means; a usage error says where it is wrong."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"{text!r} is no expression: {error}", context, parameter
        ) from None


_SELECTION: Mapping[str, Callable[[Callable[..., int]], Callable[..., int]]] = {
    "rank": click.option("--rank", type=click.IntRange(min=0), help="Only this rank."),
    "graph": click.option("--graph", type=click.IntRange(min=0), help="Only this graph."),
    "iterations": click.option(
        "--iteration", "iterations", callback=iterations_of, help='Only these, as "0|2-3".'
    ),
    "op": click.option(
        "--op",
        "--operator",
        "op",
        metavar="GLOB",
        callback=glob_of,
        help="Only operators whose name or type matches.",
    ),
    "op_regex": click.option(
        "--op-regex",
        metavar="REGEX",
        callback=pattern_of,
        help="Only operators in whose name it is found.",
    ),
    "job_id": click.option("--job", "job_id", metavar="ID", default="", help="Only this job."),
    "side": click.option("--side", type=click.Choice(["input", "output"]), help="Only this side."),
}
FILTER_HINT = "--rank, --graph, --iteration, --op, --op-regex, --job, --side select"


def selection(command: Callable[..., int], *, without: str = "") -> Callable[..., int]:
    """Give a command the options that select tensors, or all of them but one."""
    for name, option in reversed(tuple(_SELECTION.items())):
        command = command if name == without else option(command)
    return command


def selecting(command: Callable[..., int], *, without: str = "") -> Callable[..., int]:
    """Give a command those options; it gets them as one `query`, and the job as `job_id`."""

    @wraps(command)
    def with_query(
        *,
        rank: int | None,
        graph: int | None,
        iterations: Iterations | None,
        op: str | None,
        op_regex: re.Pattern[str] | None,
        side: str | None = None,
        **others: object,
    ) -> int:
        query = Query(
            rank=rank,
            graph=graph,
            iterations=iterations,
            glob=op,
            pattern=op_regex,
            side=Side(side) if side else None,
        )
        return command(query=query, **others)

    return selection(with_query, without=without)


def selecting_operators(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that make sense where operators have no sides."""
    return selecting(command, without="side")


def agent_address(given: str | None) -> str:
    """Return the agent's address: the option's, else the environment's, else the usual one."""
    return given or os.environ.get("RANKDUMP_AGENT") or DEFAULT_AGENT


def coordinator_address(given: str | None) -> str:
    """Return the coordinator's address: the option's, the environment's or the usual one."""
    return given or os.environ.get("RANKDUMP_COORDINATOR") or DEFAULT_COORDINATOR


def credentials() -> Credentials:
    """Return the certificates that the environment names; none are needed on this host."""
    # Only who asks a daemon needs gRPC, which takes longer to load than most commands to answer.
    from rankdump.wire.channel import credentials_in

    return credentials_in(os.environ)

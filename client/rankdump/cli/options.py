"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump.contract.addresses import DEFAULT_AGENT
from rankdump.contract.iterations import parse_iterations
from rankdump.contract.key import Side
from rankdump.contract.plan import Iterations
from rankdump.reader import Query

if TYPE_CHECKING:
    from rankdump.wire.channel import Credentials

DEFAULT_COORDINATOR = "127.0.0.1:7421"
"""Where a coordinator answers unless RANKDUMP_COORDINATOR says otherwise."""
TREE = click.Path(exists=True, file_okay=False, path_type=Path)
"""A dump tree: the folder that holds `rank_0`, a time or a device and its like."""


def iterations_of(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> Iterations | None:
    """Return the iterations an option means; a usage error says what is allowed."""
    if text is None:
        return None
    iterations = parse_iterations(text)
    if iterations is None:
        raise click.BadParameter(
            f'{text!r} is not allowed; allowed: "all", or numbers and ranges joined by "|", '
            'such as "0|2-3"',
            context,
            parameter,
        )
    return iterations


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


_FILTERS = (
    click.option("--rank", type=click.IntRange(min=0), help="Only this rank."),
    click.option("--graph", type=click.IntRange(min=0), help="Only this graph."),
    click.option(
        "--iteration", "iterations", callback=iterations_of, help='Only these, as "0|2-3".'
    ),
    click.option("--op", metavar="GLOB", help="Only operators whose name or type matches."),
    click.option(
        "--op-regex",
        metavar="REGEX",
        callback=pattern_of,
        help="Only operators in whose name it is found.",
    ),
    click.option("--side", type=click.Choice(["input", "output"]), help="Only this side."),
)
FILTER_HINT = "--rank, --graph, --iteration, --op, --op-regex, --side select"


def selecting(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that select tensors; it gets them as one `query`."""

    @wraps(command)
    def with_query(
        *,
        rank: int | None,
        graph: int | None,
        iterations: Iterations | None,
        op: str | None,
        op_regex: re.Pattern[str] | None,
        side: str | None,
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

    chosen: Callable[..., int] = with_query
    for option in reversed(_FILTERS):
        chosen = option(chosen)
    return chosen


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

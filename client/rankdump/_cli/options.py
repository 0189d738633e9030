"""Arguments and options that several commands share: selection of tensors, trees, addresses of
daemons, and credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump._analysis.reader.query import Query
from rankdump._core.daemon_endpoint import DEFAULT_AGENT_ADDRESS, DEFAULT_COORDINATOR_ADDRESS
from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorSide
from rankdump._core.selection import find_idle_segments, parse_iterations

if TYPE_CHECKING:
    from rankdump._wire.channel import TlsCredentials

_GLOB_BRACKETS = re.compile(r"\[!?\]?[^\]]*\]")
"""Matches character classes in a glob, as fnmatch reads them."""
TREE_PATH = click.Path(exists=True, file_okay=False, path_type=Path)
"""A dump tree: the folder that contains the folders of ranks, times or devices."""
DUMP_PATH = click.Path(exists=True, path_type=Path)
"""A dump tree, or a dump of another tool, which may be a single file."""

FILTER_HINT = "--rank, --graph, --iteration, --op, --op-regex, --job, --attempt, --side select"


def parse_iterations_option(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> IterationSelection | None:
    """Return the iterations that an option selects; BadParameter for text that is not allowed.

    Segments that match nothing are rejected, although a configuration may contain them.
    """
    if text is None:
        return None
    iterations = parse_iterations(text)
    idle = find_idle_segments(text)
    if iterations is None or idle:
        why = ", ".join(f"{segment!r} {reason}" for segment, reason in idle.items())
        raise click.BadParameter(
            f"{text!r} is not allowed{f': {why}' if iterations else ''}; "
            'allowed: "all", or numbers and ranges joined by "|", such as "0|2-3"',
            context,
            parameter,
        )
    return iterations


def parse_glob_option(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> str | None:
    """Return the glob of an option; BadParameter for a bracket that is not closed."""
    if text is not None and "[" in _GLOB_BRACKETS.sub("", text):
        raise click.BadParameter(
            f"{text!r} is not a glob: a [ has no ] after it; "
            "allowed: *, ?, [abc], [!abc], and [[] for a [ itself",
            context,
            parameter,
        )
    return text


def parse_pattern_option(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> re.Pattern[str] | None:
    """Return the regular expression of an option; BadParameter if it is not valid."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"{text!r} is not a regular expression: {error}", context, parameter
        ) from None


SELECTION_OPTIONS: Mapping[str, Callable[[Callable[..., int]], Callable[..., int]]] = {
    "rank": click.option("--rank", type=click.IntRange(min=0), help="Only this rank."),
    "graph": click.option("--graph", type=click.IntRange(min=0), help="Only this graph."),
    "iterations": click.option(
        "--iteration",
        "iterations",
        callback=parse_iterations_option,
        help='Only these iterations, such as "0|2-3".',
    ),
    "op": click.option(
        "--op",
        "--operator",
        "op",
        metavar="GLOB",
        callback=parse_glob_option,
        help="Only operators whose name or type matches this glob.",
    ),
    "op_regex": click.option(
        "--op-regex",
        metavar="REGEX",
        callback=parse_pattern_option,
        help="Only operators whose name contains a match of this expression.",
    ),
    "job_id": click.option("--job", "job_id", metavar="ID", default="", help="Only this job."),
    "attempt": click.option(
        "--attempt",
        type=click.IntRange(min=0),
        help="Only this attempt of a job that was restarted.",
    ),
    "side": click.option(
        "--side", type=click.Choice(["input", "output"]), help="Only inputs, or only outputs."
    ),
}
"""Options that select tensors, by the name of the parameter in commands."""


def add_selection_options(command: Callable[..., int], *, without: str = "") -> Callable[..., int]:
    """Add the options that select tensors to a command; `without` names one that is left out."""
    for name, option in reversed(tuple(SELECTION_OPTIONS.items())):
        command = command if name == without else option(command)
    return command


def add_query_options(command: Callable[..., int], *, without: str = "") -> Callable[..., int]:
    """Add the options that select tensors to a command, which gets them as `query` and `job_id`."""

    @wraps(command)
    def with_query(
        *,
        rank: int | None,
        graph: int | None,
        iterations: IterationSelection | None,
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
            side=TensorSide(side) if side else None,
        )
        return command(query=query, **others)

    return add_selection_options(with_query, without=without)


def add_operator_query_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that select operators to a command; operators have no sides."""
    return add_query_options(command, without="side")


def resolve_agent_address(given: str | None) -> str:
    """Return the agent's address: from the option, the environment or the default."""
    return given or os.environ.get("RANKDUMP_AGENT") or DEFAULT_AGENT_ADDRESS


def resolve_coordinator_address(given: str | None) -> str:
    """Return the coordinator's address: from the option, the environment or the default."""
    return given or os.environ.get("RANKDUMP_COORDINATOR") or DEFAULT_COORDINATOR_ADDRESS


def load_credentials() -> TlsCredentials:
    """Return the certificates that the environment names; none are needed on this host."""
    # Imported on use, because loading gRPC takes longer than most commands.
    from rankdump._wire.channel import read_credentials

    return read_credentials(os.environ)

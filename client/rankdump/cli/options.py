"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rankdump.contract.dialect.iterations import parse_iterations
from rankdump.contract.plan import Iterations
from rankdump.identity import DEFAULT_AGENT

TREE = click.Path(exists=True, file_okay=False, path_type=Path)
"""A dump tree: the folder that holds `rank_0` and its like."""


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


def agent_address(given: str | None) -> str:
    """Return the agent's address: the option's, else the environment's, else the usual one."""
    return given or os.environ.get("RANKDUMP_AGENT") or DEFAULT_AGENT

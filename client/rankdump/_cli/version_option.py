"""The option `--version` of both commands: the release, and the kernels that this process uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

import rankdump


def add_version_option(program: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that adds the option to a command."""

    def print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            # Loading the kernels takes longer than all else, where they are numpy's.
            from rankdump._kernels.kernel_functions import KERNELS

            click.echo(f"{program}, version {rankdump.__version__}")
            click.echo(f"kernels: {KERNELS.description}")
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_version,
        help="Show the version and exit.",
    )

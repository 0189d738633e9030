"""Modules of extras: one line names the extra of a missing one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click


@contextmanager
def explain_missing_modules(extra: str) -> Generator[None, None, None]:
    """Turn the absence of a module into a line that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("rankdump", "rankdumpd"):
            raise
        raise click.ClickException(
            f"module {error.name} is missing; install it with: pip install 'rankdump[{extra}]'"
        ) from None

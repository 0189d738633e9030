"""The group of all commands, and the one place where an error becomes a line and a code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from rankdump.cli.config import config
from rankdump.cli.convert import convert
from rankdump.cli.diff import diff
from rankdump.cli.find_source import find_source
from rankdump.cli.hints import hints
from rankdump.cli.ingest import ingest
from rankdump.cli.ls import ls
from rankdump.cli.order import order
from rankdump.cli.overflow import overflow
from rankdump.cli.run import run
from rankdump.cli.show import show
from rankdump.cli.stats import stats
from rankdump.cli.status import status
from rankdump.contract.errors import ConfigError, RankdumpError, UnavailableError

DONE, WRONG, BAD_USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankdump")
@click.pass_context
def rankdump(context: click.Context) -> int:
    """Collect and read what every operator of every rank read and wrote."""
    if context.invoked_subcommand is not None:
        return DONE
    click.echo(context.get_help(), err=True)
    return BAD_USAGE


_COMMANDS = (
    run,
    status,
    ls,
    show,
    stats,
    find_source,
    order,
    hints,
    overflow,
    diff,
    convert,
    ingest,
    config,
)
for command in _COMMANDS:
    rankdump.add_command(command)


def answer(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code, every error said in one line on stderr."""
    try:
        # Not rankdump.main(): that one has codes and words of its own for what is caught below.
        with rankdump.make_context("rankdump", list(arguments)) as context:
            code = rankdump.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has seen enough; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (click.ClickException, RankdumpError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("rankdump: " + " ".join(text.split()), err=True)
        return _code_of(error)


def _code_of(error: Exception) -> int:
    if isinstance(error, click.ClickException | ConfigError):
        return BAD_USAGE
    return UNREACHABLE if isinstance(error, UnavailableError) else WRONG

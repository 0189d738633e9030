"""Group of all commands. It turns an error into one line on stderr and an exit code, and imports
the module of a command when that command is used.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from rankdump import __version__
from rankdump.errors import ConfigError, QueryError, RankdumpError, UnavailableError

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

COMMAND_NAMES = (
    "card",
    "config",
    "control",
    "convert",
    "diff",
    "faults",
    "find-source",
    "forecast",
    "freeze",
    "fsck",
    "hints",
    "index",
    "ingest",
    "ls",
    "order",
    "overflow",
    "pin",
    "plot",
    "query",
    "replay",
    "run",
    "show",
    "stats",
    "status",
    "unpin",
    "web",
)
"""Names of all commands; each is also the name of a module in this package, unless
`_MODULE_OF_COMMAND` names another.
"""
_MODULE_OF_COMMAND = {"freeze": "control", "pin": "control", "unpin": "control"}


class _LazyCommandGroup(click.Group):
    """Group that imports a command on use, because importing all commands takes some tenths of a
    second.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMAND_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name; None when there is no such command."""
        if cmd_name not in COMMAND_NAMES:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"rankdump._cli.{_MODULE_OF_COMMAND.get(name, name)}")
        return getattr(module, name)


def add_version_option(program: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the option `--version`, which prints the release, and the
    kernels that this process uses.
    """

    def print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            # Imported on use: if the kernels are those in numpy, loading them takes longer than
            # everything else.
            from rankdump._kernels.kernel_functions import KERNELS

            click.echo(f"{program}, version {__version__}")
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


@click.group(
    cls=_LazyCommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@add_version_option("rankdump")
@click.pass_context
def rankdump(context: click.Context) -> int:
    """Collect and inspect the inputs and outputs of every operator on every rank."""
    if context.invoked_subcommand is not None:
        return EXIT_OK
    click.echo(context.get_help(), err=True)
    return EXIT_USAGE


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are one line on stderr."""
    try:
        # `rankdump.main()` is not used, because it has its own exit codes and texts for the errors
        # that are caught below.
        with rankdump.make_context("rankdump", list(arguments)) as context:
            code = rankdump.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()  # the reader of the output closed the pipe
        return EXIT_OK
    except OSError as error:
        fault = _find_output_fault(error)
        if not fault:
            raise
        _discard_output()
        click.echo(f"rankdump: the output cannot be written: {fault}", err=True)
        return EXIT_FAILURE
    except (click.ClickException, RankdumpError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("rankdump: " + " ".join(text.split()), err=True)
        return _exit_code_of(error)


def _discard_output() -> None:
    """Discard the remaining output, which the interpreter would try to write at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _find_output_fault(error: OSError) -> str:
    """Return why writing to standard output fails; empty if the error has another cause."""
    if isinstance(error, io.UnsupportedOperation):
        return "" if sys.stdout.writable() else "standard output is closed"
    try:
        # This tries to write the remaining output again; a stream without a buffer has nothing
        # left.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        return again.strerror or str(again)
    return ""


def _exit_code_of(error: Exception) -> int:
    if isinstance(error, click.ClickException | ConfigError | QueryError):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if isinstance(error, UnavailableError) else EXIT_FAILURE


@contextmanager
def explain_missing_modules(extra: str) -> Generator[None, None, None]:
    """Turn a module that is missing or cannot be imported into one line that says what to do."""
    try:
        yield
    except ImportError as error:
        is_missing, package = isinstance(error, ModuleNotFoundError), error.name or ""
        if (is_missing and not package) or package.partition(".")[0] in ("rankdump", "rankdumpd"):
            raise
        if not is_missing:
            # As with a pyarrow that needs a later NumPy than the framework of the job allows.
            raise click.ClickException(
                f"the extra rankdump[{extra}] is installed, but cannot be imported: {error}"
            ) from None
        raise click.ClickException(
            f"module {error.name} is missing; install it with: pip install 'rankdump[{extra}]'"
        ) from None

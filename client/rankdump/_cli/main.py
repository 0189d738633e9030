"""Entry point of `rankdump`. It imports the commands only when it is called, and prints one line
with the missing module if the extra `cli` is not installed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from rankdump._core.pandas_blocker import leave_pandas_out

_EXTRA_MODULES = ("click", "rich")


def main() -> None:
    """Run the command line and end the process with its exit code."""
    if sys.stdout is None:
        # Writing to this stream raises an error, as with a full disk, and no other file gets the
        # number of the closed standard output.
        sys.stdout = Path(os.devnull).open()  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        # A tree may contain names that are not valid text or that the terminal cannot show.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    leave_pandas_out()
    try:
        from rankdump._cli.command_group import run_command_line

        sys.exit(run_command_line(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA_MODULES:
            raise
        sys.stderr.write(
            f"rankdump: module {error.name} is missing; install it with: "
            "pip install 'rankdump[cli]'\n"
        )
        sys.exit(2)

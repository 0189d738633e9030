"""Entry point of `rankdump`; says in one line what is missing when its extra is not installed."""

from __future__ import annotations

import io
import sys

_EXTRA = ("click", "rich")


def main() -> None:
    """Run the command line and end the process with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A tree may hold names that are no text, or none of the terminal's.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        from rankdump.cli.commands import answer

        sys.exit(answer(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(
            f"rankdump: module {error.name} is missing; install it with: "
            "pip install 'rankdump[cli]'\n"
        )
        sys.exit(2)

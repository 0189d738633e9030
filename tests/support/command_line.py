"""Commands of `rankdump` in the process of the tests, for tests of what they print."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from rankdump._cli.command_group import run_command_line


def run_in_process(*arguments: object, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """Run one command line on a terminal of that width, as `subprocess.run` would.

    An interpreter for each command would take longer than the command. Not for commands that change
    their process: `query` limits its memory, and `run` and `ingest` handle signals.
    """
    words = [str(each) for each in arguments]
    out, err = io.StringIO(), io.StringIO()
    width = patch.dict("os.environ", COLUMNS=str(columns))
    with width, redirect_stdout(out), redirect_stderr(err):
        code = run_command_line(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

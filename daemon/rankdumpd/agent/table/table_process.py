"""Process that writes rows to the table of a tree at idle priority, and ends. pyarrow, which takes
60 MB, and the rows of a window live in it, so the agent has no object for a row.

A thread of the agent would not do: while one of idle priority waits for a core, it may hold the
interpreter's lock, for which all others wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump.errors import RankdumpError
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.server import machine, state_files


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A tree, as its plan describes it, and manifests whose rows have changed."""

    root: str
    file_mode: int
    folder_mode: int
    is_synced: bool
    manifests: Sequence[tuple[str, int, int]]
    """Path below the root, rank, iteration."""

    def open_tree(self) -> DumpTree:
        """Return access to the tree."""
        return DumpTree(
            self.root,
            file_mode=self.file_mode,
            folder_mode=self.folder_mode,
            synced=self.is_synced,
        )


@dataclass(frozen=True, slots=True)
class TableAnswer:
    """What the process has done."""

    rows: int = 0
    problems: Sequence[str] = ()
    """Damaged manifests, which have no rows."""
    error: str = ""
    """Why nothing was written and the request is to be repeated; empty when it was."""


class TableProcess:
    """The process of one request; `kill` may be called from another thread."""

    def __init__(self, *, is_idle: bool) -> None:
        """Start it; OSError where that fails. `is_idle` gives it a core that nobody else wants."""
        # A session of its own: signals from a terminal are for the agent.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["idle"] if is_idle else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",  # `-m` looks for modules there first
            start_new_session=True,
            text=True,
        )

    def write(self, request: TableRequest) -> TableAnswer:
        """Return what was done for a request; it may be repeated after any error."""
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answer is not None
        line = ""
        with contextlib.suppress(OSError):
            ask.write(json.dumps(asdict(request)) + "\n")
            ask.flush()
            line = answer.readline()
        if not line.endswith("\n"):
            return TableAnswer(error=f"its process has ended: code {self._process.wait()}")
        return TableAnswer(**json.loads(line))

    def kill(self) -> None:
        """End it, also while it writes; may be repeated."""
        self._process.kill()

    def close(self) -> None:
        """End it and close the channels."""
        self.kill()
        self._process.wait()
        for channel in (self._process.stdin, self._process.stdout):
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.close()


def write_rows(request: TableRequest) -> TableAnswer:
    """Write the rows of a request."""
    try:
        from rankdump._analysis.table_update import ChangedManifest, update_table
    except ImportError as error:
        # Installed, but not fit, such as one that needs another NumPy than the job's framework.
        return TableAnswer(error=f"pyarrow cannot be imported: {error}")
    manifests = [ChangedManifest(*each) for each in request.manifests]
    try:
        report = update_table(request.open_tree(), manifests, now_s=time.time())
    except (OSError, RankdumpError) as error:
        return TableAnswer(
            error=state_files.describe_error(error).removeprefix(f"{request.root}: ")
        )
    return TableAnswer(report.rows, report.problems)


def _end_with_agent(channel: TextIO) -> None:
    """End this process when the agent does, whose end of the channel closes then."""
    channel.read(1)
    os._exit(1)


def main() -> None:
    """Answer the one request on standard input."""
    if "idle" in sys.argv[1:]:
        machine.become_idle()
    leave_pandas_out()
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_agent, args=(sys.stdin,), daemon=True).start()
    answer = write_rows(TableRequest(**asked))
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    sys.stdout.flush()
    # Not an orderly end: the other thread is reading.
    os._exit(0)


if __name__ == "__main__":
    main()

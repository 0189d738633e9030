"""Process that writes rows to the table of a tree at idle priority, and ends. pyarrow, which takes
60 MB, and the rows of a window exist only in this process, so the agent has no object for a row.

This is not a thread of the agent: while a thread of idle priority waits for a core, it may hold the
interpreter's lock, for which all other threads wait.
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
    """A tree with the fields of its plan that describe it, and the manifests whose rows have
    changed.
    """

    root: str
    file_mode: int
    folder_mode: int
    is_synced: bool
    manifests: Sequence[tuple[str, int, int]]
    """Path below the root, rank and iteration of each manifest."""

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
    """Result of a request."""

    rows: int = 0
    problems: Sequence[str] = ()
    """One text for each damaged manifest, which gets no rows."""
    error: str = ""
    """Why nothing was written and the request has to be repeated; empty after success."""


class TableProcess:
    """The process for one request; `kill` may be called from another thread."""

    def __init__(self, *, is_idle: bool) -> None:
        """Start the process; OSError where that fails. With `is_idle` it runs only on cores that
        are otherwise idle.
        """
        # A new session, so that signals from a terminal reach the agent only.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["idle"] if is_idle else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",  # `-m` looks for modules here first
            start_new_session=True,
            text=True,
        )

    def write(self, request: TableRequest) -> TableAnswer:
        """Send a request and return the answer; the request may be repeated after any error."""
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
        """Kill the process, even while it writes; may be repeated."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close its channels."""
        self.kill()
        self._process.wait()
        for channel in (self._process.stdin, self._process.stdout):
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.close()


def write_rows(request: TableRequest) -> TableAnswer:
    """Write the rows of a request to the table; return the result."""
    try:
        from rankdump._analysis.table_update import ChangedManifest, update_table
    except ImportError as error:
        # pyarrow is installed but unfit: it may need another NumPy than the job's framework.
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
    """End this process when the agent ends, because the agent's end of the channel closes then."""
    channel.read(1)
    os._exit(1)


def main() -> None:
    """Read one request from standard input and write the answer."""
    if "idle" in sys.argv[1:]:
        machine.become_idle()
    leave_pandas_out()
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_agent, args=(sys.stdin,), daemon=True).start()
    answer = write_rows(TableRequest(**asked))
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    sys.stdout.flush()
    # The process ends without cleaning up, because its other thread is blocked in a read.
    os._exit(0)


if __name__ == "__main__":
    main()

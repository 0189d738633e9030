"""Command `rankdump ingest`: imports a dump that MindSpore or CANN wrote without rankdump. A
process of `rankdumpd` does the work; this process forwards signals and shows the progress.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rankdump._cli.output import print_json, print_lines
from rankdump._cli.signal_handlers import handle_signals
from rankdump._core.units import format_bytes, format_count

_PROGRESS_DELAY_S = 1.0
"""Seconds before a progress bar is shown, so that short imports show none."""


@click.command()
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--into",
    metavar="TREE",
    type=click.Path(path_type=Path),
    required=True,
    help="Tree to write to; it is created when it does not exist.",
)
@click.option("--follow", is_flag=True, help="Continue while the job runs, until Ctrl-C.")
@click.option(
    "--until-idle",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Like --follow, but stop after this many seconds without a new file.",
)
@click.option(
    "--delete-source", is_flag=True, help="Delete each source file once its copy is committed."
)
@click.option(
    "--codec",
    type=click.Choice(["none", "zstd"]),
    default="zstd",
    show_default=True,
    help="Compression of the files in the tree.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def ingest(
    source: Path,
    into: Path,
    follow: bool,
    until_idle: float | None,
    delete_source: bool,
    codec: str,
    as_json: bool,
) -> int:
    """Import a dump that MindSpore or CANN wrote to DIR.

    Files are compressed, or linked when the same tensor is stored already, and get manifests.
    Damaged and half-written files are reported and left where they are; the exit code is then 1.
    After an interruption, the same command continues the work.
    """
    # Absolute paths, because the child process has another working folder.
    command = [sys.executable, "-m", "rankdumpd", "ingest", str(source.absolute())]
    command += ["--into", str(into.absolute()), "--codec", codec, "--progress", "--until-eof"]
    command += ["--follow"] * follow + ["--delete-source"] * delete_source
    command += [] if until_idle is None else ["--until-idle", str(until_idle)]
    with _run_process(command) as process:
        assert process.stdout is not None
        last = _show_progress(map(json.loads, process.stdout))
        code = process.wait()
    if last is not None:
        _print_summary(into, last, as_json=as_json)
    return code if code >= 0 else 128 - code


@contextmanager
def _run_process(command: list[str]) -> Generator[subprocess.Popen[bytes], None, None]:
    """Run a process that receives our signals and does not run longer than this one."""
    # In a session of its own, the process does not get Ctrl-C from the terminal, which is forwarded
    # below. Its working folder is `/`, because `-m` looks for modules in it first.
    with subprocess.Popen(
        command,
        cwd="/",
        stdin=subprocess.PIPE,  # closed when this process ends in whatever way
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:

        def forward(number: int, _frame: FrameType | None) -> None:
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

        try:
            with handle_signals(forward):
                yield process
        finally:
            if process.poll() is None:
                process.kill()


class _IngestProgress:
    """Progress bar on a terminal, for imports that take long; lines are printed above the bar."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn()
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._begun_s, self._shown = time.monotonic(), False

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._console.print(text, markup=False, highlight=False)
        else:
            print_lines([text], err=True)

    def update_counts(self, counts: Mapping[str, int]) -> None:
        """Update the bar."""
        if not self._console.is_terminal or time.monotonic() - self._begun_s < _PROGRESS_DELAY_S:
            return
        if not self._shown:
            self._bar.start()
            self._shown = True
        done = counts["files"] + counts["skipped"] + counts["failed"]
        description = f"{format_count(done, 'file')}, {format_bytes(counts['bytes_in'])}"
        total = counts["found"] or None  # the total is unknown while the job runs
        self._bar.update(self._task, description=description, completed=done, total=total)

    def close(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._bar.stop()


def _show_progress(lines: Iterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Show the progress; return the last message, or None when the process sent none."""
    screen = _IngestProgress()
    try:
        for line in lines:
            if "done" in line:
                return line
            if "left" in line:
                screen.print_line(f"rankdump: left: {line['left']}")
            else:
                screen.update_counts(line["counts"])
    finally:
        screen.close()
    return None


def _print_summary(tree: Path, last: Mapping[str, Any], *, as_json: bool) -> None:
    counts: Mapping[str, int] = last["done"]
    if as_json:
        print_json({"tree": str(tree), "complete": last["whole"], **counts}, indent=None)
        return
    line = (
        f"{tree}: {format_count(counts['files'], 'file')} taken, "
        f"{format_bytes(counts['bytes_in'])} in, "
        f"{format_bytes(counts['bytes_stored'])} stored, {counts['linked']:,} linked, "
        f"{counts['skipped']:,} skipped, {counts['failed']:,} failed"
    )
    removed = f", {counts['removed']:,} removed from the source" if counts["removed"] else ""
    stopped = "" if last["whole"] else "; stopped before the end"
    print_lines([line + removed + stopped])

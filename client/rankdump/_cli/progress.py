"""Progress bar on a terminal for work that takes more than a second. A separate module, because
`rich.progress` takes long to import.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

_PROGRESS_DELAY_S = 1.0
"""Shorter work shows no bar."""


@contextmanager
def show_progress(what: str) -> Generator[Callable[[int, int], None], None, None]:
    """Yield a function that takes the number of finished items and the total."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    begun = time.monotonic()

    def report_progress(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        if time.monotonic() - begun > _PROGRESS_DELAY_S:
            progress.start()

    try:
        yield report_progress
    finally:
        progress.stop()

"""Base class of the observers of a model, which counts failures of our own, and the lines of the
user's program that run now. Knows no framework and never raises into the job.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import os
from pathlib import Path

from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, StartedEvent

_logger = logging.getLogger(__name__)

HOOK_FAILED = "hook_failed"
"""Reason of a tensor lost through an error of our own."""


class ModelObserver:
    """What the parts of an adapter share: the recorder, and the number of the graph."""

    def __init__(self, recorder: Recorder, graph: int) -> None:
        self.recorder = recorder
        self.graph = graph

    @property
    def armed(self) -> bool:
        """Whether this process records the running iteration; never in a forked worker."""
        return self.recorder.armed

    def is_selected(self, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        return self.recorder.is_wanted(self.graph, op_name, side)

    def start_event(self, op_name: str) -> StartedEvent:
        """Record the begin of an operator."""
        return self.recorder.start_event(graph=self.graph, name=op_name)

    def record_event(self, op_name: str) -> None:
        """Record an event without duration."""
        self.recorder.finish_event(self.start_event(op_name))

    def end_call(self, op_name: str, *, raised: bool = False) -> None:
        """Say that one call of an operator is over."""
        self.recorder.end_call(self.graph, op_name, raised=raised)

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        _logger.debug("a hook of rankdump failed", exc_info=error)
        kind = type(error).__name__
        self.recorder.warn_once(f"a hook of rankdump failed, data may be missing: {kind}: {error}")


MAX_SOURCE_LINES = 30
"""Frames kept, the innermost ones."""
_MAX_LINE_CHARACTERS = 1000
_RANKDUMP_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"


def capture_source_lines(*, besides: tuple[str, ...] = ()) -> tuple[SourceLine, ...]:
    """Return this thread's stack, outermost frame first.

    Frames of rankdump are left out, and those of files whose path begins as one of `besides`.
    """
    left_out = (_RANKDUMP_FOLDER, *besides)
    found: list[SourceLine] = []
    frame = inspect.currentframe()
    while frame is not None and len(found) < MAX_SOURCE_LINES:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(left_out):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            found.append(SourceLine(file, frame.f_lineno, name, text[:_MAX_LINE_CHARACTERS]))
        frame = frame.f_back
    return tuple(reversed(found))

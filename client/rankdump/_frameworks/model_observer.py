"""Base class of the observers of a model, the current call stack of the user's program, and the
checks of `set_dump`, for the adapters of all frameworks. Observers never raise into the job.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    ForwardPass,
    Recorder,
    StartedEvent,
    TensorObservation,
    TensorSource,
)
from rankdump._frameworks.operator_names import PARAMETER_TYPE

_logger = logging.getLogger(__name__)

HOOK_FAILED = "internal_error"
"""Drop reason of a tensor after an internal error of rankdump."""
BACKWARD_SIDE = {TensorSide.INPUT: TensorSide.OUTPUT, TensorSide.OUTPUT: TensorSide.INPUT}
"""Side of a gradient on a backward operator, by the side of the tensor on the forward operator:
gradients of outputs are inputs of the backward.
"""


class ModelObserver:
    """Observer of one attached model: its recorder and the number of its graph."""

    def __init__(self, recorder: Recorder, graph: int) -> None:
        self.recorder = recorder
        self.graph = graph
        self.is_hidden = False
        """Whether hooks that observe all iterations do nothing at present, because a step is
        repeated.
        """

    @property
    def armed(self) -> bool:
        """Whether this process records the running iteration; always False in a forked worker."""
        return self.recorder.armed

    def is_selected(self, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors on this side of an operator are kept in the running iteration."""
        return self.recorder.is_wanted(self.graph, op_name, side)

    def start_event(self, op_name: str) -> StartedEvent:
        """Record the start of an operator."""
        return self.recorder.start_event(graph=self.graph, name=op_name)

    def record_event(self, op_name: str) -> None:
        """Record an event without a duration."""
        self.recorder.record_event(graph=self.graph, name=op_name)

    def end_call(self, op_name: str, *, raised: bool = False) -> None:
        """Report that a call of an operator has ended."""
        self.recorder.end_call(self.graph, op_name, raised=raised)

    def record_tensor(
        self,
        op_type: str,
        op_name: str,
        side: TensorSide,
        slot: int,
        argument: str,
        read: Callable[[Any], TensorSource | str | None],
        value: object,
        *,
        state: bool = False,
        constant: bool = False,
        forward_pass: ForwardPass = UNDIVIDED_PASS,
    ) -> None:
        """Record the source that `read` returns; count a loss if it returns a reason.

        If `read` returns None, this rank has no part of the tensor.
        """
        place = (self.graph, op_type, op_name, side, slot)
        try:
            source = read(value)
            if isinstance(source, str):
                self.recorder.count_loss(*place, source)
            elif source is not None:
                # This equals `TensorObservation(...)` in a third of the time.
                fields = (*place, argument, source, state, constant, forward_pass)
                self.recorder.observe(tuple.__new__(TensorObservation, fields))
        except Exception as error:
            self.recorder.count_loss(*place, HOOK_FAILED)
            self.report_failure(error)

    def record_parameter(
        self,
        name: str,
        argument: str,
        read: Callable[[Any], TensorSource | str | None],
        tensor: object,
        *,
        state: bool = False,
        constant: bool = False,
    ) -> None:
        """Record a parameter, buffer or gradient as the only output of an operator with
        its name.
        """
        if self.is_selected(name, TensorSide.OUTPUT):
            self.record_tensor(
                PARAMETER_TYPE,
                name,
                TensorSide.OUTPUT,
                0,
                argument,
                read,
                tensor,
                state=state,
                constant=constant,
            )
            self.recorder.end_call(self.graph, name)

    def report_failure(self, error: Exception) -> None:
        """Report an error in a hook."""
        _logger.debug("a hook of rankdump failed", exc_info=error)
        kind = type(error).__name__
        self.recorder.warn_once(f"a hook of rankdump failed, data may be missing: {kind}: {error}")


def format_type(value: object) -> str:
    """Return the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def make_mark_target_error(target: object, allowed: str) -> ValueError:
    """Return the error for a target of `set_dump` that is not a model."""
    return ValueError(
        f"set_dump: target of type {format_type(target)} is not allowed; allowed: {allowed}"
    )


def check_mark_state(enabled: object) -> bool:
    """Return the argument `enabled` of `set_dump`; ValueError if it is not a bool."""
    if not isinstance(enabled, bool):
        raise ValueError(f"set_dump: enabled={enabled!r} is not allowed; allowed: True, False")
    return enabled


_MAX_ARGUMENT_CHARACTERS = 1024
_MAX_CONTAINER_PARTS = 64


def is_plain_value(
    value: object, types: tuple[type, ...], containers: tuple[type, ...], depth: int = 2
) -> bool:
    """Return whether an argument of a module prints the same text in every run: a short text, a
    value of one of `types`, or a small container of these.
    """
    if isinstance(value, str):
        return len(value) <= _MAX_ARGUMENT_CHARACTERS
    if not isinstance(value, containers):
        return isinstance(value, types)
    parts = cast("Sequence[object]", value)
    is_small = depth > 0 and len(parts) <= _MAX_CONTAINER_PARTS
    return is_small and all(is_plain_value(part, types, containers, depth - 1) for part in parts)


MAX_SOURCE_LINES = 30
"""Maximum number of frames that are kept, the innermost ones."""
_MAX_LINE_CHARACTERS = 1000
RANKDUMP_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"


def find_script_line(*, besides: tuple[str, ...] = ()) -> str:
    """Return `file:line` of the innermost frame of the user's program; empty if there is none.

    The same frames are left out as in `capture_source_lines`. No file is read.
    """
    left_out = (RANKDUMP_FOLDER, "<", *besides)
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(left_out):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def capture_source_lines(*, besides: tuple[str, ...] = ()) -> tuple[SourceLine, ...]:
    """Return the stack of the calling thread, outermost frame first.

    Frames of rankdump are left out, and frames of files whose path begins with one of `besides`.
    """
    left_out = (RANKDUMP_FOLDER, *besides)
    found: list[SourceLine] = []
    frame = inspect.currentframe()
    while frame is not None and len(found) < MAX_SOURCE_LINES:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(left_out):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            found.append(SourceLine(file, frame.f_lineno, name, text[:_MAX_LINE_CHARACTERS]))
        frame = frame.f_back
    return tuple(reversed(found))

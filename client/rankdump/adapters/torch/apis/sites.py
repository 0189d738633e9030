"""Tells from the frames above a call whose call it is, and where in the script it stands.

What torch calls for itself is no call of the user's: an optimizer's step, compiled code, the
wrappers of distributed training. All that is read of a code object is remembered, for the same
lines run in every step.
"""

from __future__ import annotations

import dis
import linecache
import os
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

_TORCH = f"{Path(str(torch.__file__)).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[3]}{os.sep}"
_FUNCTIONAL = str(functional.__file__)
_COMPILER = tuple(f"{_TORCH}{part}{os.sep}" for part in ("_dynamo", "_inductor", "_functorch"))
_OWN = tuple(f"{_TORCH}{part}" for part in (f"optim{os.sep}", f"distributed{os.sep}", "_ops.py"))
_GENERATED = ("<eval_with_key>", "<frozen ")
_INDUCTOR = "torchinductor_"
_OPERATORS = ("BINARY_", "INPLACE_", "COMPARE_", "UNARY_")
"""How instructions begin that call a method because an operator was written."""

_METHODS = f"{_TORCH}_tensor.py"
"""Its methods stand between an operator and the call it makes."""

MAX_LINES = 100
"""Frames of a stack that are kept, the innermost ones."""
_MAX_CHARACTERS = 1000
_REMEMBERED = 1 << 14


class Whose(Enum):
    """Whose code a frame runs."""

    USER = "user"
    TORCH = "torch"
    """It may run on behalf of the user: the frames above tell."""
    COMPILED = "compiled"
    NOBODY = "nobody"
    """What it calls is no call of the user's."""


class _Code(NamedTuple):
    """What is known of a code object, which stays alive: it is known by its identity."""

    code: CodeType
    whose: Whose
    shown: bool
    """In a stack."""
    function: str
    """Name of the function of `torch.nn.functional` that it is, if it is one."""


class Sites:
    """The places that calls come from; any thread may ask."""

    def __init__(self, *, filtered: bool) -> None:
        """`filtered` leaves torch's frames out of stacks as well as ours."""
        self._filtered = filtered
        self._codes: dict[int, _Code] = {}
        self._operators: dict[int, dict[int, str]] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._stacks: dict[tuple[int, ...], tuple[str, ...]] = {}

    def refilter(self, filtered: bool) -> None:
        """Leave torch's frames out of stacks from now on, or no longer."""
        if filtered != self._filtered:
            self._filtered = filtered
            self.forget()

    def whose(self, frame: FrameType | None) -> Whose:
        """Return whose call it is that a frame makes."""
        while frame is not None:
            whose = self._code(frame).whose
            if whose is not Whose.TORCH:
                return whose
            frame = frame.f_back
        return Whose.USER

    def function(self, frame: FrameType) -> str:
        """Return the function of `torch.nn.functional` that a frame runs; empty for other code."""
        return self._code(frame).function

    def operator(self, frame: FrameType, other: object) -> bool | None:
        """Return whether a call is an operator that was written in the frame; None if it is not.

        True for one whose left side is `other`, which is no tensor.
        """
        if frame.f_code.co_filename == _METHODS and frame.f_back is not None:
            frame = frame.f_back
        code = self._code(frame).code
        known = self._operators.get(id(code))
        if known is None:
            known = self._operators[id(code)] = _operators_of(code)
        right = known.get(frame.f_lasti)
        if right is None:
            return None
        if not right or isinstance(other, Tensor):
            return False
        return isinstance(frame.f_locals.get(right), Tensor)

    def stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a stack, innermost first, as the stack file has them."""
        shown: list[tuple[FrameType, _Code]] = []
        key: list[int] = []
        while frame is not None and len(shown) < MAX_LINES:
            code = self._code(frame)
            if code.shown:
                shown.append((frame, code))
                key += (id(code.code), frame.f_lasti)
            frame = frame.f_back
        known = self._stacks.get(tuple(key))
        if known is None:
            known = tuple(self._line(each, code) for each, code in shown)
            self._stacks[tuple(key)] = known
        return known

    def _code(self, frame: FrameType) -> _Code:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _REMEMBERED:
                # All that is known by the identity of a code object goes with the object.
                self.forget()
            known = self._codes[id(code)] = _read(frame, filtered=self._filtered)
        return known

    def forget(self) -> None:
        """Know nothing any more."""
        self._stacks.clear()
        self._lines.clear()
        self._operators.clear()
        self._codes.clear()

    def _line(self, frame: FrameType, code: _Code) -> str:
        place = (id(code.code), frame.f_lasti)
        known = self._lines.get(place)
        if known is None:
            file, name, line = code.code.co_filename, code.code.co_name, frame.f_lineno
            text = linecache.getline(file, line, frame.f_globals).strip()
            # Code without a source has no line to show.
            shown = f" {text[:_MAX_CHARACTERS]}" if text else ""
            known = self._lines[place] = f"File {file}, line {line}, in {name}, \n{shown}"
        return known


def _read(frame: FrameType, *, filtered: bool) -> _Code:
    code = frame.f_code
    file = code.co_filename
    generated = file.startswith(_GENERATED) or _INDUCTOR in file
    if file.startswith(_COMPILER):
        whose = Whose.COMPILED
    elif file.startswith(_OWN):
        whose = Whose.NOBODY
    elif generated or file.startswith((_TORCH, _OURS)):
        whose = Whose.TORCH
    else:
        # An optimizer that is not torch's own steps as one that is.
        steps = isinstance(frame.f_locals.get("self"), Optimizer)
        whose = Whose.NOBODY if steps else Whose.USER
    shown = not file.startswith((_TORCH, _OURS, *_GENERATED) if filtered else _OURS)
    return _Code(code, whose, shown, code.co_name if file == _FUNCTIONAL else "")


def _operators_of(code: CodeType) -> dict[int, str]:
    """Return where a code object has operators, and which local variable is right of each.

    Empty text for anything else there.
    """
    found: dict[int, str] = {}
    right = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(_OPERATORS):
            found[instruction.offset] = right
        local = instruction.opname.startswith("LOAD_FAST")
        # Of two that are loaded at once the last one is on the right.
        right = instruction.argrepr.rpartition(", ")[2] if local else ""
    return found

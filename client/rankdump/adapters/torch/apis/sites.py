"""Tells from the frames above a call whose call it is, and where in the script it stands.

What torch calls for itself is no call of the user's: what compiled code is made of, the wrappers
of distributed training, an optimizer around its closure. All that is read of a code object is
remembered, for the same lines run in every step.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.nn import functional

from rankdump.adapters.api_stacks import Stacks
from rankdump.adapters.torch import dropping, internals, modules
from rankdump.adapters.torch.apis.operators import written


class Whose(Enum):
    """Whose code a frame runs."""

    USER = "user"
    TORCH = "torch"
    """It may run on behalf of the user: the frames above tell."""
    GENERATED = "generated"
    """It was made of a graph: by the compiler, or by the user."""
    COMPILER = "compiler"
    COMPILED = "compiled"
    NOBODY = "nobody"
    """What it calls is no call of the user's."""


_TORCH = f"{Path(str(torch.__file__)).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[3]}{os.sep}"
_FUNCTIONAL = str(functional.__file__)
_PASSED = (
    f"{Path(__file__).parent}{os.sep}",
    *(str(module.__file__) for module in (dropping, internals, modules)),
)
"""Our own code that the script's calls pass through."""
_GRAPH = "<eval_with_key>"
_IMPORTS = "<frozen "
_INDUCTOR = "torchinductor_"
_COMPILED = ("_inductor", "_functorch/_aot_autograd", "_functorch/aot_autograd.py")
"""What runs compiled code; what compiled code calls stands right below it."""
_WHOSE = (
    (_GRAPH, Whose.GENERATED),
    ((*_PASSED, _IMPORTS), Whose.TORCH),
    (_OURS, Whose.NOBODY),
    (tuple(f"{_TORCH}{part.replace('/', os.sep)}" for part in _COMPILED), Whose.COMPILED),
    (f"{_TORCH}_dynamo{os.sep}", Whose.COMPILER),
    (tuple(f"{_TORCH}{part}{os.sep}" for part in ("optim", "distributed")), Whose.NOBODY),
    (_TORCH, Whose.TORCH),
)
"""By the file that code stands in; the first that fits counts, all other code is the user's."""
_BETWEEN = (f"{_TORCH}_tensor.py", f"{_TORCH}overrides.py")
"""What may stand between an operator and the method that it calls."""

_REMEMBERED = 1 << 14


class _Code(NamedTuple):
    """What is known of a code object, which stays alive: it is known by its identity."""

    code: CodeType
    whose: Whose
    function: str
    """Name of the function of `torch.nn.functional` that it is, if it is one."""
    operator: str
    """Name of the operator of tensors that it is, if it is one."""


class Sites:
    """The places that calls come from; any thread may ask."""

    def __init__(self, *, filtered: bool) -> None:
        """`filtered` leaves torch's frames out of stacks as well as ours."""
        self._filtered = filtered
        self._stacks = _stacks(filtered)
        self._codes: dict[int, _Code] = {}

    def refilter(self, filtered: bool) -> None:
        """Leave torch's frames out of stacks from now on, or no longer."""
        if filtered != self._filtered:
            self._filtered = filtered
            self._stacks = _stacks(filtered)

    def whose(self, frame: FrameType | None) -> Whose:
        """Return whose call it is that a frame makes."""
        generated = False
        while frame is not None:
            whose = self._code(frame).whose
            if whose is Whose.GENERATED:
                generated = True
            elif whose is Whose.COMPILER:
                # It also stands around functions that it was told to leave alone.
                if generated:
                    return Whose.COMPILED
            elif whose is not Whose.TORCH:
                return whose
            frame = frame.f_back
        return Whose.USER

    def behind(self, frame: FrameType) -> tuple[str, str]:
        """Return what a frame calls a method for, each empty where it is not there.

        A function of `torch.nn.functional` that computes with it, and the operator that was
        written.
        """
        code, at, operator = self._code(frame), frame, ""
        while at.f_code.co_filename in _BETWEEN and at.f_back is not None:
            at = at.f_back
            code = self._code(at)
        if code.operator and at.f_back is not None:
            operator, code = code.operator, self._code(at.f_back)
        return code.function, operator

    def stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a stack, innermost first, as the stack file has them."""
        return self._stacks.above(frame)

    def _code(self, frame: FrameType) -> _Code:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _REMEMBERED:
                # All that is known by the identity of a code object goes with the object.
                self.forget()
            known = self._codes[id(code)] = _read(frame)
        return known

    def forget(self) -> None:
        """Know nothing any more."""
        self._stacks.forget()
        self._codes.clear()


def _stacks(filtered: bool) -> Stacks:
    return Stacks(_TORCH, _GRAPH, users_only=filtered)


def _read(frame: FrameType) -> _Code:
    code = frame.f_code
    file = code.co_filename
    whose = Whose.USER
    for prefixes, each in _WHOSE:
        if file.startswith(prefixes):
            whose = each
            break
    # Where compiled code is kept may be chosen; by default the folder is called so.
    if whose is Whose.USER and (_INDUCTOR in file or _called_by_inductor(frame)):
        whose = Whose.GENERATED
    return _Code(code, whose, code.co_name if file == _FUNCTIONAL else "", written(code))


def _called_by_inductor(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith(f"{_TORCH}_inductor")

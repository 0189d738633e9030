"""Sites of API calls: from the frames above a call, whose call it is and where in the script it
stands.

Calls that torch makes for itself are not the user's: those of compiled code, of the wrappers of
distributed training, and of an optimizer around its closure. Everything that is read of a code
object is cached, because the same lines run in every step.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.nn import functional

from rankdump._frameworks.api_calls import CallStackCache
from rankdump._frameworks.torch import internals, module_hooks
from rankdump._frameworks.torch.apis import function_patches
from rankdump._frameworks.torch.apis.function_patches import find_written_operator


class CodeOwner(Enum):
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


_TORCH_FOLDER = f"{Path(str(torch.__file__)).parent}{os.sep}"
_RANKDUMP_FOLDER = f"{Path(__file__).parents[3]}{os.sep}"
_FUNCTIONAL_FILE = str(functional.__file__)
_TRANSPARENT_FILES = (
    f"{Path(__file__).parent}{os.sep}",
    *(str(module.__file__) for module in (function_patches, internals, module_hooks)),
)
"""Our own code that the script's calls pass through."""
_GRAPH_FILE = "<eval_with_key>"
_IMPORT_SYSTEM = "<frozen "
_INDUCTOR_FOLDER = "torchinductor_"
_COMPILED_RUNNERS = ("_inductor", "_functorch/_aot_autograd", "_functorch/aot_autograd.py")
"""What runs compiled code; what compiled code calls stands right below it."""
_OWNERS_BY_FILE = (
    (_GRAPH_FILE, CodeOwner.GENERATED),
    ((*_TRANSPARENT_FILES, _IMPORT_SYSTEM), CodeOwner.TORCH),
    (_RANKDUMP_FOLDER, CodeOwner.NOBODY),
    (
        tuple(f"{_TORCH_FOLDER}{part.replace('/', os.sep)}" for part in _COMPILED_RUNNERS),
        CodeOwner.COMPILED,
    ),
    (f"{_TORCH_FOLDER}_dynamo{os.sep}", CodeOwner.COMPILER),
    (
        tuple(f"{_TORCH_FOLDER}{part}{os.sep}" for part in ("optim", "distributed")),
        CodeOwner.NOBODY,
    ),
    (_TORCH_FOLDER, CodeOwner.TORCH),
)
"""By the file that code stands in; the first that fits counts, all other code is the user's."""
_OPERATOR_FILES = (f"{_TORCH_FOLDER}_tensor.py", f"{_TORCH_FOLDER}overrides.py")
"""What may stand between an operator and the method that it calls."""

_MAX_CACHED_CODES = 1 << 14


class _CodeInfo(NamedTuple):
    """What is known of a code object, which stays alive: it is known by its identity."""

    code: CodeType
    owner: CodeOwner
    function: str
    """Name of the function of `torch.nn.functional` that it is, if it is one."""
    operator: str
    """Name of the operator of tensors that it is, if it is one."""


class CallSites:
    """The places that calls come from; any thread may ask."""

    def __init__(self, *, filtered: bool) -> None:
        """`filtered` leaves torch's frames out of stacks as well as ours."""
        self._filtered = filtered
        self._stacks = _make_stack_cache(filtered)
        self._codes: dict[int, _CodeInfo] = {}

    def set_filter(self, filtered: bool) -> None:
        """Leave torch's frames out of stacks from now on, or no longer."""
        if filtered != self._filtered:
            self._filtered = filtered
            self._stacks = _make_stack_cache(filtered)

    def find_owner(self, frame: FrameType | None) -> CodeOwner:
        """Return whose call it is that a frame makes."""
        generated = False
        while frame is not None:
            owner = self._get_code_info(frame).owner
            if owner is CodeOwner.GENERATED:
                generated = True
            elif owner is CodeOwner.COMPILER:
                # It also stands around functions that it was told to leave alone.
                if generated:
                    return CodeOwner.COMPILED
            elif owner is not CodeOwner.TORCH:
                return owner
            frame = frame.f_back
        return CodeOwner.USER

    def find_wrapping_names(self, frame: FrameType) -> tuple[str, str]:
        """Return what a frame calls a method for, each empty where it is not there.

        A function of `torch.nn.functional` that computes with it, and the operator that was
        written.
        """
        code, at, operator = self._get_code_info(frame), frame, ""
        while at.f_code.co_filename in _OPERATOR_FILES and at.f_back is not None:
            at = at.f_back
            code = self._get_code_info(at)
        if code.operator and at.f_back is not None:
            operator, code = code.operator, self._get_code_info(at.f_back)
        return code.function, operator

    def read_stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a stack, innermost first, as the stack file has them."""
        return self._stacks.read_stack(frame)

    def _get_code_info(self, frame: FrameType) -> _CodeInfo:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _MAX_CACHED_CODES:
                # All that is known by the identity of a code object goes with the object.
                self.clear()
            known = self._codes[id(code)] = _read_code(frame)
        return known

    def clear(self) -> None:
        """Know nothing any more."""
        self._stacks.clear()
        self._codes.clear()


def _make_stack_cache(filtered: bool) -> CallStackCache:
    return CallStackCache(_TORCH_FOLDER, _GRAPH_FILE, users_only=filtered)


def _read_code(frame: FrameType) -> _CodeInfo:
    code = frame.f_code
    file = code.co_filename
    owner = CodeOwner.USER
    for prefixes, each in _OWNERS_BY_FILE:
        if file.startswith(prefixes):
            owner = each
            break
    # Where compiled code is kept may be chosen; by default the folder is called so.
    if owner is CodeOwner.USER and (_INDUCTOR_FOLDER in file or _is_called_by_inductor(frame)):
        owner = CodeOwner.GENERATED
    return _CodeInfo(
        code, owner, code.co_name if file == _FUNCTIONAL_FILE else "", find_written_operator(code)
    )


def _is_called_by_inductor(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith(f"{_TORCH_FOLDER}_inductor")

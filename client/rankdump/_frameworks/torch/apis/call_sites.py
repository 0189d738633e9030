"""Call sites: the owner of an API call and its place in the script, found from the frames above it.

Calls that torch makes for itself do not count as the user's: those of compiled code, of the
wrappers of distributed training, and of an optimizer around its closure. Facts about a code object
are cached, because the same lines run in every step.
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
from rankdump._frameworks.model_observer import RANKDUMP_FOLDER
from rankdump._frameworks.torch import internals, module_hooks
from rankdump._frameworks.torch.apis import function_patches
from rankdump._frameworks.torch.apis.function_patches import find_written_operator


class CodeOwner(Enum):
    """Owner of the code that a frame runs."""

    USER = "user"
    TORCH = "torch"
    """Code of torch that may run for the user; the frames above it decide."""
    GENERATED = "generated"
    """Code that was generated from a graph, by the compiler or by the user."""
    COMPILER = "compiler"
    COMPILED = "compiled"
    INTERNAL = "internal"
    """Code of torch whose calls are not the user's."""


_TORCH_FOLDER = f"{Path(str(torch.__file__)).parent}{os.sep}"
_FUNCTIONAL_FILE = str(functional.__file__)
_TRANSPARENT_FILES = (
    f"{Path(__file__).parent}{os.sep}",
    *(str(module.__file__) for module in (function_patches, internals, module_hooks)),
)
"""Files of rankdump that the script's calls pass through."""
_GRAPH_FILE = "<eval_with_key>"
_IMPORT_SYSTEM = "<frozen "
_INDUCTOR_FOLDER = "torchinductor_"
_COMPILED_RUNNERS = ("_inductor", "_functorch/_aot_autograd", "_functorch/aot_autograd.py")
"""Files of the code that runs compiled code, whose frames come right below in the stack."""
_OWNERS_BY_FILE = (
    (_GRAPH_FILE, CodeOwner.GENERATED),
    ((*_TRANSPARENT_FILES, _IMPORT_SYSTEM), CodeOwner.TORCH),
    (RANKDUMP_FOLDER, CodeOwner.INTERNAL),
    (
        tuple(f"{_TORCH_FOLDER}{part.replace('/', os.sep)}" for part in _COMPILED_RUNNERS),
        CodeOwner.COMPILED,
    ),
    (f"{_TORCH_FOLDER}_dynamo{os.sep}", CodeOwner.COMPILER),
    (
        tuple(f"{_TORCH_FOLDER}{part}{os.sep}" for part in ("optim", "distributed")),
        CodeOwner.INTERNAL,
    ),
    (_TORCH_FOLDER, CodeOwner.TORCH),
)
"""Owner of code by the prefix of its file; the first match counts, and any other code is the
user's.
"""
_OPERATOR_FILES = (f"{_TORCH_FOLDER}_tensor.py", f"{_TORCH_FOLDER}overrides.py")
"""Files whose frames lie between an operator and the method that it calls."""

_MAX_CACHED_CODES = 1 << 14


class _CodeInfo(NamedTuple):
    """Facts about a code object, which is kept alive because its identity is the key."""

    code: CodeType
    owner: CodeOwner
    function: str
    """Name of the function of `torch.nn.functional` that the code is; else empty."""
    operator: str
    """Name of the tensor operator that the code is; else empty."""


class CallSites:
    """Finds the call sites of one process; safe to use from several threads."""

    def __init__(self, *, filtered: bool) -> None:
        """`filtered` leaves frames of torch out of stacks; frames of rankdump are
        always left out.
        """
        self._filtered = filtered
        self._stacks = _make_stack_cache(filtered)
        self._codes: dict[int, _CodeInfo] = {}

    def set_filter(self, filtered: bool) -> None:
        """Choose whether frames of torch are left out of stacks from now on."""
        if filtered != self._filtered:
            self._filtered = filtered
            self._stacks = _make_stack_cache(filtered)

    def find_owner(self, frame: FrameType | None) -> CodeOwner:
        """Return the owner of a call that a frame makes."""
        generated = False
        while frame is not None:
            owner = self._get_code_info(frame).owner
            if owner is CodeOwner.GENERATED:
                generated = True
            elif owner is CodeOwner.COMPILER:
                # Frames of the compiler also surround functions that are excluded from compilation.
                if generated:
                    return CodeOwner.COMPILED
            elif owner is not CodeOwner.TORCH:
                return owner
            frame = frame.f_back
        return CodeOwner.USER

    def find_wrapping_names(self, frame: FrameType) -> tuple[str, str]:
        """Return the function of `torch.nn.functional` and the operator for which a frame makes its
        call.

        Each name is empty if there is none.
        """
        code, at, operator = self._get_code_info(frame), frame, ""
        while at.f_code.co_filename in _OPERATOR_FILES and at.f_back is not None:
            at = at.f_back
            code = self._get_code_info(at)
        if code.operator and at.f_back is not None:
            operator, code = code.operator, self._get_code_info(at.f_back)
        return code.function, operator

    def read_stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a stack, innermost call first, as the stack file has them."""
        return self._stacks.read_stack(frame)

    def _get_code_info(self, frame: FrameType) -> _CodeInfo:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _MAX_CACHED_CODES:
                # Entries that are keyed by the identity of a code object must be removed together
                # with the object.
                self.clear()
            known = self._codes[id(code)] = _read_code(frame)
        return known

    def clear(self) -> None:
        """Forget all cached facts."""
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
    # The folder of compiled code can be configured; this is its default name.
    if owner is CodeOwner.USER and (_INDUCTOR_FOLDER in file or _is_called_by_inductor(frame)):
        owner = CodeOwner.GENERATED
    return _CodeInfo(
        code, owner, code.co_name if file == _FUNCTIONAL_FILE else "", find_written_operator(code)
    )


def _is_called_by_inductor(frame: FrameType) -> bool:
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith(f"{_TORCH_FOLDER}_inductor")

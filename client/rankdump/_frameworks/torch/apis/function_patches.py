"""Patched functions of torch: operators that can be distinguished from methods, and dropout that
drops nothing.

`2 * x` and `x.mul(2)` are one call to torch. For the first Python calls `Tensor.__rmul__`, an
alias of `mul`, so a function mode cannot distinguish them, and the script's source does not always
show which operand is a tensor. While there is an observer, each alias is a function of ours that
calls the method; its frame identifies the operator. Dropout stays off for the rest of the process,
so that two runs can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper, wraps
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn import Module, functional

from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation

_OPERATOR_NAMES = tuple(
    f"__{word}__"
    for word in (
        *("add", "sub", "mul", "matmul", "truediv", "mod", "pow", "radd", "rmul"),
        *("rand", "ror", "rxor", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs"),
        *("iadd", "isub", "imul", "itruediv", "imod", "ifloordiv", "ipow"),
    )
)
"""Operators that torch reports under another name. Only these are patched: a patch of another one,
such as `__eq__`, would be visible to the modes and subclasses of the script.
"""

_patch_lock = threading.Lock()
_patch_users = 0
_replaced_operators: list[AttributePatch] = []


class OperatorPatch:
    """Patch that makes operators distinguishable from methods, until `remove`."""

    def __init__(self) -> None:
        global _patch_users
        with _patch_lock:
            _patch_users += 1
            if _patch_users == 1:
                _replace_operators()
        self._removed = False

    def remove(self) -> None:
        """Restore the operators, unless another observer is using the patch."""
        global _patch_users
        with _patch_lock:
            if self._removed:
                return
            self._removed = True
            _patch_users -= 1
            if _patch_users == 0:
                _restore_operators()


def find_written_operator(code: CodeType) -> str:
    """Return the operator that a code object of the patch stands for; empty for any other code."""
    return code.co_name if code.co_filename == __file__ and code.co_name in _OPERATOR_NAMES else ""


def _replace_operators() -> None:
    for name in _OPERATOR_NAMES:
        method = getattr(Tensor, name, None)
        if method is not None:
            _replaced_operators.append(AttributePatch(Tensor, name, _wrap_operator(name, method)))
            _replaced_operators[-1].install()


def _restore_operators() -> None:
    for replaced in _replaced_operators:
        replaced.remove()
    _replaced_operators.clear()


def _wrap_operator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def operator(tensor: Any, *others: Any) -> Any:
        return method(tensor, *others)

    operator.__code__ = operator.__code__.replace(co_name=name)
    return exclude_from_compilation(update_wrapper(operator, method))


# torch's stubs leave functions of `functional` untyped.
# pyright: reportUnknownMemberType=false


_DROPOUT_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
_DROPOUT_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_disabled_dropouts: set[Callable[..., Any]] = set()


def without_dropout(model: Module) -> int:
    """Set p to 0 in the dropout modules of a model and in every functional dropout; return the
    number of these modules.

    This is not undone, because later steps are compared too.
    """
    found = [module for module in model.modules() if isinstance(module, _DROPOUT_MODULES)]
    for module in found:
        module.p = 0.0
    for name in _DROPOUT_FUNCTIONS:
        before = getattr(functional, name)
        if before not in _disabled_dropouts:
            setattr(functional, name, _disable_dropout(before))
    return len(found)


def _disable_dropout(before: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(before)
    def harmless(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        return before(input, 0.0, *args, **kwargs)

    _disabled_dropouts.add(harmless)
    return harmless

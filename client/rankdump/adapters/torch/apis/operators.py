"""Makes operators on tensors known from methods: `2 * x` and `x.mul(2)` are one call to torch.

Python asks `Tensor.__rmul__` for the first one, which is another name of `mul`: no function mode
hears which it was, and the code of the script does not always tell where a tensor stands beside an
operator. So as long as somebody observes, each of these names is a function of ours that calls the
method; its frame tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from types import CodeType
from typing import Any

from torch import Tensor

from rankdump.adapters.torch.guard import uncompiled

_NAMES = tuple(
    f"__{word}__"
    for word in (
        *("add", "sub", "mul", "matmul", "truediv", "mod", "pow", "radd", "rmul"),
        *("rand", "ror", "rxor", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs"),
        *("iadd", "isub", "imul", "itruediv", "imod", "ifloordiv", "ipow"),
    )
)
"""Those of which torch says another name. What stands in the place of one of the others, such as
`__eq__`, would be what torch tells the script's own modes and subclasses of."""

_lock = threading.Lock()
_users = 0
_replaced: dict[str, tuple[Any, Callable[..., Any]]] = {}
"""What the class itself had under each name, None for nothing, and what it has instead."""


class Operators:
    """Operators tell what they are, from now until `remove`."""

    def __init__(self) -> None:
        global _users
        with _lock:
            _users += 1
            if _users == 1:
                _replace()
        self._removed = False

    def remove(self) -> None:
        """Leave tensors as they were when nobody else observes them."""
        global _users
        with _lock:
            if self._removed:
                return
            self._removed = True
            _users -= 1
            if _users == 0:
                _restore()


def written(code: CodeType) -> str:
    """Return which operator stands in the script where this code runs; empty for other code."""
    return code.co_name if code.co_filename == __file__ and code.co_name in _NAMES else ""


def _replace() -> None:
    for name in _NAMES:
        method = getattr(Tensor, name, None)
        if method is not None:
            instead = _named(name, method)
            _replaced[name] = vars(Tensor).get(name), instead
            setattr(Tensor, name, instead)


def _restore() -> None:
    for name, (own, instead) in _replaced.items():
        # Somebody may have put something in our place meanwhile.
        if vars(Tensor).get(name) is not instead:
            continue
        if own is None:
            delattr(Tensor, name)
        else:
            setattr(Tensor, name, own)
    _replaced.clear()


def _named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def operator(tensor: Any, *others: Any) -> Any:
        return method(tensor, *others)

    operator.__code__ = operator.__code__.replace(co_name=name)
    return uncompiled(update_wrapper(operator, method))

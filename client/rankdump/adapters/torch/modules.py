"""Hooks on modules: what stands before and after every call, for as long as it is installed.

A hook runs once before a call, so that an in-place operator's input has its value from before,
and once after it, also when the call raised.
"""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import (
    compiled_call,
    plain_call,
    set_compiled_call,
    traced,
)
from rankdump.adapters.torch.scopes import Operator, Tree


class Calls(Protocol):
    """What hears of every call of a module."""

    def enter(
        self, operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call."""
        ...

    def leave(self, operator: Operator, result: object) -> None:
        """Close a call; the result of one that raised is None."""
        ...

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        ...


class Installation:
    """The hooks of one tree of modules, from now until `remove`."""

    def __init__(self, tree: Tree, calls: Calls) -> None:
        self.tree = tree
        self._handles: list[RemovableHandle] = []
        self._befores: list[_Before] = []
        self._bounded: list[tuple[Module, _Boundary, Callable[..., Any] | None]] = []
        for operator in tree.operators:
            if operator.in_place:
                self._bound(operator, calls)
            else:
                self._hook(operator, calls)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        for before in self._befores:
            before.installed = False
        for module, boundary, before in self._bounded:
            if compiled_call(module) is boundary:
                set_compiled_call(module, before)
        self._handles.clear()
        self._befores.clear()
        self._bounded.clear()

    def _hook(self, operator: Operator, calls: Calls) -> None:
        module = operator.module
        self._befores.append(_Before(operator, calls))
        before = module.register_forward_pre_hook(self._befores[-1], with_kwargs=True)
        after = module.register_forward_hook(
            _After(operator, calls), with_kwargs=True, always_call=True
        )
        self._handles += (before, after)

    def _bound(self, operator: Operator, calls: Calls) -> None:
        before = compiled_call(operator.module)
        boundary = _Boundary(operator, calls, before or plain_call(operator.module))
        set_compiled_call(operator.module, boundary)
        self._bounded.append((operator.module, boundary, before))


class _OfOperator:
    """What stands in a module for us; a copy of the module gets one that does nothing."""

    def __init__(self, operator: Operator, calls: Calls) -> None:
        self._operator = operator
        self._calls = calls

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return in_a_copy, ()


class _Before(_OfOperator):
    installed = True

    @uncompiled
    def __call__(self, module: Module, args: Any, kwargs: Any = None) -> None:
        # One that an earlier hook of the same call removed is run all the same, and without kwargs.
        if self.installed and not traced():
            shielded(self._calls.enter, self._calls.failed, self._operator, args, kwargs)


class _After(_OfOperator):
    @uncompiled
    def __call__(self, module: Module, args: Any, kwargs: Any, result: Any) -> None:
        if not traced():
            shielded(self._calls.leave, self._calls.failed, self._operator, result)


class _Boundary(_OfOperator):
    """Stands before the call of a module that must have no hooks, as one that is compiled."""

    def __init__(self, operator: Operator, calls: Calls, inner: Callable[..., Any]) -> None:
        super().__init__(operator, calls)
        self.inner = inner

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traced():
            return self.inner(*args, **kwargs)
        calls, operator, result = self._calls, self._operator, None
        shielded(calls.enter, calls.failed, operator, args, kwargs)
        try:
            result = self.inner(*args, **kwargs)
        finally:
            shielded(calls.leave, calls.failed, operator, result)
        return result


def inert(*args: object) -> None:
    """Stand in a copied or pickled module where a hook stood in the original."""


def in_a_copy() -> Callable[..., None]:
    """Return what an unpickled module gets instead of a hook."""
    return inert

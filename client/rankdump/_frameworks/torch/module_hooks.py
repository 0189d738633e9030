"""Hooks on modules, and the watch for outermost calls of models, where an iteration may begin.

A hook runs once before a call, when an in-place operator has not overwritten its input, and once
after it, also if the call raised. Hooks that are installed while an outermost call begins run for
that call too. Copied and pickled modules get hooks that do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rankdump._frameworks.torch.internals import (
    find_compiled_call,
    find_plain_call,
    is_tracing,
    read_pre_hooks,
    set_compiled_call,
)
from rankdump._frameworks.torch.module_tree import ModuleOperator, ModuleTree
from rankdump._frameworks.torch.observer import exclude_from_compilation, run_shielded

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


class ModuleCallListener(Protocol):
    """Receives every call of a module."""

    def enter(
        self, operator: ModuleOperator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call."""
        ...

    def leave(self, operator: ModuleOperator, result: object) -> None:
        """Close a call; of a call that raised `result` is None."""
        ...

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        ...


class ModuleHooks:
    """Hooks on the modules of one tree, until `remove`."""

    def __init__(self, tree: ModuleTree, calls: ModuleCallListener) -> None:
        self.tree = tree
        self._handles: list[RemovableHandle] = []
        self._pre_hooks: list[_OperatorPreHook] = []
        self._boundaries: list[tuple[Module, _BoundaryCall, Callable[..., Any] | None]] = []
        for operator in tree.operators:
            if operator.in_place:
                self._add_boundary(operator, calls)
            else:
                self._add_hooks(operator, calls)

    def remove(self) -> None:
        """Restore the modules."""
        for handle in self._handles:
            handle.remove()
        for before in self._pre_hooks:
            before.installed = False
        for module, boundary, before in self._boundaries:
            if find_compiled_call(module) is boundary:
                set_compiled_call(module, before)
        self._handles.clear()
        self._pre_hooks.clear()
        self._boundaries.clear()

    def _add_hooks(self, operator: ModuleOperator, calls: ModuleCallListener) -> None:
        module = operator.module
        self._pre_hooks.append(_OperatorPreHook(operator, calls))
        before = module.register_forward_pre_hook(self._pre_hooks[-1], with_kwargs=True)
        after = module.register_forward_hook(
            _OperatorPostHook(operator, calls), with_kwargs=True, always_call=True
        )
        self._handles += (before, after)

    def _add_boundary(self, operator: ModuleOperator, calls: ModuleCallListener) -> None:
        before = find_compiled_call(operator.module)
        boundary = _BoundaryCall(operator, calls, before or find_plain_call(operator.module))
        set_compiled_call(operator.module, boundary)
        self._boundaries.append((operator.module, boundary, before))


class _OperatorHook:
    """Base of the hooks on a module; a copy of the module gets a hook that does nothing."""

    def __init__(self, operator: ModuleOperator, calls: ModuleCallListener) -> None:
        self._operator = operator
        self._calls = calls

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_inert_hook, ()


class _OperatorPreHook(_OperatorHook):
    installed = True

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any = None) -> None:
        # torch still runs a hook that an earlier hook of the call removed, and without kwargs.
        if self.installed and not is_tracing():
            run_shielded(
                self._calls.enter, self._calls.report_failure, self._operator, args, kwargs
            )


class _OperatorPostHook(_OperatorHook):
    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any, result: Any) -> None:
        if not is_tracing():
            run_shielded(self._calls.leave, self._calls.report_failure, self._operator, result)


class _BoundaryCall(_OperatorHook):
    """Wrapper around the call of a module that must have no hooks, such as a compiled one."""

    def __init__(
        self, operator: ModuleOperator, calls: ModuleCallListener, inner: Callable[..., Any]
    ) -> None:
        super().__init__(operator, calls)
        self.inner = inner

    @exclude_from_compilation
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.inner(*args, **kwargs)
        calls, operator, result = self._calls, self._operator, None
        run_shielded(calls.enter, calls.report_failure, operator, args, kwargs)
        try:
            result = self.inner(*args, **kwargs)
        finally:
            run_shielded(calls.leave, calls.report_failure, operator, result)
        return result


def do_nothing(*args: object) -> None:
    """Replace a hook in a copied or pickled module."""


def make_inert_hook() -> Callable[..., None]:
    """Return the replacement of a hook in an unpickled module."""
    return do_nothing


# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


class TorchOutermostWatch:
    """Watches models until `remove`; calls inside another model's call do not count."""

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` gets the number of the model, before its call is observed."""
        self._model_called = begins
        self._handles: list[RemovableHandle] = []
        self._watched = 0
        self._open = threading.local()

    def watch(self, model: Module) -> None:
        """Watch one more model; it gets the next number, from 0."""
        before = _ModelPreHook(self, model, self._watched)
        self._watched += 1
        self._handles += (
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            model.register_forward_hook(_ModelPostHook(self, model), always_call=True),
        )

    def remove(self) -> None:
        """Restore the models."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter(self, number: int) -> bool:
        """Count the begin of a call; report it and return True if it is an outermost one."""
        depth = self._depth
        self._open.depth = depth + 1
        if depth == 0:
            self._model_called(number)
        return depth == 0

    def leave(self) -> None:
        """Count the end of a call."""
        self._open.depth = max(0, self._depth - 1)

    @property
    def _depth(self) -> int:
        return getattr(self._open, "depth", 0)


class _ModelHook:
    """Base of the hooks on a model; a copy of the model gets a hook that does nothing."""

    def __init__(self, outermost: TorchOutermostWatch, model: Module) -> None:
        self._outermost = outermost
        self._model = model

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_inert_hook, ()


class _ModelPreHook(_ModelHook):
    def __init__(self, outermost: TorchOutermostWatch, model: Module, number: int) -> None:
        super().__init__(outermost, model)
        self._number = number

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        # A replica shares the hooks of its model.
        if module is not self._model or is_tracing():
            return
        known = set(read_pre_hooks(module))
        if self._outermost.enter(self._number):
            # torch listed the hooks of this call before, without those installed now.
            for key, hook in list(read_pre_hooks(module).items()):
                if key not in known:
                    hook(module, args, kwargs)


class _ModelPostHook(_ModelHook):
    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, result: Any) -> None:
        if module is self._model and not is_tracing():
            self._outermost.leave()

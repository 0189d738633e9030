"""Guards around every hook, hooks on modules, and the observer of outermost calls of models, at
which an iteration may begin.

Guards report internal errors, which never reach the training, and hide hooks from the compiler and
from modes of the user. Errors of the job are recognised by a fingerprint and never kept: the
objects in an error's traceback must be freed when the script releases the error. A script that
frees memory and tries again depends on that.

One hook runs before a call, while an in-place operator has not overwritten its input, and one runs
after it, also if the call raised. Hooks that are installed while an outermost call begins run for
that call too. Copied and pickled modules get hooks that do nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, TypeVar

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from rankdump._core.hook_meter import HOOK_METER
from rankdump._frameworks.torch.internals import (
    disable_function_modes,
    find_compiled_call,
    find_plain_call,
    is_region_traced,
    is_tracing,
    read_post_hooks,
    read_pre_hooks,
    set_compiled_call,
    skip_compilation,
)
from rankdump._frameworks.torch.module_tree import ModuleOperator, ModuleTree

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])
_ResultT = TypeVar("_ResultT")


def exclude_from_compilation(function: _FunctionT) -> _FunctionT:
    """Exclude a hook that runs between two compiled regions from compilation.

    Otherwise the hook would be compiled separately, and a compiled hook observes nothing.
    """
    skip_compilation(function)
    return function


def run_shielded(
    body: Callable[..., _ResultT], failed: Callable[[Exception], None], *args: Any
) -> _ResultT | None:
    """Run the body of a hook; return None after an error, which is passed to `failed`. Interrupts
    pass through.
    """
    is_measured = HOOK_METER.is_on and HOOK_METER.begin()
    try:
        with disable_function_modes():
            return body(*args)
    except Exception as error:
        failed(error)
        return None
    finally:
        if is_measured:
            HOOK_METER.end()


_MAX_CAUSES = 32
"""Maximum length of the chain of causes that is searched."""


@dataclass(frozen=True, slots=True)
class ErrorFingerprint:
    """Fingerprint by which an error is recognised.

    The identity alone is not enough: an error may be freed and another one take its place in
    memory. But it is unlikely that the same line raised that one.
    """

    identity: int
    code: CodeType | None
    line: int


def find_handled_error() -> int:
    """Return the identity of the error that this thread is handling; 0 if there is none."""
    error = sys.exc_info()[1]
    return 0 if error is None else id(error)


def find_raised_error(handled: int) -> BaseException | None:
    """Return the error that is being handled, unless its identity is `handled`."""
    error = sys.exc_info()[1]
    return None if error is None or id(error) == handled else error


def fingerprint_error(error: BaseException) -> ErrorFingerprint:
    """Return the fingerprint of an error that is being handled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ErrorFingerprint(id(error), None, 0)
    return ErrorFingerprint(id(error), trace.tb_frame.f_code, trace.tb_lineno)


def is_caused_by(error: BaseException, fault: ErrorFingerprint | None) -> bool:
    """Return whether an error is the one with this fingerprint, or was raised because of it."""
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None or fault is None:
            return False
        if fingerprint_error(found) == fault:
            return True
        found = found.__cause__ or found.__context__
    return False


class CopyableHook:
    """Base class of hooks on modules: a copied or pickled module gets a hook that does nothing."""

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_inert_hook, ()


# The names of both functions must stay, because they are in the files of modules that a script
# pickled.


def do_nothing(*args: object) -> None:
    """Do nothing; replaces a hook in a copied or pickled module."""


def make_inert_hook() -> Callable[..., None]:
    """Return the replacement of a hook in an unpickled module."""
    return do_nothing


class ModuleCallListener(Protocol):
    """Receives every call of a module."""

    def enter(
        self, operator: ModuleOperator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Receive the start of a call."""
        ...

    def leave(self, operator: ModuleOperator, result: object) -> None:
        """Receive the end of a call; if the call raised, `result` is None."""
        ...

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        ...


class RegionTracer(Protocol):
    """Inserts the observation of a module's calls into the graph that Dynamo traces."""

    def trace_arguments(self, args: Sequence[object], kwargs: Mapping[str, object] | None) -> None:
        """Observe the arguments of the module's call."""
        ...

    def trace_result(self, result: object) -> None:
        """Observe the result of the module's call."""
        ...


class ModuleHooks:
    """Hooks on the modules of one tree; they are in place until `remove`."""

    def __init__(
        self,
        tree: ModuleTree,
        calls: ModuleCallListener,
        make_tracer: Callable[[ModuleOperator], RegionTracer | None] = lambda operator: None,
    ) -> None:
        """`make_tracer` returns the tracer of a module inside compiled regions, or None."""
        self.tree = tree
        self._make_tracer = make_tracer
        self._handles: list[RemovableHandle] = []
        self._pre_hooks: list[_OperatorPreHook] = []
        self._keys: list[tuple[Module, int, int]] = []
        """Modules, and torch's keys of the hooks before and after their calls."""
        self._boundaries: list[tuple[Module, _BoundaryCall, Callable[..., Any] | None]] = []
        for operator in tree.operators:
            if operator.in_place:
                self._add_boundary(operator, calls)
            else:
                self._add_hooks(operator, calls)

    def is_in_place(self) -> bool:
        """Return whether the modules still have their hooks, which a script can remove."""
        return all(
            before in read_pre_hooks(module) and after in read_post_hooks(module)
            for module, before, after in self._keys
        )

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
        self._keys.clear()
        self._boundaries.clear()

    def _add_hooks(self, operator: ModuleOperator, calls: ModuleCallListener) -> None:
        module, tracer = operator.module, self._make_tracer(operator)
        self._pre_hooks.append(_OperatorPreHook(operator, calls, tracer))
        before = module.register_forward_pre_hook(self._pre_hooks[-1], with_kwargs=True)
        after = module.register_forward_hook(
            _OperatorPostHook(operator, calls, tracer), with_kwargs=True, always_call=True
        )
        self._handles += (before, after)
        self._keys.append((module, before.id, after.id))

    def _add_boundary(self, operator: ModuleOperator, calls: ModuleCallListener) -> None:
        before = find_compiled_call(operator.module)
        boundary = _BoundaryCall(operator, calls, before or find_plain_call(operator.module))
        set_compiled_call(operator.module, boundary)
        self._boundaries.append((operator.module, boundary, before))


class _OperatorHook(CopyableHook):
    """Base class of the hooks on an observed module."""

    def __init__(
        self,
        operator: ModuleOperator,
        calls: ModuleCallListener,
        tracer: RegionTracer | None = None,
    ) -> None:
        self._operator = operator
        self._calls = calls
        self._tracer = tracer


class _OperatorPreHook(_OperatorHook):
    installed = True

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any = None) -> None:
        # torch still runs a hook that an earlier hook of the same call removed, and passes it no
        # kwargs then.
        if self._tracer is not None and self.installed and is_region_traced():
            self._tracer.trace_arguments(args, kwargs)
        elif self.installed and not is_tracing():
            run_shielded(
                self._calls.enter, self._calls.report_failure, self._operator, args, kwargs
            )


class _OperatorPostHook(_OperatorHook):
    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._tracer is not None and is_region_traced():
            self._tracer.trace_result(result)
        elif not is_tracing():
            run_shielded(self._calls.leave, self._calls.report_failure, self._operator, result)


class _BoundaryCall(_OperatorHook):
    """Wrapper of the call of a module that must have no hooks, such as a compiled one."""

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


class TorchOutermostWatch:
    """Reports the outermost calls of models until `remove`; calls inside another model's call do
    not count.
    """

    def __init__(self, begins: Callable[[int], None]) -> None:
        """`begins` is called with the number of the model, before the call is observed."""
        self._model_called = begins
        self._handles: list[RemovableHandle] = []
        self._watched = 0
        self._open = threading.local()

    def watch(self, model: Module) -> None:
        """Watch another model; models are numbered from 0 in the order of these calls."""
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
        """Count the begin of a call; if it is an outermost one, report it and return True."""
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


class _ModelPreHook(CopyableHook):
    def __init__(self, outermost: TorchOutermostWatch, model: Module, number: int) -> None:
        self._outermost, self._model, self._number = outermost, model, number

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        # A replica of the model shares the model's hooks.
        if module is not self._model or is_tracing():
            return
        known = set(read_pre_hooks(module))
        if self._outermost.enter(self._number):
            # torch listed the hooks of this call before, so hooks that were installed just now are
            # run here.
            for key, hook in list(read_pre_hooks(module).items()):
                if key not in known:
                    hook(module, args, kwargs)


class _ModelPostHook(CopyableHook):
    def __init__(self, outermost: TorchOutermostWatch, model: Module) -> None:
        self._outermost, self._model = outermost, model

    @exclude_from_compilation
    def __call__(self, module: Module, args: Any, result: Any) -> None:
        if module is self._model and not is_tracing():
            self._outermost.leave()

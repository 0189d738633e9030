"""Interception of every call of a function, method, primitive or cell while there is a listener,
and the gradient hooks on the tensors of the process.

Unlike torch, MindSpore has no mode that reports all calls. So attributes are replaced, and restored
when the last listener is removed and while a compiler reads the program. Calls through a name that
was imported before (`from mindspore.ops import relu`) are not seen. Calls inside an API call, an
optimizer or a compiled region are not calls of the program itself.

MindSpore's compilers read the hooks of parameters, and of tensors in a call's arguments, as part of
the program: they would try to compile the hooks, and fail. So hooks are removed while a compiler
reads. `Parameter.register_hook` also makes MindSpore compile everything anew, so hooks are added
here without it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.mindspore.api_locations import (
    MindSporeApi,
    find_primitive_api,
    iterate_api_locations,
)
from rankdump._frameworks.mindspore.cell_tree import CompiledCall
from rankdump._frameworks.mindspore.framework import (
    BYTECODE_CAPTURE,
    COMPILED_CALLS,
    COMPILERS,
    Cell,
    Parameter,
    RecomputedCell,
    add_hook,
    find_recomputed_cell,
    is_graph_mode,
    is_method_of,
    is_optimizer,
    list_hooks,
    read_captured_arguments,
    remove_hook,
)
from rankdump._frameworks.mindspore.tensors import is_tensor
from rankdump._frameworks.operator_names import list_call_leaves

PositionalArguments = Sequence[object]
KeywordArguments = Mapping[str, object]


class MindSporeCallListener:
    """Base class of listeners to calls; its methods do nothing. They are called on the calling
    thread.

    No method of a listener may raise.
    """

    def call_begins(
        self, api: MindSporeApi, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Receive an API call that is not inside another one; the result is passed to
        `call_ends`.
        """
        return None

    def call_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Receive the result of an API call; None if the call raised."""

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Receive a call of a cell; `inside` says that it is inside an API call."""
        return None

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Receive the result of a cell's call; None if the call raised."""

    def is_api_call(self, cell: Any) -> bool:
        """Return whether a cell counts as an API call, so that calls inside it do not count."""
        return False

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Receive the start of a recomputed region; the returned function is called at its end."""
        return bool

    def optimizer_begins(
        self, optimizer: Any, args: PositionalArguments, kwargs: KeywordArguments
    ) -> None:
        """Receive the arguments of an optimizer's step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Receive the end of an optimizer's step."""

    def compiled_begins(
        self, call: CompiledCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Receive a call of compiled code that is not inside another call.

        The result is passed to `cell_ends`. A compiled cell is reported to `cell_begins` before.
        """
        return None


GradientHook: TypeAlias = "Callable[[Any], Any]"
"""Function that receives a gradient and returns it."""
RemovedHooks: TypeAlias = "list[tuple[Any, GradientHook]]"
"""Removed hooks, each with its tensor."""


class GradientHookRegistry:
    """Gradient hooks of all models of this process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[GradientHook, int | None] = {}
        # Parameters, which outlive every call, are kept alive here; no other tensor is.
        self._parameters: dict[GradientHook, Any] = {}

    def add(self, tensor: Any, hook: GradientHook) -> None:
        """Add a hook for the gradient of a tensor; each tensor requires a separate function.

        RuntimeError for a tensor without gradients.
        """
        with self._lock:
            self._numbers[hook] = add_hook(tensor, hook)
            if isinstance(tensor, Parameter):
                self._parameters[hook] = tensor

    def remove(self, hook: GradientHook) -> None:
        """Remove a hook."""
        with self._lock:
            number = self._numbers.pop(hook, None)
            self._parameters.pop(hook, None)
            if number is not None:
                remove_hook(number)

    def suspend(self, tensors: Iterable[Any]) -> RemovedHooks:
        """Remove the hooks of all parameters and of the given tensors until `restore`."""
        with self._lock:
            found = [(parameter, hook) for hook, parameter in self._parameters.items()]
            found += [(each, hook) for each in tensors for hook in list_hooks(each)]
            return [(tensor, hook) for tensor, hook in found if self._detach_hook(hook)]

    def restore(self, removed: RemovedHooks) -> None:
        """Restore the hooks, except those that were meanwhile removed by `remove`."""
        with self._lock:
            for tensor, hook in removed:
                if hook in self._numbers:
                    self._numbers[hook] = add_hook(tensor, hook)

    def _detach_hook(self, hook: GradientHook) -> bool:
        """Detach a hook; return False if it belongs to the job or is already detached."""
        number = self._numbers.get(hook)
        if number is None:
            return False
        self._numbers[hook] = None
        remove_hook(number)
        return True


GRADIENT_HOOKS = GradientHookRegistry()
"""The gradient hooks of this process."""


class AttributePatches:
    """Replacements of attributes of modules and classes; they can be undone."""

    def __init__(self) -> None:
        self._planned: dict[tuple[int, str], AttributePatch] = {}

    def plan(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Note an attribute that every `install` from now on replaces; the first plan for an
        attribute counts.
        """
        self._planned.setdefault((id(owner), name), AttributePatch(owner, name, ours))

    def install(self) -> None:
        """Replace all planned attributes."""
        for planned in self._planned.values():
            planned.install()

    def remove(self) -> None:
        """Restore all planned attributes, except those that other code has replaced meanwhile."""
        for planned in self._planned.values():
            planned.remove()


_logger = logging.getLogger(__name__)


class _InterceptionState(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        """Number of open calls whose inner calls are not calls of the program itself."""
        self.hooks: list[RemovedHooks] = []
        """Hooks that are removed while a compiler reads; those of the latest
        compilation come last.
        """
        self.captures: list[list[tuple[MindSporeCallListener, object]]] = []
        """Listeners to the functions that a compiler is capturing; those of the innermost function
        come last.
        """


class CallInterception:
    """Interception of the calls of this process, and its listeners."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[MindSporeCallListener, ...] = ()
        self._thread = _InterceptionState()
        self._calls: AttributePatches | None = None
        self._compilers: AttributePatches | None = None
        self._pauses = 0

    def add_listener(self, listener: MindSporeCallListener, *, first: bool = False) -> None:
        """Report calls to a listener from now on; with `first`, before all other listeners."""
        with self._lock:
            known = self._listeners
            self._listeners = (listener, *known) if first else (*known, listener)
            if self._calls is None:
                self._calls, self._compilers = make_call_patches(self), make_compiler_patches(self)
                self._compilers.install()
                if not self._pauses:
                    self._calls.install()

    def remove_listener(self, listener: MindSporeCallListener) -> None:
        """Stop reporting to a listener; removing the last one restores all attributes."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            if not self._listeners and self._calls is not None and self._compilers is not None:
                self._calls.remove()
                self._compilers.remove()
                self._calls = self._compilers = None

    @contextmanager
    def suppress_calls(self) -> Generator[None]:
        """Ignore the calls in the block, which rankdump itself makes."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def pause(self, args: PositionalArguments, kwargs: KeywordArguments) -> None:
        """Remove patches and hooks for a compiler that is about to read the program.

        The compiler reads the program's functions, its parameters, and the tensors in the call's
        arguments.
        """
        self._thread.hooks.append(_suspend_hooks(args, kwargs))
        with self._lock:
            self._pauses += 1
            if self._pauses == 1 and self._calls is not None:
                self._calls.remove()

    def resume(self) -> None:
        """Restore what `pause` removed."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses and self._calls is not None:
                self._calls.install()
        GRADIENT_HOOKS.restore(self._thread.hooks.pop())

    def make_call(
        self, api: MindSporeApi, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run an API call, and report it to the listeners."""
        if self._thread.depth:
            return function(*args, **kwargs)
        with self.suppress_calls():
            opened = [
                (listener, listener.call_begins(api, args, kwargs)) for listener in self._listeners
            ]
            result, raised = None, True
            try:
                result = function(*args, **kwargs)
                raised = False
            finally:
                for listener, token in reversed(opened):
                    listener.call_ends(token, result, raised=raised)
            return result

    def call_cell(self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        """Run the call of a cell, and report it to the listeners."""
        if is_optimizer(cell):
            return self._call_optimizer(function, cell, args, kwargs)
        inside = self._thread.depth > 0
        compiled = is_graph_mode()
        closed = compiled or any(listener.is_api_call(cell) for listener in self._listeners)
        with self.suppress_calls():
            opened = [
                (listener, listener.cell_begins(cell, args, kwargs, inside=inside))
                for listener in self._listeners
            ]
            if compiled and not inside:
                opened += self._begin_compiled(CompiledCall(cell), args, kwargs)
        result, raised = None, True
        try:
            if closed:
                with self.suppress_calls():
                    result = function(cell, *args, **kwargs)
            else:
                result = function(cell, *args, **kwargs)
            raised = False
        finally:
            with self.suppress_calls():
                _end_calls(opened, result, raised=raised)
        return result

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run compiled code, and report the call as a whole to the listeners."""
        executor, *given = args
        call = CompiledCall.from_function(executor.fn, executor.obj)
        if self._thread.depth or call.is_internal:
            with self.suppress_calls():
                return function(*args, **kwargs)
        if executor.obj is not None:
            del given[0]
        with self.suppress_calls():
            opened = self._begin_compiled(call, given, kwargs)
            result, raised = None, True
            try:
                result = function(*args, **kwargs)
                raised = False
            finally:
                _end_calls(opened, result, raised=raised)
            return result

    def capture_begins(self, context: Any) -> None:
        """Report a function that a compiler captures, and remove the patches and hooks that it must
        not read.
        """
        args, kwargs = read_captured_arguments()
        opened: list[tuple[MindSporeCallListener, object]] = []
        if not self._thread.depth:
            of_cell = bool(args) and is_method_of(context.fn, args[0])
            call = CompiledCall.from_function(context.fn, args[0] if of_cell else None)
            with self.suppress_calls():
                opened = self._begin_compiled(call, args[1:] if of_cell else args, kwargs)
        self._thread.captures.append(opened)
        self.pause(args, kwargs)

    def capture_ends(self, context: Any, *, raised: bool) -> None:
        """Restore the removed patches and hooks, and report the function's result."""
        if not self._thread.captures:  # the first listener was added while the function ran
            return
        self.resume()
        with self.suppress_calls():
            _end_calls(self._thread.captures.pop(), None if raised else context.ret, raised=raised)

    def run_region(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, again: bool
    ) -> Any:
        """Run a recomputed region; the region of a cell that counts as an API call is part of that
        call.
        """
        method_of = find_recomputed_cell(args[0])
        if method_of is not None and any(
            listener.is_api_call(method_of) for listener in self._listeners
        ):
            with self.suppress_calls():
                return function(*args, **kwargs)
        ends = [listener.region_begins(args[0], again=again) for listener in self._listeners]
        try:
            return function(*args, **kwargs)
        finally:
            for end in reversed(ends):
                end()

    def _call_optimizer(
        self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any
    ) -> Any:
        with self.suppress_calls():
            for listener in self._listeners:
                listener.optimizer_begins(cell, args, kwargs)
            result = function(cell, *args, **kwargs)
            for listener in self._listeners:
                listener.optimizer_ends(cell)
        return result

    def _begin_compiled(
        self, call: CompiledCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> list[tuple[MindSporeCallListener, object]]:
        return [
            (listener, listener.compiled_begins(call, args, kwargs)) for listener in self._listeners
        ]


def _end_calls(
    opened: list[tuple[MindSporeCallListener, object]], result: object, *, raised: bool
) -> None:
    for listener, token in reversed(opened):
        listener.cell_ends(token, result, raised=raised)


def _suspend_hooks(args: PositionalArguments, kwargs: KeywordArguments) -> RemovedHooks:
    try:
        tensors = [leaf.value for leaf in list_call_leaves(args, kwargs) if is_tensor(leaf.value)]
        return GRADIENT_HOOKS.suspend(tensors)
    except Exception as error:  # the job continues, if necessary without hooks of rankdump
        _logger.debug("hooks could not be removed before a compilation", exc_info=error)
        return []


def make_call_patches(caller: CallInterception) -> AttributePatches:
    """Return the patches that intercept the program's calls."""
    found = AttributePatches()
    for place in iterate_api_locations():
        of_primitive = place.name == "__call__"
        wrap = _wrap_primitive if of_primitive else _wrap_function
        found.plan(place.owner, place.name, wrap(caller, place.api, place.function))
    call = Cell.__call__

    @functools.wraps(call)
    def of_cell(self: Any, *args: Any, **kwargs: Any) -> Any:
        return caller.call_cell(call, self, args, kwargs)

    found.plan(Cell, "__call__", of_cell)
    for name, again in (("construct", False), ("bprop", True)):
        ours = _wrap_region(caller, getattr(RecomputedCell, name), again=again)
        found.plan(RecomputedCell, name, ours)
    return found


def _wrap_function(
    caller: CallInterception, api: MindSporeApi, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.make_call(api, function, args, kwargs)

    return observed


def _wrap_primitive(
    caller: CallInterception, _: MindSporeApi, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        api = find_primitive_api(self)
        if api is None:
            return function(self, *args, **kwargs)
        return caller.make_call(api, functools.partial(function, self), args, kwargs)

    return observed


def _wrap_region(
    caller: CallInterception, function: Callable[..., Any], *, again: bool
) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.run_region(function, args, kwargs, again=again)

    return observed


def make_compiler_patches(caller: CallInterception) -> AttributePatches:
    """Return the patches of compilers, which remove all other patches while the program is
    compiled.
    """
    found = AttributePatches()
    for owner, name in COMPILERS:
        found.plan(owner, name, _wrap_compiler(caller, getattr(owner, name)))
    for owner, name in COMPILED_CALLS:
        found.plan(owner, name, _wrap_compiled(caller, getattr(owner, name)))
    enter, leave = BYTECODE_CAPTURE.__enter__, BYTECODE_CAPTURE.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        caller.capture_begins(self)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            caller.capture_ends(self, raised=error[0] is not None)

    found.plan(BYTECODE_CAPTURE, "__enter__", entered)
    found.plan(BYTECODE_CAPTURE, "__exit__", left)
    return found


def _wrap_compiler(caller: CallInterception, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        caller.pause(args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            caller.resume()

    return compiling


def _wrap_compiled(caller: CallInterception, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def running(*args: Any, **kwargs: Any) -> Any:
        return caller.run_compiled(function, args, kwargs)

    return running


CALL_INTERCEPTION = CallInterception()
"""Interception of this process; there is only one, because the attributes of MindSpore
exist once.
"""

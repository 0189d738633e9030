"""Interception of every function, method, primitive and cell for as long as there is a listener,
and the gradient hooks on tensors of the process.

MindSpore has no mode that sees all calls, as torch has: attributes are replaced instead, and put
back when the last listener leaves, and while a compiler reads the program. Calls through a name
that was imported before (`from mindspore.ops import relu`) are not seen. Calls inside an API
call, an optimizer or a compiled region are not the program's own.

A compiler of MindSpore reads the hooks of parameters, and of tensors that a call is given, as
part of the program: it would compile them, and fail. So hooks are removed while it reads.
`Parameter.register_hook` also makes MindSpore compile everything anew, so hooks are placed here
without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from rankdump._frameworks.mindspore.api_patches import (
    AttributePatches,
    MindSporeApi,
    make_call_patches,
    make_compiler_patches,
)
from rankdump._frameworks.mindspore.cell_tree import CompiledCall
from rankdump._frameworks.mindspore.framework import (
    Parameter,
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
    """Receives calls, on the thread that makes them; methods that are not redefined do nothing.

    No method may raise.
    """

    def call_begins(
        self, api: MindSporeApi, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Take a call that is inside no other; what is returned is given to `call_ends`."""
        return None

    def call_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Take the result of a call; None when it raised."""

    def cell_begins(
        self, cell: Any, args: PositionalArguments, kwargs: KeywordArguments, *, inside: bool
    ) -> object:
        """Take a call of a cell; `inside` says that a call of an API is under way."""
        return None

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Take the result of a call of a cell; None when it raised."""

    def is_api_call(self, cell: Any) -> bool:
        """Return whether a cell is an API itself, so that nothing inside it is one."""
        return False

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take the begin of a region that is recomputed; what is returned is called at its end."""
        return bool

    def optimizer_begins(
        self, optimizer: Any, args: PositionalArguments, kwargs: KeywordArguments
    ) -> None:
        """Take what an optimizer's step is given."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Take note that an optimizer's step is over."""

    def compiled_begins(
        self, call: CompiledCall, args: PositionalArguments, kwargs: KeywordArguments
    ) -> object:
        """Take a call of compiled code that is inside no other call.

        What is returned is given to `cell_ends`. A call of a cell comes here after `cell_begins`.
        """
        return None


GradientHook: TypeAlias = "Callable[[Any], Any]"
"""A function that is given a gradient and returns it."""
RemovedHooks: TypeAlias = "list[tuple[Any, GradientHook]]"
"""Tensors, each with a hook that was taken off."""


class GradientHookRegistry:
    """The hooks of all models of this process; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[GradientHook, int | None] = {}
        # Parameters outlive every call; of other tensors none is kept alive.
        self._parameters: dict[GradientHook, Any] = {}

    def add(self, tensor: Any, hook: GradientHook) -> None:
        """Have a function of its own called with a tensor's gradient.

        RuntimeError for a tensor that no gradient comes to.
        """
        with self._lock:
            self._numbers[hook] = add_hook(tensor, hook)
            if isinstance(tensor, Parameter):
                self._parameters[hook] = tensor

    def remove(self, hook: GradientHook) -> None:
        """Take a hook off for good."""
        with self._lock:
            number = self._numbers.pop(hook, None)
            self._parameters.pop(hook, None)
            if number is not None:
                remove_hook(number)

    def suspend(self, tensors: Iterable[Any]) -> RemovedHooks:
        """Remove the hooks of all parameters and of these tensors until `restore`."""
        with self._lock:
            found = [(parameter, hook) for hook, parameter in self._parameters.items()]
            found += [(each, hook) for each in tensors for hook in list_hooks(each)]
            return [(tensor, hook) for tensor, hook in found if self._detach_hook(hook)]

    def restore(self, removed: RemovedHooks) -> None:
        """Put hooks back, except those that were removed meanwhile."""
        with self._lock:
            for tensor, hook in removed:
                if hook in self._numbers:
                    self._numbers[hook] = add_hook(tensor, hook)

    def _detach_hook(self, hook: GradientHook) -> bool:
        """Take a hook off; return False for one of the job's own, and for one that is off."""
        number = self._numbers.get(hook)
        if number is None:
            return False
        self._numbers[hook] = None
        remove_hook(number)
        return True


GRADIENT_HOOKS = GradientHookRegistry()
"""Those of this process."""


_logger = logging.getLogger(__name__)


class _InterceptionState(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        """How many calls are open inside which nothing is the program's own."""
        self.hooks: list[RemovedHooks] = []
        """Hooks that are off while a compiler reads, of the compilation begun last at the end."""
        self.captures: list[list[tuple[MindSporeCallListener, object]]] = []
        """Who was told of functions that a compiler follows now, of the innermost at the end."""


class CallInterception:
    """All replaced attributes of this process, and who listens."""

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
        """Take what runs inside for no call of the program's."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def pause(self, args: PositionalArguments, kwargs: KeywordArguments) -> None:
        """Take all that is ours away for a while: a compiler is going to read the program.

        It reads the program's functions, the parameters, and the tensors of the call.
        """
        self._thread.hooks.append(_suspend_hooks(args, kwargs))
        with self._lock:
            self._pauses += 1
            if self._pauses == 1 and self._calls is not None:
                self._calls.remove()

    def resume(self) -> None:
        """End a pause."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses and self._calls is not None:
                self._calls.install()
        GRADIENT_HOOKS.restore(self._thread.hooks.pop())

    def make_call(
        self, api: MindSporeApi, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Make a call of an API, and tell of it."""
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
        """Call a cell, and tell of it."""
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
        """Run what was compiled: a call from outside, of which no part is seen."""
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
        """Tell of a function that a compiler follows, and take away what it must not read."""
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
        """Put back what was taken away, and tell of what the function returned."""
        if not self._thread.captures:  # the first listener came while the function ran
            return
        self.resume()
        with self.suppress_calls():
            _end_calls(self._thread.captures.pop(), None if raised else context.ret, raised=raised)

    def run_region(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, again: bool
    ) -> Any:
        """Run a region that is recomputed; one of a cell that is an API is part of its call."""
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
    except Exception as error:  # the job goes on, if need be without our hooks
        _logger.debug("hooks could not be removed before a compilation", exc_info=error)
        return []


CALL_INTERCEPTION = CallInterception()
"""The one of this process: attributes of MindSpore are there once."""

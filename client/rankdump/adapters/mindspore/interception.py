"""Stands before every function, method, primitive and cell for as long as somebody listens.

MindSpore has no mode that sees all calls, as torch has: attributes are replaced instead, and put
back when the last listener leaves, and while a compiler reads the program. Calls made through a
name that was imported before (`from mindspore.ops import relu`) are not seen.

What runs inside a call of an API, an optimizer or a compiled region is none of the program's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rankdump.adapters.mindspore.catalogue import Api
from rankdump.adapters.mindspore.compiled import CompiledCall
from rankdump.adapters.mindspore.framework import (
    captured_arguments,
    in_graph_mode,
    is_method_of,
    is_optimizer,
    recomputed_by_method,
)
from rankdump.adapters.mindspore.gradient_hooks import HOOKS, RemovedHooks
from rankdump.adapters.mindspore.listener import Arguments, Keywords, Listener
from rankdump.adapters.mindspore.replacing import Replacements, calls, compilers
from rankdump.adapters.mindspore.tensors import is_tensor
from rankdump.hook import leaves_of_call

logger = logging.getLogger(__name__)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        """How many calls are open inside which nothing is the program's own."""
        self.hooks: list[RemovedHooks] = []
        """Hooks that are off while a compiler reads, of the compilation begun last at the end."""
        self.captures: list[list[tuple[Listener, object]]] = []
        """Who was told of functions that a compiler follows now, of the innermost at the end."""


class Interception:
    """All replaced attributes of this process, and who listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._thread = _Thread()
        self._calls: Replacements | None = None
        self._compilers: Replacements | None = None
        self._pauses = 0

    def listen(self, listener: Listener, *, first: bool = False) -> None:
        """Tell a listener of calls from now on; one that begins iterations before all others."""
        with self._lock:
            known = self._listeners
            self._listeners = (listener, *known) if first else (*known, listener)
            if self._calls is None:
                self._calls, self._compilers = calls(self), compilers(self)
                self._compilers.install()
                if not self._pauses:
                    self._calls.install()

    def leave(self, listener: Listener) -> None:
        """Tell a listener no more; with the last one everything is put back as it was."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            if not self._listeners and self._calls is not None and self._compilers is not None:
                self._calls.remove()
                self._compilers.remove()
                self._calls = self._compilers = None

    @contextmanager
    def silence(self) -> Generator[None]:
        """Take what runs inside for no call of the program's."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def pause(self, args: Arguments, kwargs: Keywords) -> None:
        """Take all that is ours away for a while: a compiler is going to read the program.

        It reads the program's functions, the parameters, and the tensors of the call.
        """
        self._thread.hooks.append(_hooks_taken_off(args, kwargs))
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
        HOOKS.put_back(self._thread.hooks.pop())

    def call(self, api: Api, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of an API, and tell of it."""
        if self._thread.depth:
            return function(*args, **kwargs)
        with self.silence():
            opened = [(one, one.call_begins(api, args, kwargs)) for one in self._listeners]
            result, raised = None, True
            try:
                result = function(*args, **kwargs)
                raised = False
            finally:
                for one, token in reversed(opened):
                    one.call_ends(token, result, raised=raised)
            return result

    def cell(self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        """Call a cell, and tell of it."""
        if is_optimizer(cell):
            return self._optimize(function, cell, args, kwargs)
        inside = self._thread.depth > 0
        compiled = in_graph_mode()
        closed = compiled or any(one.hides(cell) for one in self._listeners)
        with self.silence():
            opened = [
                (one, one.cell_begins(cell, args, kwargs, inside=inside)) for one in self._listeners
            ]
            if compiled and not inside:
                opened += self._begin_compiled(CompiledCall(cell), args, kwargs)
        result, raised = None, True
        try:
            if closed:
                with self.silence():
                    result = function(cell, *args, **kwargs)
            else:
                result = function(cell, *args, **kwargs)
            raised = False
        finally:
            with self.silence():
                _end(opened, result, raised=raised)
        return result

    def compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what was compiled: a call from outside, of which no part is seen."""
        executor, *given = args
        call = CompiledCall.of(executor.fn, executor.obj)
        if self._thread.depth or call.internal:
            with self.silence():
                return function(*args, **kwargs)
        if executor.obj is not None:
            del given[0]
        with self.silence():
            opened = self._begin_compiled(call, given, kwargs)
            result, raised = None, True
            try:
                result = function(*args, **kwargs)
                raised = False
            finally:
                _end(opened, result, raised=raised)
            return result

    def capture_begins(self, context: Any) -> None:
        """Tell of a function that a compiler follows, and take away what it must not read."""
        args, kwargs = captured_arguments()
        opened: list[tuple[Listener, object]] = []
        if not self._thread.depth:
            of_cell = bool(args) and is_method_of(context.fn, args[0])
            call = CompiledCall.of(context.fn, args[0] if of_cell else None)
            with self.silence():
                opened = self._begin_compiled(call, args[1:] if of_cell else args, kwargs)
        self._thread.captures.append(opened)
        self.pause(args, kwargs)

    def capture_ends(self, context: Any, *, raised: bool) -> None:
        """Put back what was taken away, and tell of what the function returned."""
        if not self._thread.captures:  # the first listener came while the function ran
            return
        self.resume()
        with self.silence():
            _end(self._thread.captures.pop(), None if raised else context.ret, raised=raised)

    def region(self, function: Callable[..., Any], args: Any, kwargs: Any, *, again: bool) -> Any:
        """Run a region that is recomputed; one of a cell that is an API is part of its call."""
        method_of = recomputed_by_method(args[0])
        if method_of is not None and any(one.hides(method_of) for one in self._listeners):
            with self.silence():
                return function(*args, **kwargs)
        ends = [one.region_begins(args[0], again=again) for one in self._listeners]
        try:
            return function(*args, **kwargs)
        finally:
            for end in reversed(ends):
                end()

    def _optimize(self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        with self.silence():
            for one in self._listeners:
                one.optimizer_begins(cell, args, kwargs)
            result = function(cell, *args, **kwargs)
            for one in self._listeners:
                one.optimized(cell)
        return result

    def _begin_compiled(
        self, call: CompiledCall, args: Arguments, kwargs: Keywords
    ) -> list[tuple[Listener, object]]:
        return [(one, one.compiled_begins(call, args, kwargs)) for one in self._listeners]


def _end(opened: list[tuple[Listener, object]], result: object, *, raised: bool) -> None:
    for one, token in reversed(opened):
        one.cell_ends(token, result, raised=raised)


def _hooks_taken_off(args: Arguments, kwargs: Keywords) -> RemovedHooks:
    try:
        tensors = [leaf.value for leaf in leaves_of_call(args, kwargs) if is_tensor(leaf.value)]
        return HOOKS.take_off(tensors)
    except Exception as error:  # the job goes on, if need be without our hooks
        logger.debug("hooks stay on while code is compiled", exc_info=error)
        return []


INTERCEPTION = Interception()
"""The one of this process: attributes of MindSpore are there once."""

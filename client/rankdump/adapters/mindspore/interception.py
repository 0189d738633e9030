"""Stands before every function, method, primitive and cell for as long as somebody listens.

MindSpore has no mode that sees all calls, as torch has: attributes are replaced instead, and put
back when the last listener leaves, and while a compiler reads the program. Calls made through a
name that was imported before (`from mindspore.ops import relu`) are not seen.

What runs inside a call of an API, an optimizer or a compiled region is none of the program's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rankdump.adapters.mindspore.catalogue import Api
from rankdump.adapters.mindspore.framework import in_graph_mode, is_optimizer, recomputed_by_method
from rankdump.adapters.mindspore.replacing import Replacements, calls, compilers

COMPILED = "compiled MindSpore code (graph mode, jit) is observed from outside only"
"""What a listener says once when it meets some."""

Arguments = Sequence[object]
Keywords = Mapping[str, object]


class Listener:
    """Is told of calls, on the thread that makes them; passes over what it does not redefine.

    No method may raise.
    """

    def call_begins(self, api: Api, args: Arguments, kwargs: Keywords) -> object:
        """Take a call that is inside no other; what is returned is given to `call_ends`."""
        return None

    def call_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Take the result of a call; None when it raised."""

    def cell_begins(self, cell: Any, args: Arguments, kwargs: Keywords, *, inside: bool) -> object:
        """Take a call of a cell; `inside` says that a call of an API is under way."""
        return None

    def cell_ends(self, token: object, result: object, *, raised: bool) -> None:
        """Take the result of a call of a cell; None when it raised."""

    def hides(self, cell: Any) -> bool:
        """Return whether a cell is an API itself, so that nothing inside it is one."""
        return False

    def region_begins(self, cell: Any, *, again: bool) -> Callable[[], object]:
        """Take the begin of a region that is recomputed; what is returned is called at its end."""
        return bool

    def optimized(self, optimizer: Any) -> None:
        """Take note that an optimizer's step is over."""

    def compiled(self) -> None:
        """Take note that something runs that was compiled."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        """How many calls are open inside which nothing is the program's own."""


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

    def pause(self) -> None:
        """Put the program's functions back for a while: a compiler is going to read them."""
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
                self._tell_compiled()
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
                for one, token in reversed(opened):
                    one.cell_ends(token, result, raised=raised)
        return result

    def compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what was compiled: a call from outside, of which no part is seen."""
        inside = self._thread.depth > 0
        with self.silence():
            if not inside:
                self._tell_compiled()
            return function(*args, **kwargs)

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
            result = function(cell, *args, **kwargs)
            for one in self._listeners:
                one.optimized(cell)
        return result

    def _tell_compiled(self) -> None:
        for one in self._listeners:
            one.compiled()


INTERCEPTION = Interception()
"""The one of this process: attributes of MindSpore are there once."""

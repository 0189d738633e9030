"""What is put in the place of MindSpore's functions, methods, primitives, cells and compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from rankdump.adapters.mindspore.attributes import Attributes
from rankdump.adapters.mindspore.catalogue import Api, api_of_primitive, places
from rankdump.adapters.mindspore.framework import (
    BYTECODE_CAPTURE,
    COMPILED_CALLS,
    COMPILERS,
    Cell,
    RecomputedCell,
)


class Caller(Protocol):
    """Who makes the calls that are intercepted."""

    def call(self, api: Api, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of an API."""
        ...

    def cell(self, function: Callable[..., Any], cell: Any, args: Any, kwargs: Any) -> Any:
        """Call a cell."""
        ...

    def compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what was compiled."""
        ...

    def region(self, function: Callable[..., Any], args: Any, kwargs: Any, *, again: bool) -> Any:
        """Run a region that is recomputed; the cell is its first argument."""
        ...

    def pause(self) -> None:
        """A compiler is going to read the program."""
        ...

    def resume(self) -> None:
        """A compiler has read the program."""
        ...


def calls(caller: Caller) -> Attributes:
    """Return what stands before the program's calls."""
    attributes = Attributes()
    for place in places():
        of_primitive = place.name == "__call__"
        wrap = _primitive if of_primitive else _function
        attributes.plan(place.owner, place.name, wrap(caller, place.api, place.function))
    call = Cell.__call__

    @functools.wraps(call)
    def of_cell(self: Any, *args: Any, **kwargs: Any) -> Any:
        return caller.cell(call, self, args, kwargs)

    attributes.plan(Cell, "__call__", of_cell)
    for name, again in (("construct", False), ("bprop", True)):
        ours = _region(caller, getattr(RecomputedCell, name), again=again)
        attributes.plan(RecomputedCell, name, ours)
    return attributes


def _function(caller: Caller, api: Api, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.call(api, function, args, kwargs)

    return observed


def _primitive(caller: Caller, _: Api, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        api = api_of_primitive(self)
        if api is None:
            return function(self, *args, **kwargs)
        return caller.call(api, functools.partial(function, self), args, kwargs)

    return observed


def _region(caller: Caller, function: Callable[..., Any], *, again: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return caller.region(function, args, kwargs, again=again)

    return observed


def compilers(caller: Caller) -> Attributes:
    """Return what takes the other attributes away while the program is compiled."""
    attributes = Attributes()
    for owner, name in COMPILERS:
        attributes.plan(owner, name, _compiler(caller, getattr(owner, name)))
    for owner, name in COMPILED_CALLS:
        attributes.plan(owner, name, _compiled(caller, getattr(owner, name)))
    enter, leave = BYTECODE_CAPTURE.__enter__, BYTECODE_CAPTURE.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        caller.pause()
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            caller.resume()

    attributes.plan(BYTECODE_CAPTURE, "__enter__", entered)
    attributes.plan(BYTECODE_CAPTURE, "__exit__", left)
    return attributes


def _compiler(caller: Caller, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        caller.pause()
        try:
            return function(*args, **kwargs)
        finally:
            caller.resume()

    return compiling


def _compiled(caller: Caller, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def running(*args: Any, **kwargs: Any) -> Any:
        return caller.compiled(function, args, kwargs)

    return running

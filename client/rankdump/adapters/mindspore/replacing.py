"""What is put in the place of MindSpore's functions, methods, primitives, cells and compilers.

All at once, and all at once put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rankdump.adapters.mindspore.catalogue import Api, api_of_primitive, places
from rankdump.adapters.mindspore.framework import (
    BYTECODE_CAPTURE,
    COMPILED_CALLS,
    COMPILERS,
    Cell,
    RecomputedCell,
)

_INHERITED = object()
"""Stands for what an owner did not have itself."""


@dataclass(frozen=True, slots=True)
class _Replaced:
    owner: Any
    name: str
    own: object
    ours: Callable[..., Any]


class Replacements:
    """Attributes of modules and classes that others stand in for, and that come back."""

    def __init__(self) -> None:
        self._planned: dict[tuple[int, str], _Replaced] = {}

    def plan(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Replace an attribute from the next `install` on; the first plan for it counts."""
        own = _attributes(owner).get(name, _INHERITED)
        self._planned.setdefault((id(owner), name), _Replaced(owner, name, own, ours))

    def install(self) -> None:
        """Put what is planned in its place."""
        for planned in self._planned.values():
            setattr(planned.owner, planned.name, planned.ours)

    def remove(self) -> None:
        """Put back what was there, except where somebody else replaced it meanwhile."""
        for planned in self._planned.values():
            if _attributes(planned.owner).get(planned.name) is not planned.ours:
                continue
            if planned.own is _INHERITED:
                delattr(planned.owner, planned.name)
            else:
                setattr(planned.owner, planned.name, planned.own)


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

    def pause(self, args: Any, kwargs: Any) -> None:
        """A compiler is going to read the program, for a call with these arguments."""
        ...

    def resume(self) -> None:
        """A compiler has read the program."""
        ...

    def capture_begins(self, context: Any) -> None:
        """A function runs, and a compiler follows it."""
        ...

    def capture_ends(self, context: Any, *, raised: bool) -> None:
        """A function has run that a compiler followed."""
        ...


def calls(caller: Caller) -> Replacements:
    """Return what stands before the program's calls."""
    found = Replacements()
    for place in places():
        of_primitive = place.name == "__call__"
        wrap = _primitive if of_primitive else _function
        found.plan(place.owner, place.name, wrap(caller, place.api, place.function))
    call = Cell.__call__

    @functools.wraps(call)
    def of_cell(self: Any, *args: Any, **kwargs: Any) -> Any:
        return caller.cell(call, self, args, kwargs)

    found.plan(Cell, "__call__", of_cell)
    for name, again in (("construct", False), ("bprop", True)):
        ours = _region(caller, getattr(RecomputedCell, name), again=again)
        found.plan(RecomputedCell, name, ours)
    return found


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


def compilers(caller: Caller) -> Replacements:
    """Return what takes the other attributes away while the program is compiled."""
    found = Replacements()
    for owner, name in COMPILERS:
        found.plan(owner, name, _compiler(caller, getattr(owner, name)))
    for owner, name in COMPILED_CALLS:
        found.plan(owner, name, _compiled(caller, getattr(owner, name)))
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


def _compiler(caller: Caller, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        caller.pause(args, kwargs)
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


def _attributes(owner: Any) -> Mapping[str, object]:
    found: Mapping[str, object] = owner.__dict__
    return found

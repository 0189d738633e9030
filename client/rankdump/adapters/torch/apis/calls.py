"""Follows calls of functions and of modules through every thread, and numbers those that count.

A function that is called inside another call is not seen. torch's own modules are calls by
themselves, inside one another as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from rankdump.adapters.api_calls import CallNumbers
from rankdump.adapters.torch.apis.frames import Frame, Thread
from rankdump.adapters.torch.apis.mode import ApiMode
from rankdump.adapters.torch.apis.modules import Role, role_of
from rankdump.adapters.torch.apis.names import Api, api
from rankdump.adapters.torch.apis.recording import Calling, Records
from rankdump.adapters.torch.apis.sites import Sites, Whose
from rankdump.adapters.torch.guard import shielded
from rankdump.adapters.torch.internals import called_past_modes, has_mode, put_mode, take_mode
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.raising import (
    comes_from,
    fault_of,
    handled_now,
    raised_since,
)
from rankdump.adapters.torch.scopes import COMPILED, Operator
from rankdump.contract.layout.api_name import ApiCall


class ApiCalls:
    """The calls of a process: of functions by anybody, of modules within one model."""

    def __init__(
        self,
        observer: Observer,
        sites: Sites,
        records: Records,
        model_called: Callable[[], None],
    ) -> None:
        """`model_called` is told when a call of the model itself begins."""
        self._model_called = model_called
        self.mode = ApiMode(self)
        self._observer = observer
        self._sites = sites
        self._records = records
        self._roles: dict[Operator, Role] = {}
        self._numbers = CallNumbers()
        self._thread = Thread()
        self._generation = 0

    def restart(self) -> None:
        """Listen in this thread, in which nothing that was hidden still runs."""
        self._generation += 1
        self._frames()
        if not self._thread.running:
            self._put()

    def follow(
        self,
        found: Api,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """Make a call of a function, and tell of it if it counts."""
        # A subclass is told of an operator as a whole, and does with it what it likes.
        if found.opens and (not found.kind or set(types) <= {Tensor}):
            return self._opened(function, types, args, kwargs)
        calling = self._called(found, args, kwargs, None if frame is None else frame.f_back)
        thread = self._thread
        thread.running += 1
        try:
            result = function(*args, **kwargs)
        except BaseException:
            if calling is not None:
                shielded(self._raised, self.failed, calling)
            raise
        finally:
            thread.running -= 1
        if calling is not None:
            shielded(self._records.end, self.failed, calling, result)
        return result

    def enter(
        self, operator: Operator, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        """Open a call of a module."""
        thread, frames = self._thread, self._frames()
        if thread.running:
            return
        self._meet()
        role = self._role(operator)
        frame = Frame(operator, role, handled_now())
        frames.append(frame)
        if not role.layer:
            self._model_called()
        if role.hides:
            frame.took_mode = take_mode(self.mode)
        if role.api is not None:
            number = self._numbers.next(role.api.op_type)
            if self._observer.armed:
                self._mark(role)
                frame.calling = _calling(role.api, number)
                self._records.begin(frame.calling, args, kwargs, inspect.currentframe())

    def leave(self, operator: Operator, result: object) -> None:
        """Close a call of a module, and with it those inside that never returned."""
        thread, frames = self._thread, self._frames()
        at = len(frames) - 1
        while at >= 0 and frames[at].operator is not operator:
            at -= 1
        if at < 0 or thread.running:
            return
        closing = frames[at:]
        del frames[at:]
        if any(frame.took_mode for frame in closing):
            self._put()
        for frame in reversed(closing[1:]):
            if frame.calling is not None:
                self._records.end(frame.calling, None)
        self._close(closing[0], result)

    def pause(self) -> None:
        """Hear nothing in this thread until it goes on."""
        self._thread.paused = take_mode(self.mode)

    def resume(self) -> None:
        """Go on listening where it was paused."""
        if self._thread.paused:
            self._thread.paused = False
            self._put()

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.failed(error)

    def _close(self, frame: Frame, result: object) -> None:
        thread, error = self._thread, raised_since(frame.handled)
        raised = error is not None and not comes_from(error, thread.fault)
        thread.fault = None if error is None else fault_of(error)
        if frame.calling is not None:
            self._records.end(frame.calling, result, raised=raised)
        elif frame.role.api is None and error is None and self._observer.armed:
            self._mark(frame.role)

    def _mark(self, role: Role) -> None:
        if role.layer:
            self._records.mark(role.layer, inspect.currentframe())

    def _opened(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run what is no call itself, and go on listening: what it calls are calls."""
        put_mode(self.mode)
        try:
            return called_past_modes(function, types, args, kwargs)
        finally:
            take_mode(self.mode)

    def _called(
        self, found: Api, args: Sequence[Any], kwargs: Mapping[str, Any], frame: FrameType | None
    ) -> Calling | None:
        """Begin the call of a function; None when nothing is to be told of it."""
        try:
            named = self._named(found, args, frame)
            if named is None:
                return None
            number = self._numbers.next(named.op_type)
            if not self._observer.armed:
                return None
        except Exception as error:
            self.failed(error)
            return None
        calling = _calling(named, number)
        shielded(self._records.begin, self.failed, calling, args, kwargs, frame)
        return calling

    def _named(self, found: Api, args: Sequence[Any], frame: FrameType | None) -> Api | None:
        """Return what a function is called where it stands; None when it is no call there."""
        whose = self._sites.whose(frame)
        if whose is not Whose.USER:
            if whose is Whose.COMPILED:
                self._observer.recorder.warn_once(COMPILED)
            return None
        if found.kind != "Tensor" or frame is None:
            return found
        function, operator = self._sites.behind(frame)
        if function:
            return api("Functional", function)
        return api("Tensor", operator) if operator else found

    def _meet(self) -> None:
        """Listen in a thread in which a module is called for the first time."""
        if not self._thread.met:
            self._put()

    def _put(self) -> None:
        self._thread.met = True
        if not has_mode(self.mode):
            put_mode(self.mode)

    def _raised(self, calling: Calling) -> None:
        self._records.end(calling, None, raised=True)

    def _role(self, operator: Operator) -> Role:
        role = self._roles.get(operator)
        if role is None:
            role = self._roles[operator] = role_of(operator)
        return role

    def _frames(self) -> list[Frame]:
        thread = self._thread
        if thread.generation != self._generation:
            thread.frames.clear()
            thread.generation = self._generation
        return thread.frames


def _calling(found: Api, number: int) -> Calling:
    call = ApiCall(found.kind, found.name, number)
    return Calling(call, call.name)

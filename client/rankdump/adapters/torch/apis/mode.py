"""The function mode through which torch tells of every call in the threads that it is in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from rankdump.adapters.torch.apis.names import Api, Callables
from rankdump.adapters.torch.guard import uncompiled
from rankdump.adapters.torch.internals import take_mode, traced


class Follower(Protocol):
    """What is asked to make the calls that a mode hears of."""

    def follow(
        self,
        found: Api,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """Make a call of an API, asked for above a frame, and return or raise what it does."""
        ...


class ApiMode(TorchFunctionMode):
    """Hears of calls in the threads that it was put into.

    What a call calls itself is not heard: torch takes a mode off the stack while it runs.
    """

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower: Follower | None = follower
        self._callables = Callables()

    @uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a call."""
        follower = self._follower
        # The compiler goes through this line, and no further.
        if follower is None or is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        try:
            found = self._callables[func]
        except TypeError:  # one that cannot be hashed is a user's own
            found = None
        # Most of what is asked of tensors is no call: it ends here.
        if found is None or traced():
            return func(*args, **(kwargs or {}))
        return follower.follow(found, func, types, args, kwargs or {}, inspect.currentframe())

    def retire(self) -> None:
        """Hear nothing any more, in any thread, and leave this one."""
        self._follower = None
        take_mode(self)

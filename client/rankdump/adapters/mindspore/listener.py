"""What hears of the calls that are intercepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankdump.adapters.mindspore.catalogue import Api
from rankdump.adapters.mindspore.compiled import CompiledCall

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

    def optimizer_begins(self, optimizer: Any, args: Arguments, kwargs: Keywords) -> None:
        """Take what an optimizer's step is given."""

    def optimized(self, optimizer: Any) -> None:
        """Take note that an optimizer's step is over."""

    def compiled_begins(self, call: CompiledCall, args: Arguments, kwargs: Keywords) -> object:
        """Take a call of compiled code that is inside no other call.

        What is returned is given to `cell_ends`. A call of a cell comes here after `cell_begins`.
        """
        return None

"""Finds out when an asynchronous collective is complete, without keeping it alive.

A work that has a future says so itself. One that has none (messages, with gloo) is complete
when it is waited for, or at the latest when the script lets go of it.
"""

# The work is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from rankdump.adapters.torch.communication import ANY_SOURCE, Pending, process
from rankdump.contract.events import EventKind

_work: Any = getattr(dist, "Work", None)


class Waits:
    """The replaced `Work.wait`, and the works nobody has waited for yet."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._replaced: tuple[object, object] | None = None

    def install(self) -> None:
        """Replace the method."""
        original: Callable[..., Any] = _work.wait
        waits = self

        @wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(work, *args, **kwargs)
            finally:
                waits.ended(work)

        # What stands in the class binds; `original`, read from it, does not.
        self._replaced = (vars(_work)["wait"], wait)
        _work.wait = wait

    def remove(self) -> None:
        """Put the method back; works still under way end when they are let go."""
        if self._replaced is not None and vars(_work)["wait"] is self._replaced[1]:
            _work.wait = self._replaced[0]
        self._replaced = None

    def watch(self, work: Any, pending: Pending) -> None:
        """Finish the event when the work is complete; without a work it already is."""
        if not isinstance(work, dist.Work):
            process.end(pending)
        elif not pending.begun:
            # Nobody records it; only its number mattered, unless the end is to tell it.
            if pending.sequence is None:
                self._wait_for(work, pending)
        elif not _finish_by_future(work, pending):
            self._wait_for(work, pending)

    def ended(self, work: dist.Work) -> None:
        """Note that a wait for the work has returned."""
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        try:
            sender = _sender(work, pending)
        except Exception:  # a wait that failed: nobody knows who would have sent
            sender = None
        process.end(pending, sender)

    def _wait_for(self, work: dist.Work, pending: Pending) -> None:
        self._pending[id(work)] = pending
        weakref.finalize(work, self._let_go, id(work)).atexit = False

    def _let_go(self, identity: int) -> None:
        process.end(self._pending.pop(identity, None))


def _finish_by_future(work: dist.Work, pending: Pending) -> bool:
    """Have the work's future finish the event; False when it has none, or none of this kind."""
    if pending.request.on_device or not pending.request.kind.collective:
        return False
    try:
        future = work.get_future()
    except RuntimeError:
        return False

    def done(_: object) -> None:
        process.end(pending)

    future.add_done_callback(done)
    return True


def _sender(work: Any, pending: Pending) -> int | None:
    """Return the global rank of who sent a message from anyone, once it is there."""
    request = pending.request
    if request.kind is not EventKind.RECV or request.peer != ANY_SOURCE:
        return None
    return request.group.ranks[work._source_rank()]

"""Tells what belongs to one process that it finds itself in a child of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every process forked from now on, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)

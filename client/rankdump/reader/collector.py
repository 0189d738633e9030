"""Python's collector of cycles, out of the way of who makes many values that hold none.

Each time their number has grown by a quarter it would look at every object of the process again:
a seventh of the time that opening a tree takes.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None, None, None]:
    """Pause it, in all threads; it goes on afterwards if it went before."""
    went = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if went:
            gc.enable()

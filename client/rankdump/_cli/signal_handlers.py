"""Signal handlers that are installed during a block, for commands that forward signals
to a child.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None],
    numbers: tuple[signal.Signals, ...] = FORWARDED_SIGNALS,
) -> Generator[None, None, None]:
    """Install a handler during a block; signals that are ignored stay ignored."""
    # Under nohup, SIGHUP has to stay ignored.
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

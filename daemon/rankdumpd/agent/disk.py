"""Room on the disk of a tree, looked up at most once a second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SAMPLE_S = 1.0

_log = logging.getLogger(__name__)


class DiskGauge:
    """Free and total bytes by root; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: dict[str, tuple[float, int, int]] = {}

    def room(self, root: Path) -> tuple[int, int]:
        """Return free and total bytes as of the last second."""
        name, now = str(root), self._clock()
        with self._lock:
            taken, free, total = self._samples.get(name, (now - 2 * _SAMPLE_S, 0, 0))
            if now - taken >= _SAMPLE_S:
                free, total = _room(root)
                self._samples[name] = (now, free, total)
            return free, total


def _room(root: Path) -> tuple[int, int]:
    while not root.exists() and root != root.parent:
        root = root.parent
    try:
        found = os.statvfs(root)
    except OSError as error:
        _log.warning("cannot look up the room under %s: %s", root, error, extra={"root": str(root)})
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

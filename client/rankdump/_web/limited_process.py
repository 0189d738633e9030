"""Processes of the server for work whose memory or time is not known in advance. Each is spawned,
has a pipe to the server, and limits its own address space.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Not forked, because threads of the server may hold locks.
SPAWN = get_context("spawn")
_END_S = 5.0
_MARGIN_BYTES = 1 << 30
"""Extra address space for threads and allocators, which map more than they use."""


class LimitedProcess:
    """A process that runs one function with its end of a pipe as the first argument."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        """Start the process; the target gets the pipe as its first argument."""
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def wait_until_ended(self) -> int:
        """Wait until the process ends; return its exit code, minus the number of a signal."""
        self._process.join(_END_S)
        self.stop()
        return self._process.exitcode or 0


def limit_address_space(memory_bytes: int) -> None:
    """Limit the address space of this process to what it has mapped so far plus `memory_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2 * memory_bytes + _MARGIN_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

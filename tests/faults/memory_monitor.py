"""Memory and descriptors of the running daemons."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from faults.deployment import MIB, FaultDeployment
from faults.descriptor_limit import lasting_descriptors, resident_bytes
from faults.values import ProcessGrowth

LONG_S = 60.0
"""Shorter lives are not checked."""
_WARM_S = 30.0
"""Time in which a process allocates its threads, their arenas and its cache of folders."""
_EVERY_S = 1.0


class MemoryMonitor:
    """Thread that samples memory and descriptors of every daemon process."""

    def __init__(self, deployment: FaultDeployment) -> None:
        self._deployment = deployment
        self._seen: defaultdict[tuple[str, int], list[tuple[float, int, int]]] = defaultdict(list)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rig-memory-monitor")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()

    def growths(self) -> tuple[ProcessGrowth, ...]:
        """Return how each process that lived long enough has grown."""
        lives = [(name, pid, seen) for (name, pid), seen in self._seen.items()]
        return tuple(
            _growth(f"{name} ({pid})", seen)
            for name, pid, seen in lives
            if seen[-1][0] - seen[0][0] >= LONG_S
        )

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            for name, pid in self._pids():
                with contextlib.suppress(OSError):
                    now = time.monotonic(), resident_bytes(pid), lasting_descriptors(pid)
                    self._seen[name, pid].append(now)

    def _pids(self) -> Iterator[tuple[str, int]]:
        for process in (self._deployment.coordinator, *self._deployment.agents):
            if process.alive:
                yield process.name, process.pid
        for agent in self._deployment.agents:
            if agent.alive and agent.workers > 1:
                yield from ((f"worker of {agent.name}", pid) for pid in agent.worker_pids())


def _growth(who: str, seen: list[tuple[float, int, int]]) -> ProcessGrowth:
    tenth = len(seen) // 10
    warm = sum(at_s - seen[0][0] < _WARM_S for at_s, _, _ in seen)
    begin = max(tenth, warm)
    early, late = seen[begin : begin + tenth], seen[-tenth:]
    return ProcessGrowth(
        who,
        round(seen[-1][0] - seen[0][0], 1),
        early_mib=round(median(bytes_ for _, bytes_, _ in early) / MIB, 1),
        late_mib=round(median(bytes_ for _, bytes_, _ in late) / MIB, 1),
        early_descriptors=round(median(count for *_, count in early)),
        late_descriptors=round(median(count for *_, count in late)),
    )

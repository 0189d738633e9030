"""What the ledger takes, and the room that its disk has left for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankdump.contract.room import LedgerStatus
from rankdump.contract.sizes import size
from rankdumpd.agent.disk import DiskGauge, look_up
from rankdumpd.agent.policy import Space

NEAR_BYTES = 256 << 20
_NEAR_PARTS = 10
"""Of a small disk, one of so many."""


class LedgerRoom:
    """Looks at the state folder at most once a second; never waits for long."""

    def __init__(self, folder: Path, look_up: Callable[[Path], Space] = look_up) -> None:
        self._folder, self._look_up = folder, look_up
        self._gauge = DiskGauge(look_up=self._measure)
        self._used_bytes = 0

    def status(self) -> LedgerStatus:
        """Return how much there is; all zero where the disk never said anything."""
        space = self._gauge.space(self._folder)
        return LedgerStatus(
            str(self._folder), self._used_bytes, space.free_bytes, space.total_bytes
        )

    def findings(self) -> list[str]:
        """Return that the disk is nearly full, or silent."""
        return [*warnings(self.status()), *self._gauge.findings()]

    def _measure(self, folder: Path) -> Space:
        space = self._look_up(folder)
        # The database, its log and its index: they come and go.
        self._used_bytes = sum(path.stat().st_size for path in folder.glob("ledger.sqlite*"))
        return space


def warnings(ledger: LedgerStatus) -> list[str]:
    """Return a sentence when little is left: ranks wait while the ledger cannot grow."""
    near = min(NEAR_BYTES, ledger.total_bytes // _NEAR_PARTS)
    if ledger.free_bytes >= near:
        return []
    return [
        f"state folder {ledger.folder}: {size(ledger.free_bytes)} free of "
        f"{size(ledger.total_bytes)}, the ledger takes {size(ledger.used_bytes)}; when it is full "
        f"ranks wait (agent.state_dir)"
    ]

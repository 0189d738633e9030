"""Which iterations of a job are published, and what came too late for them. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rankdump.contract.events import EventColumns
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.kept import LateRow, PublishedRow, Row


class Published:
    """Iterations of all runs of a job; the rows it hands to its owner are to be kept."""

    def __init__(self, job_id: str, rows: dict[object, Row]) -> None:
        self._job_id = job_id
        self._changed = rows
        # Of iterations that are begun and not ended: a crash must not leave a trace of them.
        self._begun: dict[tuple[int, int], dict[object, Row]] = {}
        self._rows: dict[tuple[int, int], PublishedRow] = {}
        self._late: dict[tuple[int, int, int], int] = {}
        self.iterations = 0
        """Those whose order is in the tree."""
        self.events = 0

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._rows

    def begin(self, row: PublishedRow) -> None:
        """From now on what comes of an iteration is late."""
        self._rows[row.run, row.iteration] = row
        self._begun[row.run, row.iteration] = {}

    def end(self, run: int, iteration: int, *, written: bool) -> None:
        """Count an iteration as published, or as lost."""
        row = self._rows[run, iteration]
        if not written:
            row = self._rows[run, iteration] = dataclasses.replace(row, events=0)
        self._count(row)
        self._changed.update(self._begun.pop((run, iteration)))
        self._changed["published", run, iteration] = row

    def recall(self, row: PublishedRow) -> None:
        """Remember an iteration."""
        self._rows[row.run, row.iteration] = row
        self._count(row)

    def recall_late(self, row: LateRow) -> None:
        """Remember what came too late."""
        self._late[row.run, row.iteration, row.rank] = row.events

    def late(self, run: int, iteration: int, rank: int, part: EventColumns) -> None:
        """Count events that came too late; what a rank repeats is not late."""
        row = self._rows.get((run, iteration))
        positions = part.columns["position"]
        count = len(part)
        changed = self._begun.get((run, iteration), self._changed)
        if row is not None:
            if row.finished is None or rank in row.finished:
                return
            count = int((positions > row.positions.get(rank, -1)).sum())
            if not count:
                return
            reached = {**row.positions, rank: int(positions.max())}
            row = self._rows[run, iteration] = dataclasses.replace(row, positions=reached)
            changed["published", run, iteration] = row
        key = run, iteration, rank
        self._late[key] = self._late.get(key, 0) + count
        changed[("late", *key)] = LateRow(self._job_id, *key, self._late[key])

    def late_findings(self, most: int) -> Iterator[Finding]:
        """Say what came too late."""
        for (_, iteration, rank), count in list(self._late.items())[:most]:
            text = (
                f"iteration {iteration}: {count} events of rank {rank} came after it was "
                "published and are not in the order"
            )
            yield Finding(FindingKind.LATE, iteration, text, ranks=(rank,))

    def _count(self, row: PublishedRow) -> None:
        self.events += row.events
        self.iterations += row.events > 0

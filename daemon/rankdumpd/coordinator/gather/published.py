"""Which iterations of a job are published, and what came too late for them. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rankdump.contract.events import EventColumns
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.kept import LateRow, PublishedRow, Row

_EVERY = (1 << 63) - 1


class Published:
    """Iterations of all runs of a job; the rows it hands to its owner are to be kept."""

    def __init__(self, job_id: str, rows: dict[object, Row]) -> None:
        self._job_id = job_id
        self._changed = rows
        # Of iterations that are begun and not ended: a crash must not leave a trace of them.
        self._begun: dict[tuple[int, int], dict[object, Row]] = {}
        self._rows: dict[int, dict[int, PublishedRow]] = {}
        """By iteration and run."""
        self._late: dict[tuple[int, int, int], int] = {}
        self._starts: dict[int, int] = {}
        """Of ranks in the present run: how often they had started over."""
        self.run = 0
        """The present one; a rank that starts over begins a new one."""
        self.iterations = 0
        """Those whose order is in the tree."""
        self.events = 0

    def __contains__(self, iteration: int) -> bool:
        """Return whether the present run has published an iteration."""
        return self.run in self._rows.get(iteration, {})

    def enter(self, rank: int, start: int) -> bool:
        """Let a life of a rank be part of the present run; return whether a new one begins with
        it, because an earlier life of that rank is part of it.
        """
        before = self._starts.get(rank)
        if before is None:
            before = self._recalled_start(rank, start)
        begins = before < start
        if begins:
            self.run += 1
            self._starts.clear()
        self._starts[rank] = start if begins else before
        return begins

    def unknown(self, iteration: int, rank: int, start: int, part: EventColumns) -> EventColumns:
        """Return what of a rank's life stands in no order, and was not counted as late before.

        A rank's agent says again what its coordinator may have forgotten.
        """
        for row in self._rows.get(iteration, {}).values():
            if not row.has(rank) or row.start_of(rank) != start:
                continue
            beyond = part.columns["position"] > row.positions.get(rank, _EVERY)
            columns = {name: column[beyond] for name, column in part.columns.items()}
            part = dataclasses.replace(part, columns=columns)
        return part

    def begin(self, row: PublishedRow) -> None:
        """From now on what comes of an iteration is late."""
        self._keep(row)
        self._begun[row.run, row.iteration] = {}

    def end(self, run: int, iteration: int, *, written: bool) -> None:
        """Count an iteration as published, or as lost."""
        row = self._rows[iteration][run]
        if not written:
            row = dataclasses.replace(row, events=0)
            self._keep(row)
        self._count(row)
        self._changed.update(self._begun.pop((run, iteration)))
        self._changed["published", run, iteration] = row

    def recall(self, row: PublishedRow) -> None:
        """Remember an iteration."""
        self._keep(row)
        self._count(row)
        self.run = max(self.run, row.run)

    def recall_late(self, row: LateRow) -> None:
        """Remember what came too late."""
        self._late[row.run, row.iteration, row.rank] = row.events

    def late(self, run: int, iteration: int, rank: int, start: int, part: EventColumns) -> None:
        """Count events of a rank's life that came too late for the iteration of a run."""
        changed = self._begun.get((run, iteration), self._changed)
        row = self._rows.get(iteration, {}).get(run)
        if row is not None and (not row.has(rank) or row.start_of(rank) == start):
            reached = {**row.positions, rank: int(part.columns["position"].max())}
            starts = {**row.starts, rank: start} if row.start_of(rank) != start else row.starts
            row = dataclasses.replace(row, positions=reached, starts=starts)
            self._keep(row)
            changed["published", run, iteration] = row
        key = run, iteration, rank
        self._late[key] = self._late.get(key, 0) + len(part)
        changed[("late", *key)] = LateRow(self._job_id, *key, self._late[key])

    def late_findings(self, most: int) -> Iterator[Finding]:
        """Say what came too late."""
        for (_, iteration, rank), count in list(self._late.items())[:most]:
            text = (
                f"iteration {iteration}: {count} events of rank {rank} came after it was "
                "published and are not in the order"
            )
            yield Finding(FindingKind.LATE, iteration, text, ranks=(rank,))

    def _keep(self, row: PublishedRow) -> None:
        self._rows.setdefault(row.iteration, {})[row.run] = row

    def _recalled_start(self, rank: int, start: int) -> int:
        """Return which life of a rank an earlier process has published in the present run, or
        this one.
        """
        for runs in reversed(self._rows.values()):
            row = runs.get(self.run)
            if row is not None and row.has(rank):
                return row.start_of(rank)
        return start

    def _count(self, row: PublishedRow) -> None:
        self.events += row.events
        self.iterations += row.events > 0

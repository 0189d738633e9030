"""Events that are not published yet, by iteration. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rankdump.contract.events import OPEN, EventColumns

Parts: TypeAlias = list[tuple[int, EventColumns]]
"""Iterations, and the events of a batch that belong to each."""


@dataclass(slots=True)
class Pending:
    """What has come of one iteration."""

    iteration: int
    run: int
    first_s: float
    """When its first events came."""
    last_s: float
    """When anything of it last came."""
    root: str = ""
    """Tree of the job when its first events came; empty when none was named yet."""
    events: dict[int, list[EventColumns]] = field(default_factory=dict[int, list[EventColumns]])
    """By rank."""
    starts: dict[int, int] = field(default_factory=dict[int, int])
    """How often each of these ranks had started over."""
    lowest: dict[str, int] = field(default_factory=dict[str, int])
    """Of each agent, the first number that may have events here."""
    count: int = 0
    """Events of all ranks."""
    waits: bool = False
    """Something among them was not complete when it came."""

    def add(
        self,
        rank: int,
        part: EventColumns,
        *,
        start: int,
        origin: tuple[str, int],
        now_s: float,
    ) -> None:
        """Take a part of a batch; `origin` is its agent and the lowest number that its report may
        have.
        """
        self.events.setdefault(rank, []).append(part)
        self.starts[rank] = start
        self.count += len(part)
        self.lowest.setdefault(*origin)
        self.last_s = now_s
        if not self.waits:
            self.waits = bool((part.columns["end_position"] == OPEN).any())

    def reached(self) -> dict[int, int]:
        """Return how far each rank has come."""
        return {
            rank: max(int(batch.columns["position"].max()) for batch in batches)
            for rank, batches in self.events.items()
        }


def by_iteration(columns: EventColumns) -> Parts:
    """Return the events of each iteration of a batch, in rising order."""
    return list(_parts(columns))


def _parts(columns: EventColumns) -> Iterator[tuple[int, EventColumns]]:
    numbers = columns.columns["iteration"]
    if not len(numbers):
        return
    lowest = int(numbers.min())
    # Most batches lie within one iteration, and finding that out must not cost a sort.
    if lowest == int(numbers.max()):
        yield lowest, columns
        return
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order])) + 1
    for chosen in np.split(order, starts):
        part = {name: column[chosen] for name, column in columns.columns.items()}
        yield int(numbers[chosen[0]]), dataclasses.replace(columns, columns=part)

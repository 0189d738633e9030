"""Gives the names and communicators of all batches one numbering. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankdump.contract.events import Column, EventColumns, ProcessGroup


class Texts:
    """One string table for all batches; each table of theirs is translated once."""

    def __init__(self) -> None:
        self._index = {"": 0}
        self._known: dict[int, tuple[Sequence[str], Column]] = {}

    def places_of(self, names: Sequence[str], indexes: Column) -> Column:
        """Return the place here of each of those names, which a column points to."""
        # The table is kept with its translation, so that its id is not given to another one.
        places = self._known.get(id(names), (names, np.empty(0, "i4")))[1]
        if len(places) < len(names):
            grown = np.full(len(names), -1, "i4")
            grown[: len(places)] = places
            places = grown
            self._known[id(names)] = names, places
        found = places[indexes]
        if len(found) and found.min() < 0:
            used = np.zeros(len(places), bool)
            used[indexes] = True
            new: list[int] = np.flatnonzero(used & (places < 0)).tolist()
            for at in new:
                places[at] = self._index.setdefault(names[at], len(self._index))
            found = places[indexes]
        return found

    def all(self) -> tuple[str, ...]:
        """Return every text by its place."""
        return tuple(self._index)


class Groups:
    """Every communicator by name and members: two groups may share a name."""

    def __init__(self, events: Mapping[int, Sequence[EventColumns]]) -> None:
        self._index: dict[ProcessGroup, int] = {}
        self._sorted: dict[ProcessGroup, ProcessGroup] = {}
        self._own: dict[int, dict[str, ProcessGroup]] = {}
        self._declared: dict[str, dict[ProcessGroup, None]] = {}
        for batch in (batch for batches in events.values() for batch in batches):
            for name, group in self._groups_of(batch).items():
                self._declared.setdefault(name, {})[group] = None

    def places_of(self, rank: int, batch: EventColumns, indexes: Column) -> Column:
        """Return the place here of the group of each of those events of a batch."""
        used, inverse = np.unique(indexes, return_inverse=True)
        own = self._groups_of(batch)
        places: list[int] = []
        texts: list[int] = used.tolist()
        for text in texts:
            name = batch.names[text]
            group = own.get(name) or self._of_others(rank, name)
            places.append(self._index.setdefault(group, len(self._index)))
        return np.array(places, "i4")[inverse]

    def all(self) -> tuple[ProcessGroup, ...]:
        """Return every group by its place."""
        return tuple(self._index)

    def _groups_of(self, batch: EventColumns) -> dict[str, ProcessGroup]:
        own = self._own.get(id(batch.groups))
        if own is None:
            own = {group.name: self._normal(group) for group in batch.groups}
            self._own[id(batch.groups)] = own
        return own

    def _normal(self, group: ProcessGroup) -> ProcessGroup:
        normal = self._sorted.get(group)
        if normal is None:
            normal = ProcessGroup(group.name, tuple(sorted(set(group.ranks))))
            normal = self._sorted.setdefault(normal, normal)
            self._sorted[group] = normal
        return normal

    def _of_others(self, rank: int, name: str) -> ProcessGroup:
        fitting = (group for group in self._declared.get(name, ()) if rank in group.ranks)
        return next(fitting, ProcessGroup(name, ()))

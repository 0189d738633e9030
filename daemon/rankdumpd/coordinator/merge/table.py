"""The batches of all ranks as one table, each rank's events in the order they started. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import COLUMN_TYPES, Column, EventColumns, ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Events of all ranks: rank by rank, in the order of `position` within each."""

    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    """Every communicator once, its ranks sorted; without ranks when nobody declared them."""
    columns: dict[str, Column]
    """Those of the events, `group` now an index into the groups, and two more: `rank`, and
    `time_us`, the start that never falls within a rank."""
    ranks: dict[int, slice]
    """Rows of each rank that has any."""
    findings: tuple[str, ...]

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    def name(self, row: int) -> str:
        """Return the name of the event in a row."""
        return self.names[int(self.columns["name"][row])]


def tabled(events: Mapping[int, Sequence[EventColumns]]) -> Table:
    """Return one table of the batches of each rank; an event sent twice is in it once."""
    texts, groups = _Texts(), _Groups(events)
    parts: list[dict[str, Column]] = []
    ranks: dict[int, slice] = {}
    findings: list[str] = []
    height = 0
    for rank in sorted(events):
        batches = [batch for batch in events[rank] if len(batch)]
        if not batches:
            continue
        part = _sorted_rank([_shared(rank, batch, texts, groups) for batch in batches])
        part, conflicts = _without_repeats(part)
        findings += [f"rank {rank}: two different events at position {at}" for at in conflicts]
        size = len(part["position"])
        part["rank"] = np.full(size, rank, dtype="i8")
        part["time_us"] = np.maximum.accumulate(part["start_us"])
        np.maximum(part["end_position"], part["position"], out=part["end_position"])
        ranks[rank] = slice(height, height + size)
        height += size
        parts.append(part)
    return Table(texts.all(), groups.all(), _stacked(parts), ranks, tuple(findings))


class _Texts:
    """One string table for all batches."""

    def __init__(self) -> None:
        self._index = {"": 0}

    def places_of(self, names: Iterable[str]) -> Column:
        """Return the place of each name here."""
        return np.array([self._index.setdefault(n, len(self._index)) for n in names], dtype="i8")

    def all(self) -> tuple[str, ...]:
        """Return every text by its place."""
        return tuple(self._index)


class _Groups:
    """Every communicator by name and members: two groups may share a name."""

    def __init__(self, events: Mapping[int, Sequence[EventColumns]]) -> None:
        self._index: dict[ProcessGroup, int] = {}
        self._declared: dict[str, dict[ProcessGroup, None]] = {}
        for group in {g: None for batches in events.values() for b in batches for g in b.groups}:
            self._declared.setdefault(group.name, {})[_normal(group)] = None

    def places_of(self, rank: int, batch: EventColumns) -> Column:
        """Return the place here of the group of every event of a batch."""
        own = {group.name: _normal(group) for group in batch.groups}
        used: list[int] = np.unique(batch.columns["group"]).tolist()
        places = np.zeros(len(batch.names), dtype="i8")
        for text in used:
            name = batch.names[text]
            group = own.get(name) or self._of_others(rank, name)
            places[text] = self._index.setdefault(group, len(self._index))
        return places[batch.columns["group"]]

    def _of_others(self, rank: int, name: str) -> ProcessGroup:
        fitting = (group for group in self._declared.get(name, ()) if rank in group.ranks)
        return next(fitting, ProcessGroup(name, ()))

    def all(self) -> tuple[ProcessGroup, ...]:
        """Return every group by its place."""
        return tuple(self._index)


def _normal(group: ProcessGroup) -> ProcessGroup:
    return ProcessGroup(group.name, tuple(sorted(set(group.ranks))))


def _shared(rank: int, batch: EventColumns, texts: _Texts, groups: _Groups) -> dict[str, Column]:
    """Return a batch's columns with names and groups as all batches number them."""
    places = texts.places_of(batch.names)
    columns = dict(batch.columns)
    for field in ("name", "dtype"):
        columns[field] = places[columns[field]]
    columns["group"] = groups.places_of(rank, batch)
    return columns


def _sorted_rank(batches: list[dict[str, Column]]) -> dict[str, Column]:
    part = {field: np.concatenate([batch[field] for batch in batches]) for field in COLUMN_TYPES}
    position = part["position"]
    if np.all(position[1:] > position[:-1]):
        return part
    order = np.argsort(position, kind="stable")
    return {field: column[order] for field, column in part.items()}


def _without_repeats(part: dict[str, Column]) -> tuple[dict[str, Column], list[int]]:
    """Drop all but the first event of each position; name the positions where they differ."""
    position = part["position"]
    repeat = np.flatnonzero(position[1:] == position[:-1]) + 1
    if not len(repeat):
        return part, []
    differs = np.zeros(len(repeat), dtype=bool)
    for field in ("name", "kind", "start_us", "sequence"):
        differs |= part[field][repeat] != part[field][repeat - 1]
    conflicts = np.unique(position[repeat[differs]]).tolist()
    return {field: np.delete(column, repeat) for field, column in part.items()}, conflicts


def _stacked(parts: list[dict[str, Column]]) -> dict[str, Column]:
    if parts:
        return {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    types = {**COLUMN_TYPES, "name": "i8", "dtype": "i8", "group": "i8"}
    types |= {"rank": "i8", "time_us": "i8"}
    return {field: np.empty(0, dtype=code) for field, code in types.items()}

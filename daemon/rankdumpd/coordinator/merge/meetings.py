"""Says which ranks meet in collectives as equals: they may run the same program. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.merge.table import Table


def meeting_ranks(table: Table) -> list[list[int]]:
    """Return the ranks that meet in collectives, each with all it meets, even through others.

    Ranks that send each other messages, even through others, are stages of one pipeline and run
    different programs: a group that has two of them in it says nothing.
    """
    members = table.members
    message = members["peer"] >= 0
    stages = _Joined(table.ranks)
    for rank, peer in _pairs(members["rank"][message], members["peer"][message]):
        stages.join(rank, peer)
    met: dict[int, list[int]] = {}
    for group, rank in _pairs(members["group"][~message], members["rank"][~message]):
        met.setdefault(group, []).append(rank)
    meetings = _Joined(table.ranks)
    for ranks in met.values():
        if len({stages.root(rank) for rank in ranks}) == len(ranks):
            for rank in ranks[1:]:
                meetings.join(ranks[0], rank)
    found: dict[int, list[int]] = {}
    for rank in table.ranks:
        found.setdefault(meetings.root(rank), []).append(rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def _pairs(first: Column, second: Column) -> list[tuple[int, int]]:
    """Return each pair once, sorted."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return list(zip(first[new].tolist(), second[new].tolist(), strict=True))


class _Joined:
    """Which of some numbers belong together."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._parents = {number: number for number in numbers}

    def root(self, number: int) -> int:
        """Return the number that stands for all that belong to this one."""
        parents = self._parents
        parent = parents.setdefault(number, number)
        while parent != parents[parent]:
            parent = parents[parent]
        parents[number] = parent
        return parent

    def join(self, one: int, other: int) -> None:
        """Put two together with all that belong to them."""
        self._parents[self.root(one)] = self.root(other)

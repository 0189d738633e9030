"""Finds ranks that stand still because each waits for another of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import calls_of_members
from rankdumpd.coordinator.merge.table import NEVER, Table

Missing = Mapping[int, tuple[int, ...]]
"""The missing ranks of each call that misses any."""


def waiting_ranks(table: Table, match: Match) -> dict[int, int]:
    """Return the call that each rank waits in: the last it started, and it is not complete."""
    calls = calls_of_members(match)
    waiting: dict[int, int] = {}
    for rank, own in table.member_ranks.items():
        last = own.stop - 1
        if own.stop == own.start or table.members["end_position"][last] != NEVER:
            continue
        if table.members["row"][last] == table.ranks[rank].stop - 1:
            waiting[rank] = int(calls[last])
    return waiting


def standing_circles(missing: Missing, waiting: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return calls of which each misses a rank that waits in the next, the last in the first."""
    after = {
        call: {waiting[rank] for rank in ranks if rank in waiting}
        for call, ranks in missing.items()
        if call in waiting.values()
    }
    circles: list[tuple[int, ...]] = []
    while _pruned(after):
        path: dict[int, None] = {}
        call = min(after)
        while call not in path:
            path[call] = None
            call = min(after[call])
        way = list(path)
        circles.append(tuple(way[way.index(call) :]))
        for each in circles[-1]:
            del after[each]
    return circles


def _pruned(after: dict[int, set[int]]) -> bool:
    """Take away all from which no way goes on; return whether anything is left."""
    while True:
        for followers in after.values():
            followers.intersection_update(after)
        ends = [call for call, followers in after.items() if not followers]
        for call in ends:
            del after[call]
        if not ends:
            return bool(after)

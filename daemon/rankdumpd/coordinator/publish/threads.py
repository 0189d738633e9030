"""The threads of a trace: one per stream of a rank, more where slices overlap. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.publish.lanes import apart, nested
from rankdumpd.coordinator.publish.members import Members
from rankdumpd.coordinator.values import GlobalOrder


@dataclass(frozen=True, slots=True)
class Thread:
    """One row of the trace."""

    rank: int
    number: int
    """Rises from 1 in each rank: viewers take 0 for the idle thread."""
    name: str


def threaded(
    order: GlobalOrder, operators: Column, members: Members
) -> tuple[list[Thread], Column, Column]:
    """Return all threads, and the number of each operator's and each member's."""
    rank, stream, start, end = (order.columns[name][operators] for name in _OPERATOR)
    tracks, of = np.unique(
        np.concatenate([_track(rank, stream), _track(members.rank, members.stream)]),
        return_inverse=True,
    )
    own, of_calls = of[: len(start)], of[len(start) :]
    lanes = (
        nested(own, start, np.maximum(end, start)),
        _CALLS + apart(of_calls, members.start_us, members.end_us),
    )
    rows, row_of = np.unique(of * 2 * _CALLS + np.concatenate(lanes), return_inverse=True)
    threads = _numbered(rows, tracks)
    numbers = np.array([thread.number for thread in threads], "i8")[row_of]
    return threads, numbers[: len(start)], numbers[len(start) :]


_OPERATOR = ("rank", "stream", "start_us", "end_us")
_CALLS = 1 << 30
"""Added to the lanes of calls, which stand below those of operators."""


def _track(rank: Column, stream: Column) -> Column:
    return rank.astype("u8") << 32 | stream.astype("u8")


def _numbered(rows: Column, tracks: Column) -> list[Thread]:
    """Name each track and lane, numbered from 1 in each rank."""
    threads: list[Thread] = []
    for row in rows.tolist():
        track, lane = divmod(row, 2 * _CALLS)
        rank, stream = divmod(int(tracks[track]), 1 << 32)
        name = f"stream {stream}" + (": calls" if lane >= _CALLS else "")
        name += f" ({lane % _CALLS + 1})" if lane % _CALLS else ""
        follows = bool(threads) and threads[-1].rank == rank
        threads.append(Thread(rank, threads[-1].number + 1 if follows else 1, name))
    return threads

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
    columns = {name: order.columns[name][operators] for name in _OPERATOR}
    start = columns["start_us"]
    end = np.maximum(columns["end_us"], start)
    tracks = (_track(columns["rank"], columns["stream"]), _track(members.rank, members.stream))
    lanes = (
        nested(tracks[0], start, end),
        apart(tracks[1], members.start_us, members.end_us),
    )
    keys = np.concatenate(
        [
            np.stack([columns["rank"], columns["stream"], np.zeros(len(start)), lanes[0]], axis=1),
            np.stack([members.rank, members.stream, np.ones(len(lanes[1])), lanes[1]], axis=1),
        ]
    ).astype("i8")
    rows, row_of = np.unique(keys, axis=0, return_inverse=True)
    threads = _numbered(rows.tolist())
    numbers = np.array([thread.number for thread in threads], "i8")[row_of.reshape(-1)]
    return threads, numbers[: len(start)], numbers[len(start) :]


_OPERATOR = ("rank", "stream", "start_us", "end_us")


def _track(rank: Column, stream: Column) -> Column:
    return rank.astype("i8") << 32 | stream.astype("i8")


def _numbered(rows: list[list[int]]) -> list[Thread]:
    threads: list[Thread] = []
    for rank, stream, is_calls, lane in rows:
        follows = bool(threads) and threads[-1].rank == rank
        name = f"stream {stream}" + (": calls" if is_calls else "")
        name += f" ({lane + 1})" if lane else ""
        threads.append(Thread(rank, threads[-1].number + 1 if follows else 1, name))
    return threads

"""All pairs of a comparison: what needs no file at once, the rest on this machine or on a cluster.

On one machine memory is that of the largest pair for each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rankdump.diff.crew import Crew
from rankdump.diff.groups import Answers, groups_of, pair_bytes
from rankdump.diff.outcomes import decided_unread
from rankdump.diff.values import Outcome, Settings, TensorPair, Verdict

Progress: TypeAlias = Callable[[int, int], None]
"""Hears how many pairs are done, and of how many; in the thread that asked."""

_BYTES_EACH = 512 << 20
_PAIRS_EACH = 4000
"""What one more process must have to do: its start takes a core half as long."""


def outcomes(
    pairs: Sequence[TensorPair],
    settings: Settings,
    *,
    processes: int | None = None,
    dask: str = "",
    progress: Progress | None = None,
) -> list[Outcome]:
    """Return the outcome of each pair, in their order.

    At most as many processes as asked for, this one among them; by default one for each core. With
    the address of a Dask scheduler its workers compare instead: ConfigError without `distributed`,
    UnavailableError when nobody answers there.
    """
    done = _Done(len(pairs), progress)
    unread: list[tuple[int, TensorPair]] = []
    decided: Answers = []
    for place, pair in enumerate(pairs):
        outcome = decided_unread(pair, settings)
        if outcome is None:
            unread.append((place, pair))
        else:
            decided.append((place, outcome))
    done(decided)
    if dask:
        from rankdump.diff.dask import compare_on

        compare_on(dask, unread, settings, done)
    elif unread:
        workers = _workers([pair for _, pair in unread], processes)
        Crew(groups_of(unread), settings, done).run(workers)
    return done.outcomes


class _Done:
    """Outcomes as they come."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.outcomes = [Outcome(Verdict.UNKNOWN)] * total
        self._count, self._progress = 0, progress

    def __call__(self, answers: Answers) -> None:
        for place, outcome in answers:
            self.outcomes[place] = outcome
        self._count += len(answers)
        if self._progress is not None and answers:
            self._progress(self._count, len(self.outcomes))


def _workers(pairs: Sequence[TensorPair], processes: int | None) -> int:
    """Return how many processes are worth starting beside this one."""
    worth = max(sum(map(pair_bytes, pairs)) // _BYTES_EACH, len(pairs) // _PAIRS_EACH)
    most = processes if processes is not None else len(os.sched_getaffinity(0))
    return max(0, min(most - 1, worth, len(pairs) - 1))

"""Alarms that the coordinator itself finds: waits in calls past half of their timeout, which freeze
the job while it hangs, and outliers among the ranks of a job: ranks whose number in a step, such as
the loss or a norm, is far above those of all others. No I/O; the owner holds the lock, and the
decisions are pure functions.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, log
from statistics import median

from rankdump._core.black_box import FaultKind, RankStep, is_far_above
from rankdump._core.freeze_record import FrozenCause, JobFreeze
from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.status import RankWait
from rankdump._core.timeouts import TimeoutHint
from rankdump._core.units import format_duration, format_percentage
from rankdumpd.coordinator.fleet_views import IterationView
from rankdumpd.coordinator.hints.open_waits import find_rank_waits
from rankdumpd.coordinator.hints.rank_warnings import HALF_SHARE, describe_limit

MIN_PEERS = 4
"""Smallest number of other ranks that a number is compared with."""
MAX_STEPS = 32
"""Largest number of iterations of a job whose numbers are kept."""
MAX_NUMBERS = 1 << 18
"""Largest number of numbers that are kept for a job."""
MAX_OUTLIERS = 1024
"""Largest number of outliers that are remembered for a job."""
_MAX_CANDIDATES = 8
"""Number of highest values that are tested as outliers."""

_NumbersByName = dict[str, dict[int, float]]
"""Number of each rank, by the name of the number."""


def find_outliers(numbers: Mapping[int, float]) -> list[int]:
    """Return the ranks whose number is far above those of all other ranks, the highest first.

    >>> find_outliers({0: 1.0, 1: 1.1, 2: 0.9, 3: 1.0, 4: 40.0}), find_outliers({0: 1.0, 1: 40.0})
    ([4], [])
    """
    known = {rank: each for rank, each in numbers.items() if each > 0 and isfinite(each)}
    if len(known) <= MIN_PEERS:
        return []
    # Only few numbers can be that far above the median, so only the highest ones are tested.
    middle = median(map(log, known.values()))
    highest = sorted(known, key=lambda rank: -known[rank])[:_MAX_CANDIDATES]
    return [
        rank
        for rank in highest
        if log(known[rank]) > middle
        and is_far_above(
            [each for other, each in known.items() if other != rank], known[rank], MIN_PEERS
        )
    ]


class PeerSteps:
    """The latest numbers of all ranks of one job."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._attempt = 0
        self._steps: dict[int, _NumbersByName] = {}
        """Numbers by iteration, the latest last."""
        self._count = 0
        self._changed: set[int] = set()
        """Iterations with numbers that were not compared yet."""
        self._outliers: dict[tuple[int, str], tuple[int, bool]] = {}
        """By rank and name: the iteration in which an outlier was found or has ended, and whether
        it still is an outlier.
        """

    def add(self, step: RankStep) -> None:
        """Add the numbers of a step; steps of earlier attempts are ignored."""
        if step.attempt > self._attempt:
            self._steps, self._count, self._attempt = {}, 0, step.attempt
            self._changed, self._outliers = set(), {}
        if step.attempt < self._attempt:
            return
        if self._count + len(step.numbers) > MAX_NUMBERS:
            self._drop_oldest()
            return
        by_name = self._steps.setdefault(step.iteration, {})
        for name, number in step.numbers.items():
            ranks = by_name.setdefault(name, {})
            self._count += step.rank not in ranks
            ranks[step.rank] = number
        self._changed.add(step.iteration)
        while len(self._steps) > MAX_STEPS:
            self._drop_oldest()

    def find_alarms(self, now_us: int) -> list[JobFreeze]:
        """Return a freeze for each iteration with outliers that are new since the last call."""
        changed, self._changed = sorted(self._changed), set()
        found = (self._compare(iteration, now_us) for iteration in changed)
        return [each for each in found if each is not None]

    def _compare(self, iteration: int, now_us: int) -> JobFreeze | None:
        cause: FrozenCause | None = None
        for name, numbers in sorted(self._steps[iteration].items()):
            if len(numbers) <= MIN_PEERS:
                continue
            outliers = find_outliers(numbers)
            new = [rank for rank in outliers if self._note_outlier(rank, name, iteration)]
            if new and cause is None:
                cause = _make_cause(new[0], name, iteration, numbers, now_us)
            self._end_outliers(name, numbers, outliers, iteration)
        return cause and JobFreeze(self._job_id, self._attempt, iteration, cause)

    def _note_outlier(self, rank: int, name: str, iteration: int) -> bool:
        """Remember an outlier; return whether it is new or had ended."""
        before, was_outlier = self._outliers.get((rank, name), (-1, False))
        if was_outlier or iteration <= before:
            return False
        self._outliers[rank, name] = iteration, True
        if len(self._outliers) > MAX_OUTLIERS:
            del self._outliers[next(iter(self._outliers))]
        return True

    def _end_outliers(
        self, name: str, numbers: Mapping[int, float], outliers: list[int], iteration: int
    ) -> None:
        """Mark earlier outliers as ended if their ranks have a usual number in this iteration."""
        for (rank, known), (before, is_outlier) in self._outliers.items():
            has_number = known == name and rank in numbers and rank not in outliers
            if has_number and is_outlier and before < iteration:
                self._outliers[rank, known] = iteration, False

    def _drop_oldest(self) -> None:
        iteration = next(iter(self._steps), None)
        if iteration is not None:
            self._count -= sum(map(len, self._steps.pop(iteration).values()))
            self._changed.discard(iteration)


def _make_cause(
    rank: int, name: str, iteration: int, numbers: Mapping[int, float], now_us: int
) -> FrozenCause:
    others = [each for other, each in numbers.items() if other != rank and isfinite(each)]
    text = (
        f"{name} of rank {rank} is {numbers[rank]:g}, far above that of {len(others)} other ranks, "
        f"whose median is {median(others):g}"
    )
    return FrozenCause(FaultKind.OUTLIER, iteration, text, now_us, rank)


def find_wait_alarms(
    view: IterationView, hints: Iterable[TimeoutHint], now_us: int
) -> Iterator[JobFreeze]:
    """Yield a freeze for each open wait of an iteration that is known to have passed that limit.

    While a wait goes on, its text changes, but it counts as one freeze of its iteration.
    """
    long = [hint for hint in hints if _is_long(hint)]
    waits = find_rank_waits(view, now_us) if long else ()
    for hint in long:
        text = describe_long_wait(hint, waits)
        cause = FrozenCause(FaultKind.WAIT, view.iteration, text, now_us)
        yield JobFreeze(view.job_id, view.attempt, view.iteration, cause)


def _is_long(hint: TimeoutHint) -> bool:
    limit_us = hint.limit.limit_us if hint.limit else 0
    return hint.waiting and limit_us > 0 and hint.spread_us >= HALF_SHARE * limit_us


def describe_long_wait(hint: TimeoutHint, waits: Sequence[RankWait]) -> str:
    """Return a sentence with the call, who has arrived and who has not, since when, and
    the limit.
    """
    call = hint.group, hint.sequence, hint.kind
    own = [each for each in waits if (each.group, each.sequence, each.kind) == call]
    arrived = sorted({each.rank for each in own} | {hint.first_rank})
    absent = {rank for each in own for rank in each.absent} | {hint.last_rank}
    missing = sorted(absent.difference(arrived))
    text = (
        f"{hint.kind} {hint.name!r}, number {hint.sequence} of group {hint.group!r}, has waited "
        f"{format_duration(hint.spread_us)}{_format_since(own)}; "
        f"arrived: {name_first_ranks(arrived)}; missing: {name_first_ranks(missing)}"
    )
    if hint.limit is None:
        return text
    share = format_percentage(hint.spread_us / hint.limit.limit_us)
    return f"{text}; that is {share} of {describe_limit(hint.limit)}"


def _format_since(waits: Sequence[RankWait]) -> str:
    start_us = min((each.start_us for each in waits), default=0)
    if not start_us:
        return ""
    start = datetime.datetime.fromtimestamp(start_us / 1e6, datetime.timezone.utc)
    return f" since {start:%Y-%m-%d %H:%M:%S} UTC"

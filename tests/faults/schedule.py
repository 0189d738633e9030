"""Schedule of faults: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Collection

from faults.values import FaultKind, ScheduledFault

WEIGHTS = {
    FaultKind.KILL_RANK: 70,
    FaultKind.KILL_AGENT: 35,
    FaultKind.KILL_WORKER: 15,
    FaultKind.KILL_COORDINATOR: 25,
    FaultKind.CUT: 60,
    FaultKind.DELAY: 35,
    FaultKind.HOLE: 15,
    FaultKind.EIO: 45,
    FaultKind.ENOSPC: 30,
    FaultKind.INODES: 20,
    FaultKind.STATE_FULL: 15,
    FaultKind.STALL: 20,
    FaultKind.STOPPED: 10,
    FaultKind.DOUBLED: 30,
    FaultKind.SWAPPED: 20,
    FaultKind.FLIPPED_CHUNK: 15,
    FaultKind.FLIPPED_SLAB: 15,
    FaultKind.CLOCK: 15,
    FaultKind.DESCRIPTORS: 10,
    FaultKind.FREEZE: 15,
    FaultKind.CONTROL: 15,
}
"""How often each comes, out of 500."""
LASTS_S = {
    FaultKind.DELAY: (0.5, 2.0),
    FaultKind.HOLE: (0.5, 2.0),
    FaultKind.EIO: (0.2, 1.0),
    FaultKind.ENOSPC: (0.3, 1.5),
    FaultKind.INODES: (0.3, 1.5),
    FaultKind.STATE_FULL: (0.3, 1.5),
    FaultKind.STALL: (0.2, 3.0),
    FaultKind.STOPPED: (0.2, 2.0),
    FaultKind.CLOCK: (0.5, 3.0),
    FaultKind.DESCRIPTORS: (0.5, 1.5),
    FaultKind.FREEZE: (0.5, 2.0),
    FaultKind.CONTROL: (2.0, 5.0),
}
"""Shortest and longest; the others are over at once."""
_AT_ONCE = 2
"""Of one kind."""
HEAD_S = 2.0


def tail_s(seconds: float) -> float:
    """Return how long nothing new comes at the end."""
    return min(5.0, seconds / 5)


def schedule(
    seed: int, seconds: float, faults: int, kinds: Collection[FaultKind] = tuple(FaultKind)
) -> tuple[ScheduledFault, ...]:
    """Return that many faults in the order of their times, each of the kinds at least once.

    As long as there are enough of them; and never more than two windows of a kind at once.
    """
    dice = random.Random(seed)
    drawn = [kind for kind in FaultKind if kind in kinds]
    dice.shuffle(drawn)
    least = max(1, faults // 40)
    plan = (drawn * least)[:faults]
    weights = [WEIGHTS[kind] for kind in drawn]
    plan += dice.choices(drawn, weights, k=faults - len(plan))
    made: list[ScheduledFault] = []
    for kind in plan:
        made.append(_placed(dice, kind, seconds, made))
    return tuple(sorted(made, key=lambda fault: (fault.at_s, fault.kind.value)))


def _placed(
    dice: random.Random, kind: FaultKind, seconds: float, others: list[ScheduledFault]
) -> ScheduledFault:
    end_s = max(HEAD_S, seconds - tail_s(seconds))
    shortest, longest = LASTS_S.get(kind, (0.0, 0.0))
    fault = None
    for attempt in range(64):
        # Where time is short, windows are.
        lasts_s = dice.uniform(shortest, longest) / (1 + attempt // 8)
        at_s = dice.uniform(HEAD_S, max(HEAD_S, end_s - lasts_s))
        fault = ScheduledFault(round(at_s, 3), kind, dice.randrange(1 << 16), round(lasts_s, 3),
                      dice.randrange(1 << 16))  # fmt: skip
        if crowd(fault, others) < _AT_ONCE:
            break
    assert fault is not None
    return fault


def crowd(fault: ScheduledFault, others: list[ScheduledFault]) -> int:
    """Return how many windows of its kind are open while one of a fault is."""
    return sum(
        fault.lasts_s > 0
        and other.kind is fault.kind
        and other.at_s < fault.at_s + fault.lasts_s
        and fault.at_s < other.at_s + other.lasts_s
        for other in others
    )

"""Says at which collective of each process group the members arrived furthest apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankdump.contract.events import EventKind, ProcessGroup
from rankdump.contract.status import ArrivalHint
from rankdumpd.coordinator.values import GlobalOrder

Hints = Mapping[ProcessGroup, ArrivalHint]


def arrival_hints(order: GlobalOrder, *, job_id: str) -> dict[ProcessGroup, ArrivalHint]:
    """Return the widest spread of arrivals of each group in one iteration.

    A group whose members always arrived in the same microsecond has no hint.
    """
    calls = order.calls
    if not len(calls):
        return {}
    starts, arrivals = calls.bounds[:-1], calls.members["start_us"]
    latest, earliest = np.maximum.reduceat(arrivals, starts), np.minimum.reduceat(arrivals, starts)
    spread = latest.astype("u8") - earliest.astype("u8")
    kind = calls.columns["kind"]
    spread[(kind == int(EventKind.SEND)) | (kind == int(EventKind.RECV))] = 0
    hints: dict[ProcessGroup, ArrivalHint] = {}
    # Backwards, so that the first of equals is the one that stays.
    for call in np.argsort(spread[::-1], kind="stable").tolist():
        at = len(calls) - 1 - call
        if spread[at]:
            group = order.groups[int(calls.columns["group"][at])]
            hints[group] = _hint(order, at, group, int(spread[at]), job_id)
    return hints


def widest(kept: Hints, new: Hints) -> dict[ProcessGroup, ArrivalHint]:
    """Return the wider hint of each group; the one kept before where they are equal."""
    result = dict(kept)
    for group, hint in new.items():
        if group not in result or hint.spread_us > result[group].spread_us:
            result[group] = hint
    return result


def _hint(
    order: GlobalOrder, call: int, group: ProcessGroup, spread_us: int, job_id: str
) -> ArrivalHint:
    calls = order.calls
    low, high = calls.bounds[call : call + 2]
    ranks, arrivals = (calls.members[name][low:high] for name in ("rank", "start_us"))
    first, last = int(ranks[arrivals.argmin()]), int(ranks[arrivals.argmax()])
    kind = EventKind(int(calls.columns["kind"][call]))
    name = order.names[int(calls.columns["name"][call])]
    sequence = int(calls.columns["sequence"][call])
    return ArrivalHint(
        job_id=job_id,
        group=group.name,
        kind=kind,
        iteration=order.iteration,
        sequence=sequence,
        spread_us=spread_us,
        first_rank=first,
        last_rank=last,
        reason=(
            f"rank {last} arrived {spread_us / 1000:.3f} ms after rank {first}, each by its own "
            f"clock, at {kind.name.lower()} {name!r} number {sequence} of group {group.name!r} "
            f"in iteration {order.iteration}"
        ),
    )

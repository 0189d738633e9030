"""Step-by-step simulation of a job of collectives and messages, with and without stalls.

Slow reference for the model of the hints, with no code in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankdump._core.events import EventColumns, EventKind, ProcessGroup, RankEvent

REDUCE, SEND, RECV = EventKind.ALL_REDUCE, EventKind.SEND, EventKind.RECV


@dataclass(frozen=True)
class JobCall:
    """One call of its members, each of which works and stalls first for a given time."""

    members: tuple[int, ...]
    """Of a message the sender, then the receiver."""
    work_us: tuple[int, ...]
    stall_us: tuple[int, ...]
    message: bool = False
    deferred: bool = False
    """The members go on at once, and wait for it at their next call that is not deferred."""


@dataclass
class JobRun:
    """When each member came to each call."""

    arrivals: list[list[int]] = field(default_factory=list)

    def spread(self, call: int, message: bool) -> int:
        """How long the first waited; of a message, how long the receiver did."""
        times = self.arrivals[call]
        return max(0, times[0] - times[1]) if message else max(times) - min(times)


def run(calls: list[JobCall], *, stalls: bool) -> JobRun:
    """Play the job with its stalls or without them."""
    clock: dict[int, int] = {}
    waits: dict[int, list[int]] = {}
    result = JobRun()
    for call in calls:
        arrivals: list[int] = []
        for rank, work, stall in zip(call.members, call.work_us, call.stall_us, strict=True):
            clock[rank] = clock.get(rank, 0) + work + (stall if stalls else 0)
            arrivals.append(clock[rank])
        result.arrivals.append(arrivals)
        goes_on = max(arrivals)
        for rank in call.members[1:] if call.message else call.members:
            if call.deferred:
                waits.setdefault(rank, []).append(goes_on)
            else:
                clock[rank] = max([goes_on, *waits.pop(rank, [])])
    return result


def dumped(calls: list[JobCall]) -> list[tuple[int, int]]:
    """The spread of each call, and dumping's part of it."""
    real, without = run(calls, stalls=True), run(calls, stalls=False)
    spreads = [
        (real.spread(at, call.message), without.spread(at, call.message))
        for at, call in enumerate(calls)
    ]
    return [(spread, min(max(0, spread - undumped), spread)) for spread, undumped in spreads]


def events(calls: list[JobCall], *, iteration: int = 0) -> dict[int, list[EventColumns]]:
    """What the ranks of that job report."""
    groups = {
        call.members: ProcessGroup(_name(call), tuple(sorted(call.members))) for call in calls
    }
    numbers: dict[str, int] = {}
    position: dict[int, int] = {}
    stalled: dict[int, int] = {}
    programs: dict[int, list[RankEvent]] = {}
    for call, arrivals in zip(calls, run(calls, stalls=True).arrivals, strict=True):
        number = numbers[_name(call)] = numbers.get(_name(call), -1) + 1
        for at, rank in enumerate(call.members):
            position[rank] = position.get(rank, 0) + 1
            stalled[rank] = stalled.get(rank, 0) + call.stall_us[at]
            kind = (SEND, RECV)[at] if call.message else REDUCE
            peer = call.members[1 - at] if call.message else -1
            end = _next_wait(calls, call, rank, position[rank]) if call.deferred else position[rank]
            start_us = arrivals[at]
            end_us = start_us if kind is SEND else max(arrivals)
            programs.setdefault(rank, []).append(
                RankEvent(
                    0,
                    iteration,
                    position[rank],
                    end,
                    f"call{number}",
                    kind,
                    start_us,
                    end_us,
                    group=_name(call),
                    sequence=number,
                    peer=peer,
                    stall_us=stalled[rank],
                )
            )
    declared = tuple(groups.values())
    return {
        rank: [EventColumns.from_events(program, declared)] for rank, program in programs.items()
    }


def _next_wait(calls: list[JobCall], call: JobCall, rank: int, position: int) -> int:
    later = calls[next(at for at, other in enumerate(calls) if other is call) + 1 :]
    own = [other for other in later if rank in other.members]
    ahead = next((at for at, other in enumerate(own) if not other.deferred), len(own))
    return position + ahead + 1


def _name(call: JobCall) -> str:
    return "-".join(map(str, call.members)) + ("m" if call.message else "")

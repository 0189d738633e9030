"""How far ranks have come in the collectives of their groups, and which ranks others wait for.

All members of a group call its collectives in the same order, so a rank that has called fewer of
them than another one is where that one waits. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankdump._core.number_ranges import name_first_ranks

MAX_GROUP_CALLS = 64
"""Groups that a step has, those that were used last."""
MIN_WAIT_US = 2_000_000
"""A call that is younger may just be on its way on the other members."""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """How far a rank has come in the collectives of one group."""

    group: str
    ranks: tuple[int, ...]
    """Members of the group; empty where they are not known."""
    count: int
    """Collectives that it has called since its process began."""
    kind: str
    """Kind of the last one, as `all_reduce`."""
    called_us: int
    """When it called that, in microseconds since the epoch on its clock."""


@dataclass(frozen=True, slots=True)
class RankCallCounts:
    """The calls of a rank at a time."""

    rank: int
    at_us: int
    """On the clock of the rank."""
    is_waiting: bool
    """Whether its step had not ended, so that it may wait in its last call."""
    calls: tuple[GroupCalls, ...]


@dataclass(frozen=True, slots=True)
class StandingCall:
    """The last collective that ranks called, and in which they may wait."""

    group: str
    kind: str
    number: int
    """Among the collectives of the group, from 0."""
    waiting: tuple[int, ...]
    waited_us: int
    """How long the first of them had waited."""
    missing: Mapping[int, int]
    """Members that have not called it, with the count of those that they have called."""
    unknown: tuple[int, ...] = ()
    """Members of which nothing is known."""

    def describe(self) -> str:
        """Return a sentence."""
        call = f"{self.kind} number {self.number} of group {self.group!r}"
        text = (
            f"{name_first_ranks(self.waiting)} called {call} {self.waited_us / 1e6:.0f} s before "
            "the freeze and none after it"
        )
        if self.missing:
            is_one = len(self.missing) == 1
            text += f"; {name_first_ranks(tuple(self.missing))} {'has' if is_one else 'have'} not "
            text += f"called it: {'it' if is_one else 'they'} called {self._describe_called()}"
        elif not self.unknown:
            text += "; all its members have called it"
        if self.unknown:
            text += f"; nothing is known of {name_first_ranks(self.unknown)}"
        return text

    def _describe_called(self) -> str:
        """Return how many of the calls before this one the missing members have called."""
        if not self.number:
            return "no collective of the group"
        before = "the one collective" if self.number == 1 else f"the {self.number} collectives"
        fewest, most = min(self.missing.values()), max(self.missing.values())
        if fewest == self.number:
            return f"{before} before it"
        called = f"{fewest} to {most}" if fewest != most else f"{fewest}" if fewest else "none"
        return f"{called} of {before} before it"


def find_standing_calls(ranks: Sequence[RankCallCounts]) -> list[StandingCall]:
    """Return the collectives in which ranks may wait: first those whose missing members wait in
    none themselves.

    A rank may wait in the last collective that it has called at all; what it has called in other
    groups before is over. One that all members have called explains nothing where another one has
    missing members: these called it last, and are somewhere else since.
    """
    found = list(_iterate_standing_calls(ranks))
    open_calls = [each for each in found if each.missing or each.unknown] or found
    held = {rank for each in open_calls for rank in each.waiting}
    return sorted(
        open_calls,
        key=lambda each: (not each.missing, len(held & each.missing.keys()), -each.waited_us),
    )


def _iterate_standing_calls(ranks: Sequence[RankCallCounts]) -> Iterator[StandingCall]:
    members: defaultdict[str, dict[int, GroupCalls]] = defaultdict(dict)
    waiting: defaultdict[tuple[str, int], list[RankCallCounts]] = defaultdict(list)
    for each in ranks:
        for calls in each.calls:
            members[calls.group][each.rank] = calls
        last = max(each.calls, key=lambda calls: calls.called_us, default=None)
        if last is not None and each.is_waiting and each.at_us - last.called_us >= MIN_WAIT_US:
            waiting[last.group, last.count].append(each)
    for (group, count), waits in waiting.items():
        known = members[group]
        own = known[waits[0].rank]
        yield StandingCall(
            group,
            own.kind,
            count - 1,
            tuple(sorted(each.rank for each in waits)),
            max(each.at_us - known[each.rank].called_us for each in waits),
            {rank: calls.count for rank, calls in sorted(known.items()) if calls.count < count},
            tuple(sorted(set(own.ranks) - known.keys())),
        )

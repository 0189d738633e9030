"""Two programs while their calls are being paired: what is paired by which rule, what is left."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rankdump.diff.values import Call, PairedCalls, Program, Rule

Segment: TypeAlias = "tuple[list[Call], list[Call]]"


@dataclass(slots=True)
class Pairing:
    """What has been decided so far."""

    a: Program
    b: Program
    partner: dict[int, tuple[int, Rule]] = field(default_factory=dict[int, "tuple[int, Rule]"])
    """By position in a: position in b, and why."""
    taken: set[int] = field(default_factory=set[int])
    """Positions in b that have a partner."""

    def join(self, a: Call, b: Call, rule: Rule) -> None:
        """Pair two calls."""
        self.partner[a.position] = b.position, rule
        self.taken.add(b.position)

    @property
    def left_a(self) -> list[Call]:
        """Calls of a that have no partner yet."""
        return [call for call in self.a.calls if call.position not in self.partner]

    @property
    def left_b(self) -> list[Call]:
        """Calls of b that have no partner yet."""
        return [call for call in self.b.calls if call.position not in self.taken]

    def join_equal(self, rule: Rule, key: Callable[[Call], Hashable]) -> None:
        """Pair what is left by a key, the first with the first; None is no key."""
        waiting = _grouped(self.left_b, key)
        for call in self.left_a:
            own = key(call)
            others = waiting.get(own)
            if own is not None and others:
                self.join(call, others.pop(), rule)

    def segments(self) -> Iterator[Segment]:
        """Yield what is left between calls that are paired in the same order on both sides."""
        left_a, left_b = self.left_a, self.left_b
        if not (left_a and left_b):
            return
        anchors = [*_rising(sorted((a, b) for a, (b, _) in self.partner.items()))]
        edges = [*anchors, (len(self.a.calls), len(self.b.calls))]
        at_a = at_b = 0
        for edge_a, edge_b in edges:
            next_a = _until(left_a, at_a, edge_a)
            next_b = _until(left_b, at_b, edge_b)
            if next_a > at_a and next_b > at_b:
                yield left_a[at_a:next_a], left_b[at_b:next_b]
            at_a, at_b = next_a, next_b

    def result(self) -> list[PairedCalls]:
        """Return all calls in execution order of a; those of b alone behind what they followed."""
        place = {b: a for a, (b, _) in self.partner.items()}
        alone: defaultdict[int, list[PairedCalls]] = defaultdict(list)
        behind = -1
        for call in self.b.calls:
            if call.position in place:
                behind = place[call.position]
            else:
                alone[behind].append(PairedCalls(None, call))
        lines = alone[-1]
        for call in self.a.calls:
            other, rule = self.partner.get(call.position, (None, ""))
            b = self.b.calls[other] if other is not None else None
            lines.append(PairedCalls(call, b, rule))
            if call.position in alone:
                lines += alone[call.position]
        return lines


def _grouped(
    calls: Iterable[Call], key: Callable[[Call], Hashable]
) -> defaultdict[Hashable, list[Call]]:
    """Return the calls of each key, the last first."""
    found: defaultdict[Hashable, list[Call]] = defaultdict(list)
    for call in calls:
        found[key(call)].append(call)
    for group in found.values():
        group.reverse()
    return found


def _until(calls: Sequence[Call], at: int, edge: int) -> int:
    return bisect_left(calls, edge, lo=at, key=lambda call: call.position)


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a longest part of pairs that rises on both sides; they rise on the first."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for at, (_, b) in enumerate(pairs):
        length = bisect_left(ends, b)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [b]
        last[length : length + 1] = [at]
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]

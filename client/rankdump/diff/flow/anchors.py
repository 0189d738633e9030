"""Pairs of calls that are certain: the kind of call that both sides have equally often. Pure.

The best kind is paired in order; it parts both lists, and each part is looked at in the same way.
Best is a class before a function before a method, then the call whose inputs and outputs differ
most in size, then the most frequent; then the one that comes first. The tool leaves that last
choice to the order of a Python set, which differs from one process to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rankdump.diff.flow.values import FlowCall, Shape

_KINDS: Mapping[str, int] = {"nn": 0, "functional": 1, "tensor": 2}
_OTHER_KIND = 3
_TOOL_EPSILON = 1e-6
_EXACT_FLOAT = 1 << 53

_Part: TypeAlias = tuple[int, int, int, int]
"""Begin and end in a, begin and end in b."""


def anchors(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[tuple[int, int]]:
    """Return places of certain pairs, ascending on both sides."""
    numbers: dict[tuple[str, tuple[Shape, ...], tuple[Shape, ...]], int] = {}
    keys_a = [numbers.setdefault(call.key, len(numbers)) for call in a]
    keys_b = [numbers.setdefault(call.key, len(numbers)) for call in b]
    merits = [_merit(*key) for key in numbers]
    found: list[tuple[int, int]] = []
    waiting: list[_Part] = [(0, len(a), 0, len(b))]
    while waiting:
        part = waiting.pop()
        pairs = _best(_places(keys_a, *part[:2]), _places(keys_b, *part[2:]), merits)
        if pairs:
            found.extend(pairs)
            waiting.extend(_parts(part, pairs))
    return sorted(found)


def _merit(shared: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> tuple[int, float]:
    """Return how good an anchor such a call is, the smaller the better."""
    kind = _KINDS.get(shared.partition("_")[0], _OTHER_KIND)
    small, large = sorted((_size(inputs), _size(outputs)))
    # Sizes of many tensors outgrow a float, where the addition would not be felt anyway.
    ratio = small / (large + _TOOL_EPSILON) if large < _EXACT_FLOAT else small / large
    return kind, ratio


def _size(shapes: Sequence[Shape]) -> int:
    """Return the product of all extents of all tensors, which is what the tool goes by."""
    return math.prod(extent for shape in shapes for extent in shape)


def _places(keys: Sequence[int], start: int, stop: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in range(start, stop):
        found.setdefault(keys[place], []).append(place)
    return found


def _best(
    a: Mapping[int, list[int]], b: Mapping[int, list[int]], merits: Sequence[tuple[int, float]]
) -> list[tuple[int, int]]:
    """Return the pairs of the best key that both have equally often; none when there is none."""
    equal = [key for key, places in a.items() if len(places) == len(b.get(key, ()))]
    if not equal:
        return []
    best = min(equal, key=lambda key: (merits[key], -len(a[key])))
    return list(zip(a[best], b[best], strict=True))


def _parts(part: _Part, pairs: Sequence[tuple[int, int]]) -> list[_Part]:
    """Return what lies before, between and behind the pairs, where both sides have something."""
    start_a, stop_a, start_b, stop_b = part
    starts = [(start_a, start_b), *((a + 1, b + 1) for a, b in pairs)]
    stops = [*pairs, (stop_a, stop_b)]
    parts = [(*begin, *end) for begin, end in zip(starts, stops, strict=True)]
    return [(a, a_end, b, b_end) for a, b, a_end, b_end in parts if a < a_end and b < b_end]

"""Where two lists of calls without anchors can be cut: at joints that look alike. Pure.

A joint lies before, between and behind calls: the outputs of the call before it and the inputs of
the call behind it. Two joints are alike when all their shapes are; among those the names of the
calls decide, by their edit distance. What lies between two cuts stands for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankdump.diff.flow.values import FlowCall, Shape

_NAME_PARTS = 20
"""Names cost a twentieth of a joint left out: they only choose among joints that are alike."""
_CUT, _PASS, _SKIP_A, _SKIP_B = range(4)
_REMEMBERED = 1 << 14
_REMEMBERED_ROWS = 1 << 8


@dataclass(frozen=True, slots=True)
class _Joint:
    """What lies at one place between calls."""

    before: str
    """Names of the calls around it; empty at both ends."""
    behind: str
    outputs: tuple[Shape, ...]
    inputs: tuple[Shape, ...]


def cuts(a: Sequence[FlowCall], b: Sequence[FlowCall]) -> list[tuple[int, int]]:
    """Return the places before which both lists are cut, ascending on both sides."""
    moves = _moves(_joints(a), _joints(b))
    found: list[tuple[int, int]] = []
    at_a, at_b = len(a), len(b)
    while at_a >= 0 and at_b >= 0:
        move = moves[at_a][at_b]
        if move == _CUT:
            found.append((at_a, at_b))
        at_a -= move != _SKIP_B
        at_b -= move != _SKIP_A
    return found[::-1]


def _joints(calls: Sequence[FlowCall]) -> list[_Joint]:
    ends = FlowCall("", "")
    befores, behinds = (ends, *calls), (*calls, ends)
    return [
        _Joint(before.api, behind.api, before.outputs, behind.inputs)
        for before, behind in zip(befores, behinds, strict=True)
    ]


def _moves(a: Sequence[_Joint], b: Sequence[_Joint]) -> list[bytearray]:
    """Return, for each two joints, how the cheapest way through all before them ends."""
    known: dict[_Joint, list[float]] = {}
    moves: list[bytearray] = []
    above = [float(place) for place in range(len(b) + 1)]
    for number, one in enumerate(a, 1):
        if len(known) >= _REMEMBERED_ROWS:
            known.clear()
        if one not in known:
            known[one] = [_cost(one, other) for other in b]
        cost = float(number)
        row, ways = [cost], bytearray()
        for pairing, corner, top in zip(known[one], above, above[1:], strict=False):
            diagonal, skip_a, skip_b = corner + pairing, top + 1, cost + 1
            if diagonal <= skip_a and diagonal <= skip_b:
                cost = diagonal
                ways.append(_CUT if pairing < 1 else _PASS)
            elif skip_a <= skip_b:
                cost = skip_a
                ways.append(_SKIP_A)
            else:
                cost = skip_b
                ways.append(_SKIP_B)
            row.append(cost)
        moves.append(ways)
        above = row
    return moves


def _cost(one: _Joint, other: _Joint) -> float:
    """Return what pairing two joints costs: 1 when they are not alike."""
    if (one.outputs, one.inputs) != (other.outputs, other.inputs):
        return 1
    return _names_apart(one, other) / _NAME_PARTS


def _names_apart(one: _Joint, other: _Joint) -> float:
    """Return how far the names around two joints are apart, from 0 to 1."""
    return (_share(one.behind, other.behind) + _share(one.before, other.before)) / 2


@lru_cache(maxsize=_REMEMBERED)
def _share(one: str, other: str) -> float:
    """Return the edit distance of two names as a share of the longer; 1 for two ends."""
    if not one and not other:
        return 1.0
    above = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        row = [number]
        for place, against in enumerate(other):
            changed = above[place] + (letter != against)
            row.append(min(changed, above[place + 1] + 1, row[place] + 1))
        above = row
    return above[-1] / max(len(one), len(other))

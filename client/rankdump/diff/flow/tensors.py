"""Which tensors of two calls stand for each other, by their shapes in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankdump.diff.flow.values import Shape


def aligned(a: Sequence[Shape], b: Sequence[Shape]) -> list[tuple[int | None, int | None]]:
    """Return places that pair, in order, and None for a tensor without a partner.

    By the fewest tensors left out; of several ways the one that api_dump_compare takes, which at
    each place leaves out a tensor of a before one of b. A pair always has equal shapes.
    """
    costs = _costs(a, b)
    found: list[tuple[int | None, int | None]] = []
    at_a, at_b = len(a), len(b)
    while at_a and at_b:
        without_a, without_b = costs[at_a - 1][at_b] + 1, costs[at_a][at_b - 1] + 1
        if without_a == costs[at_a][at_b]:
            at_a -= 1
            found.append((at_a, None))
        elif a[at_a - 1] == b[at_b - 1]:
            at_a, at_b = at_a - 1, at_b - 1
            found.append((at_a, at_b))
        else:
            assert without_b == costs[at_a][at_b]
            at_b -= 1
            found.append((None, at_b))
    found.extend((place, None) for place in reversed(range(at_a)))
    found.extend((None, place) for place in reversed(range(at_b)))
    return found[::-1]


def _costs(a: Sequence[Shape], b: Sequence[Shape]) -> list[list[int]]:
    """Return how many tensors the first of a and the first of b leave out, for each two counts."""
    costs = [list(range(len(b) + 1))]
    for count, shape in enumerate(a, 1):
        row = [count]
        for place, other in enumerate(b):
            if shape == other:
                row.append(costs[-1][place])
            else:
                row.append(min(costs[-1][place + 1], row[place]) + 1)
        costs.append(row)
    return costs

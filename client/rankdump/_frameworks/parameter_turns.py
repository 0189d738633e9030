"""Turns of the parameters in run cards: which ones are digested in an iteration, and how much of
each. Pure, and the same for every layout of a job: it depends on names and iterations alone.
"""

from __future__ import annotations

import xxhash

HEAD_ELEMENTS = 1 << 16
"""Elements of a parameter that are digested at most: 0.12 ms."""
TURN_ITERATIONS = 16
"""Iterations in which each parameter has one turn."""


def is_parameter_due(name: str, iteration: int) -> bool:
    """Return whether it is the turn of the parameter of that logical name.

    >>> sum(is_parameter_due("layers.0.weight", iteration) for iteration in range(32))
    2
    """
    turn = xxhash.xxh3_64_intdigest(name.encode(errors="replace")) % TURN_ITERATIONS
    return (iteration + turn) % TURN_ITERATIONS == 0

"""A record's name is its own."""

from __future__ import annotations

import numpy as np
import pytest

from rankdump.adapters.arrays import ArraySource
from rankdump.contract.key import Side, TensorKey
from rankdump.heads import Heads
from rankdump.values import Observation


def observation(array, *, constant: bool = False) -> Observation:
    source = ArraySource(array)
    return Observation(
        2, "Add", "Default/Add-op0", Side.OUTPUT, 1, "out", source, constant=constant
    )


def test_time_stamps_are_unique_and_rise_when_the_clock_does_not():
    """Law: they name files, so a clock that stands still or steps back must not repeat one."""
    times = iter([50, 50, 20, 60])
    heads = Heads(rank=1, net_name="Net", clock_us=lambda: next(times))
    one = observation(np.ones(1))
    stamps = [heads.of(one, one.tensor, iteration=0).key.timestamp_us for _ in range(4)]
    assert stamps == [50, 51, 52, 60]


@pytest.mark.parametrize("constant", [False, True])
def test_a_head_says_all_that_is_known(constant):
    heads = Heads(rank=3, net_name="Net", clock_us=lambda: 7)
    seen = observation(np.zeros((2, 3), "f2"), constant=constant)
    head = heads.of(seen, seen.tensor.head(4), iteration=5, switched_on=True)
    assert head.key == TensorKey(
        3, "Net", 2, 5, 7, "Add", "Default/Add-op0", Side.OUTPUT, 1, constant=constant
    )
    assert (head.dtype, head.shape, head.byte_count) == ("float16", (4,), 8)
    assert (head.argument, head.figures, head.switched_on) == ("out", None, True)

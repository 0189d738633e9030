"""A record's name is its own, and what repeats is one object."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rankdump import heads as module
from rankdump.adapters.arrays import ArraySource
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.heads import Heads
from rankdump.values import Observation


def observation(array, *, constant: bool = False, **changed) -> Observation:
    place: dict[str, Any] = {"graph": 2, "op_type": "Add", "op_name": "Default/Add-op0"}
    place |= {"side": Side.OUTPUT}
    place |= {"slot": 1, "argument": "out", "tensor": ArraySource(array), "constant": constant}
    return Observation(**(place | changed))


def kind_of(heads: Heads, seen: Observation) -> TensorKind:
    return heads.kind(seen, seen.tensor)


def test_time_stamps_are_unique_and_rise_when_the_clock_does_not():
    """Law: they name files, so a clock that stands still or steps back must not repeat one."""
    times = iter([50, 50, 20, 60])
    heads = Heads(rank=1, net_name="Net", clock_us=lambda: next(times))
    kind = kind_of(heads, observation(np.ones(1)))
    stamps = [heads.stamp(kind, 0), heads.of(kind, iteration=0).key.timestamp_us]
    assert [*stamps, heads.stamp(kind, 0), heads.stamp(kind, 0)] == [50, 51, 52, 60]


def test_tensors_of_one_call_share_the_time_of_the_first_where_the_layout_does():
    """Law: a tensor that was there before begins another call, an iteration begins all anew."""
    times = itertools.count(10)
    heads = Heads(rank=0, net_name="", clock_us=lambda: next(times), layout=LAYOUTS["cann"])
    heads.name_model(2, "Lenet")
    first, second = (kind_of(heads, observation(np.ones(1), slot=slot)) for slot in (0, 1))
    other = kind_of(heads, observation(np.ones(1), op_name="Default/Add-op1"))
    stamps = [heads.stamp(kind, 0) for kind in (first, other, second, second, first, first)]
    assert stamps == [10, 11, 10, 13, 13, 15]
    key = heads.of(second, iteration=1).key
    assert (key.timestamp_us, key.net_name, key.task, key.stream) == (16, "Lenet", 65535, 65535)


@pytest.mark.parametrize("constant", [False, True])
def test_a_head_says_all_that_is_known(constant):
    heads = Heads(rank=3, net_name="Net", clock_us=lambda: 7)
    seen = observation(np.zeros((2, 3), "f2"), constant=constant)
    kind = heads.kind(seen, seen.tensor.head(4))
    head = heads.of(kind, iteration=5, switched_on=True)
    assert head.key == TensorKey(
        3, "Net", 2, 5, 7, "Add", "Default/Add-op0", Side.OUTPUT, 1, constant=constant
    )
    assert (head.dtype, head.shape, head.byte_count) == ("float16", (4,), 8)
    assert (head.argument, head.switched_on) == ("out", True)


def test_a_tensor_that_looks_the_same_has_the_same_kind():
    """Law: one object as long as nothing of it changes, and another when anything does."""
    heads = Heads(rank=0, net_name="Net", clock_us=lambda: 7)
    first = kind_of(heads, observation(np.ones((2, 3), "f4")))
    assert kind_of(heads, observation(np.zeros((2, 3), "f4"))) is first
    others = [
        observation(np.ones((3, 2), "f4")),
        observation(np.ones((2, 3), "i4")),
        observation(np.ones((2, 3), "f4"), argument="out.0"),
        observation(np.ones((2, 3), "f4"), op_type="Sub"),
        observation(np.ones((2, 3), "f4"), constant=True),
        observation(np.ones((2, 3), "f4"), slot=2),
        observation(np.ones((2, 3), "f4"), side=Side.INPUT),
        observation(np.ones((2, 3), "f4"), graph=1),
    ]
    kinds = [kind_of(heads, seen) for seen in others]
    assert len({first, *kinds}) == 9
    for seen, kind in zip(others, kinds, strict=True):
        source = seen.tensor
        assert (kind.op_type, kind.argument) == (seen.op_type, seen.argument)
        assert (kind.graph, kind.side, kind.slot) == (seen.graph, seen.side, seen.slot)
        assert (kind.dtype, kind.shape, kind.constant) == (
            source.dtype,
            source.shape,
            seen.constant,
        )


def test_names_without_end_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    heads = Heads(rank=0, net_name="Net", clock_us=lambda: 7)
    kinds = [kind_of(heads, observation(np.ones(1), op_name=f"a{n}")) for n in range(100)]
    assert len(set(kinds)) == 100
    assert len(heads._kinds) <= 10

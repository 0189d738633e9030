"""Kinds, names and time stamps of records."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.record import TensorKey, TensorKind, TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump._recorder import record_builder as module
from rankdump._recorder.record_builder import RecordNamer


def observation(array, *, constant: bool = False, **changed) -> TensorObservation:
    place: dict[str, Any] = {"graph": 2, "op_type": "Add", "op_name": "Default/Add-op0"}
    place |= {"side": TensorSide.OUTPUT}
    place |= {"slot": 1, "argument": "out", "tensor": ArraySource(array), "constant": constant}
    return TensorObservation(**(place | changed))


def kind_of(heads: RecordNamer, seen: TensorObservation) -> TensorKind:
    return heads.find_kind(seen, seen.tensor)


def test_timestamps_are_unique_and_rise_if_the_clock_does_not():
    """Law: time stamps name files, so a clock that stops or steps back must not repeat one."""
    times = iter([50, 50, 20, 60])
    heads = RecordNamer(rank=1, net_name="Net", clock_us=lambda: next(times))
    kind = kind_of(heads, observation(np.ones(1)))
    stamps = [heads.stamp(kind, 0), heads.make_head(kind, iteration=0).key.timestamp_us]
    assert [*stamps, heads.stamp(kind, 0), heads.stamp(kind, 0)] == [50, 51, 52, 60]


def test_timestamps_of_one_call_are_shared_if_the_layout_shares_them():
    """Law: a repeated tensor begins another call, and an iteration begins all calls anew."""
    times = itertools.count(10)
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: next(times), layout=LAYOUTS["cann"])
    heads.name_model(2, "Lenet")
    first, second = (kind_of(heads, observation(np.ones(1), slot=slot)) for slot in (0, 1))
    other = kind_of(heads, observation(np.ones(1), op_name="Default/Add-op1"))
    stamps = [heads.stamp(kind, 0) for kind in (first, other, second, second, first, first)]
    assert stamps == [10, 11, 10, 12, 12, 13]
    key = heads.make_head(second, iteration=1).key
    assert (key.timestamp_us, key.net_name, key.task, key.stream) == (14, "Lenet", 65535, 65535)


def test_timestamp_is_not_shared_with_an_ended_call():
    """Law: the next call of a name has a new time, even if its tensors differ from the last."""
    times = itertools.count(10)
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: next(times), layout=LAYOUTS["cann"])
    read, written = (
        kind_of(heads, observation(np.ones(1), side=side))
        for side in (TensorSide.INPUT, TensorSide.OUTPUT)
    )
    stamps = [heads.stamp(written, 0)]
    heads.end_call(2, written.op_name)
    stamps += [heads.stamp(kind, 0) for kind in (read, written)]
    assert stamps == [10, 11, 11]


def test_timestamp_of_a_backward_is_shared_although_its_end_is_reported_often():
    """Law: the end of a backward is not reliable, because its last gradient may be unknown."""
    heads = RecordNamer(
        rank=0, net_name="", clock_us=itertools.count(10).__next__, layout=LAYOUTS["cann"]
    )
    name = "Gradients/Default/Add-op0"
    kinds = [kind_of(heads, observation(np.ones(1), op_name=name, slot=slot)) for slot in (0, 1)]
    stamps = []
    for kind in kinds:
        stamps.append(heads.stamp(kind, 0))
        heads.end_call(2, name)
    assert len(set(stamps)) == 1


def test_kinds_have_the_name_of_a_model_that_is_named_late():
    """Law: no tensor is named with its model's former name."""
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: 7)
    seen = observation(np.ones(1))
    assert kind_of(heads, seen).model == heads.get_model_name(2) == "Net"
    heads.name_model(2, "Lenet")
    assert kind_of(heads, seen).model == heads.get_model_name(2) == "Lenet"
    assert kind_of(heads, observation(np.ones(1), graph=1)).model == "Net"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["stamp", "stamp", "stamp", "over"]),
        st.integers(0, 1),
        st.sampled_from(["a", "a/b", "Gradients/a", "Recompute/a", "a_To_a"]),
        st.sampled_from(list(TensorSide)),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(steps=STEPS, clock=st.lists(st.integers(0, 5), min_size=60, max_size=60))
@pytest.mark.parametrize("layout", ["cann", "mindspore-sync"])
def test_tensors_have_distinct_places(layout, steps, clock):
    """Law: places are distinct for any clock and any order of calls."""
    times = iter(clock)
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: next(times), layout=LAYOUTS[layout])
    places = []
    for what, graph, name, side, slot, iteration in steps:
        if what == "over":
            heads.end_call(graph, name)
            continue
        place = {"graph": graph, "op_name": name, "side": side, "slot": slot}
        kind = kind_of(heads, observation(np.ones(1), **place))
        places.append((heads.stamp(kind, iteration), name, side, slot))
    assert len(set(places)) == len(places)


def test_tensors_of_several_threads_have_distinct_places():
    """Law: the same for calls that run at once under one name."""
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: 7, layout=LAYOUTS["cann"])
    kinds = [kind_of(heads, observation(np.ones(1), slot=slot)) for slot in range(3)]

    def call(number: int) -> list[tuple[int, int]]:
        found = [(heads.stamp(kind, 0), kind.slot) for kind in kinds * 50]
        heads.end_call(2, kinds[0].op_name)
        return found

    with ThreadPoolExecutor(8) as threads:
        places = [place for found in threads.map(call, range(32)) for place in found]
    assert len(set(places)) == len(places) == 32 * 150


@pytest.mark.parametrize("constant", [False, True])
def test_head_has_all_known_fields(constant):
    heads = RecordNamer(rank=3, net_name="Net", clock_us=lambda: 7)
    seen = observation(np.zeros((2, 3), "f2"), constant=constant)
    kind = heads.find_kind(seen, seen.tensor.make_head_source(4))
    head = heads.make_head(kind, iteration=5, switched_on=True)
    assert head.key == TensorKey(
        3, "Net", 2, 5, 7, "Add", "Default/Add-op0", TensorSide.OUTPUT, 1, constant=constant
    )
    assert (head.kind.dtype, head.kind.shape, head.byte_count) == ("float16", (4,), 8)
    assert (head.kind.argument, head.switched_on) == ("out", True)


def test_kind_is_the_same_object_for_an_unchanged_tensor():
    """Law: one object while nothing of the kind changes, and another one when anything does."""
    heads = RecordNamer(rank=0, net_name="Net", clock_us=lambda: 7)
    first = kind_of(heads, observation(np.ones((2, 3), "f4")))
    assert kind_of(heads, observation(np.zeros((2, 3), "f4"))) is first
    others = [
        observation(np.ones((3, 2), "f4")),
        observation(np.ones((2, 3), "i4")),
        observation(np.ones((2, 3), "f4"), argument="out.0"),
        observation(np.ones((2, 3), "f4"), op_type="Sub"),
        observation(np.ones((2, 3), "f4"), constant=True),
        observation(np.ones((2, 3), "f4"), slot=2),
        observation(np.ones((2, 3), "f4"), side=TensorSide.INPUT),
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


def test_kinds_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(module, "_MAX_REMEMBERED_NAMES", 10)
    heads = RecordNamer(rank=0, net_name="Net", clock_us=lambda: 7)
    kinds = [kind_of(heads, observation(np.ones(1), op_name=f"a{n}")) for n in range(100)]
    assert len(set(kinds)) == 100
    assert len(heads._kinds) <= 10


def test_kinds_of_an_api_dump_are_not_remembered():
    """Names of an API dump never repeat, because each call has its own."""
    heads = RecordNamer(rank=0, net_name="", clock_us=lambda: 7, layout=LAYOUTS["api-torch"])
    seen = observation(np.ones((2, 3), "f4"))
    assert kind_of(heads, seen) == kind_of(heads, seen)
    assert not heads._kinds

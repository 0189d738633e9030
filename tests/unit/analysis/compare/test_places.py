"""Pairs of tensors of a pair of calls."""

from __future__ import annotations

from support.diff_programs import call, tensor

from rankdump._analysis.compare.report import CallPair, DumpedCall, DumpedTensor
from rankdump._analysis.compare.tensor_pairs import pair_call_tensors
from rankdump._core.record import TensorSide


def of(*inputs: DumpedTensor) -> DumpedCall:
    return DumpedCall(0, "Op", "op", inputs)


def slots(a: DumpedCall | None, b: DumpedCall | None) -> list[tuple[int | None, int | None]]:
    pairs = pair_call_tensors(CallPair(a, b))
    return [(pair.a and pair.a.slot, pair.b and pair.b.slot) for pair in pairs]


def named(slot: int, argument: str, shape: tuple[int, ...] | None = (2, 3)) -> DumpedTensor:
    return tensor(TensorSide.INPUT, slot, argument=argument, shape=shape)


def test_pair_call_tensors_separates_sides_with_inputs_first():
    one = call("x", inputs=[(1,), (2,)], outputs=[(3,)])
    pairs = pair_call_tensors(CallPair(one, one))
    assert [pair.a and pair.a.slot_name for pair in pairs] == ["input.0", "input.1", "output.0"]
    assert all(pair.a == pair.b for pair in pairs)


def test_arguments_take_precedence_over_slots():
    """A number that one side leaves out shifts the slots of all that follow."""
    a = of(named(0, "input.0"), named(1, "input.1:int", ()), named(2, "input.2"))
    b = of(named(0, "input.0"), named(1, "input.2"))
    assert slots(a, b) == [(0, 0), (1, None), (2, 1)]


def test_keywords_are_paired_in_any_order():
    a = of(named(0, "input.0"), named(1, "input.1:=min"), named(2, "input.2:=max:int"))
    b = of(named(0, "input.0"), named(1, "input.1:=max"))
    assert slots(a, b) == [(0, 0), (1, None), (2, 1)]


def test_argument_marks_are_ignored():
    assert slots(of(named(0, "input.0:recompute")), of(named(0, "input.0"))) == [(0, 0)]


def test_slots_decide_without_arguments():
    a = of(tensor(TensorSide.INPUT, 0, shape=(2,)), tensor(TensorSide.INPUT, 1, shape=(3,)))
    b = of(tensor(TensorSide.INPUT, 0, shape=(9,)), tensor(TensorSide.INPUT, 1, shape=None))
    assert slots(a, b) == [(0, 0), (1, 1)]


def test_shapes_decide_across_frameworks():
    a = of(named(0, "args.0", (1, 3, 8, 8)), named(1, "kwargs.weight", (4, 3)))
    b = of(named(0, "w", (4, 3)), named(1, "x", (8, 8, 3)))
    assert slots(a, b) == [(0, 1), (1, 0)]


def test_last_tensors_of_both_sides_are_paired():
    assert slots(of(named(0, "out", (2,))), of(named(0, "out.0", (5,)))) == [(0, 0)]


def test_call_without_a_partner_has_unpaired_tensors():
    one = call("x", inputs=[(1,)], outputs=[(2,)])
    assert slots(one, None) == [(0, None), (0, None)]
    assert slots(None, one) == [(None, 0), (None, 0)]

"""What a plan keeps, and what it says when it kept nothing."""

from dataclasses import replace

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Iterations, Operators, Output, Selection
from rankdump.filter import Filter, Run, size_decision, why_nothing

OP = "Default/network-Net/conv1-Conv2d/Conv2d-op0"


def a_plan(**selection) -> DumpPlan:
    return DumpPlan(output=Output("/x"), selection=Selection(**selection))


def operators(**lists) -> Operators:
    return Operators(everything=False, **lists)


@pytest.mark.parametrize(
    ("selection", "name", "side", "keep"),
    [
        ({}, OP, Side.INPUT, True),
        ({"inputs": False}, OP, Side.INPUT, False),
        ({"inputs": False}, OP, Side.OUTPUT, True),
        ({"outputs": False}, OP, Side.OUTPUT, False),
        ({"operators": operators(types=("conv",))}, OP, Side.INPUT, True),
        ({"operators": operators(types=("conv",))}, "conv1.weight", Side.OUTPUT, True),
        ({"operators": operators(types=("relu",))}, OP, Side.INPUT, False),
        ({"operators": operators(names=(OP,))}, OP, Side.INPUT, True),
        ({"operators": operators(names=(OP.lower(),))}, OP, Side.INPUT, False),
        ({"operators": operators(patterns=(".*conv1.*",))}, OP, Side.INPUT, True),
        ({"operators": operators(patterns=("conv1",))}, OP, Side.INPUT, False),
        # What belongs to an operator is selected with it.
        ({"operators": operators(names=(OP,))}, f"Gradients/{OP}", Side.INPUT, True),
        ({"operators": operators(names=(OP,))}, f"Recompute/{OP}", Side.INPUT, True),
        ({"operators": operators()}, OP, Side.INPUT, False),
    ],
)
def test_selection(selection, name, side, keep):
    decision = Filter(a_plan(**selection)).decide(name, side)
    assert decision.keep is keep
    assert bool(decision.reason) is not keep


def test_a_tensor_without_elements_is_not_kept():
    assert not size_decision(0).keep
    assert size_decision(1).keep


def run(**facts) -> Run:
    whole = Run(
        device=0,
        iterations_seen=3,
        iterations_armed=3,
        last_iteration=2,
        operators_seen=True,
        tensors_kept=0,
    )
    return replace(whole, **facts)


@pytest.mark.parametrize(
    ("selection", "facts", "reason"),
    [
        ({}, {"tensors_kept": 1}, ""),
        ({"devices": (1, 2)}, {}, "support_device [1, 2] excludes this rank's device 0"),
        ({}, {"iterations_seen": 0}, "no iteration ran"),
        (
            {"iterations": Iterations("100-120", ((100, 120),))},
            {"iterations_armed": 0},
            'iteration "100-120" selects none of the 3 that ran, up to 2',
        ),
        ({}, {"operators_seen": False}, "no operator was observed"),
        ({}, {}, "kernels and input_output match no operator that ran"),
    ],
)
def test_an_empty_dump_has_a_cause(selection, facts, reason):
    assert why_nothing(a_plan(**selection), run(**facts)).startswith(reason)
    assert bool(why_nothing(a_plan(**selection), run(**facts))) is bool(reason)

"""What a plan keeps, and what it says when it kept nothing."""

from dataclasses import replace

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Iterations, Operators, Output, Selection
from rankdump.filter import Filter, size_decision
from rankdump.pipeline.cause import Run, why_nothing

OP = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
MARKED = Operators(everything=False, marked=True)


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
    decision = Filter(a_plan(**selection)).decide(name, side, 0)
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
        (
            {},
            {"operators_selected": False},
            "kernels and input_output match no operator that ran",
        ),
        ({}, {"iterations_armed": 0, "switched": True}, "dump_stop() was called"),
        ({"operators": MARKED}, {"operators_selected": False}, "dump_mode 2 keeps what set_dump"),
        (
            {"operators": MARKED},
            {"operators_selected": False, "marked": True},
            "set_dump() and input_output match no operator that ran",
        ),
        ({}, {"tensors_lost": 4}, "every one of the 4 tensors that the plan selects was lost"),
        ({"trigger": "overflow"}, {"tensors_lost": 4}, "every one of the 4 tensors"),
        ({}, {}, "what the plan selects handed over no tensor"),
    ],
)
def test_an_empty_dump_has_a_cause(selection, facts, reason):
    cause = why_nothing(a_plan(**selection), run(**facts))
    assert (cause is not None) is bool(reason)
    if cause is not None:
        assert cause.reason.startswith(reason)
        assert cause.fault


@pytest.mark.parametrize(
    ("trigger", "words"), [("overflow", "no overflow"), ("exception", "no operator")]
)
def test_no_accident_is_no_fault(trigger, words):
    """Law: a plan that waits for an accident is content when there is none."""
    cause = why_nothing(a_plan(trigger=trigger), run())
    assert cause is not None
    assert not cause.fault
    assert words in cause.reason


@pytest.mark.parametrize(
    ("lists", "seen", "unmatched"),
    [
        ({"names": (OP,)}, [OP], []),
        ({"names": (OP,)}, [], [OP]),
        ({"types": ("conv", "relu")}, [OP], ["relu"]),
        ({"patterns": ("x.*", ".*conv1.*")}, [OP], ["name-regex(x.*)"]),
        # An operator that another entry selected first still matches this one.
        ({"names": (OP,), "types": ("CONV",)}, [OP], []),
        ({"names": (OP,)}, [f"Gradients/{OP}"], []),
        ({"types": ("conv",)}, ["conv1.weight"], []),
    ],
)
def test_entries_that_match_nothing_are_known(lists, seen, unmatched):
    """Law: an entry is unused until any operator matches it, whatever side is kept."""
    selection = Filter(a_plan(operators=operators(**lists), inputs=False))
    for name in seen:
        selection.decide(name, Side.INPUT, 0)
    assert [entry.text for entry in selection.unmatched] == unmatched


def test_without_a_list_there_is_nothing_to_match():
    assert Filter(a_plan()).unmatched == ()
    assert Filter(a_plan(operators=MARKED)).unmatched == ()


@pytest.mark.parametrize(
    ("name", "graph", "keep"),
    [
        (OP, 0, True),
        (f"Gradients/{OP}", 0, True),
        (f"Recompute/{OP}", 0, True),
        (OP, 1, False),
        ("conv1.weight", 0, True),
        ("Gradients/conv1.weight", 0, True),
        ("conv2.weight", 0, False),
        ("Default/network-Net/conv1-Conv2d/inner-Relu/Relu-op0", 0, False),
        ("Default/network-Net/Net-op0", 0, False),
    ],
)
def test_marks_select_scopes_and_parameters_of_their_graph(name, graph, keep):
    selection = Filter(a_plan(operators=MARKED))
    selection.mark(0, frozenset({"network-Net/conv1-Conv2d", "conv1.weight"}))
    decision = selection.decide(name, Side.INPUT, graph)
    assert decision.keep is keep
    assert decision.reason == ("" if keep else "set_dump did not mark it")


def test_marks_may_change():
    """Law: what was decided before a mark is decided anew after it."""
    selection = Filter(a_plan(operators=MARKED))
    for names, keep in [((), False), (("network-Net/conv1-Conv2d",), True), ((), False)]:
        selection.mark(0, frozenset(names))
        assert selection.decide(OP, Side.INPUT, 0).keep is keep
        assert selection.marked is keep

"""Decisions on a plan: the answer, with a reason whenever it is no."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import TensorSide
from rankdump._core.selection import (
    ACCEPTED_VERDICT,
    decide_device,
    decide_exclusion,
    decide_iteration,
    decide_listed_operator,
    decide_operator,
    decide_side,
    decide_watched_operator,
    extract_op_type,
    list_spellings,
    make_watch_name,
)

CONV = "Default/network-Net/conv1-Conv2d/Conv2D-op0"


BLOCK = "Default/network-Net/layer1-Sequential/0-Block/conv-a-Conv2d/Conv2d-op1"


def plan(selection: TensorSelection) -> DumpPlan:
    return DumpPlan(OutputSettings("/x"), selection)


@pytest.mark.parametrize(
    ("devices", "device", "reason"),
    [
        (None, 5, ""),
        ((0, 5), 5, ""),
        ((1,), 0, "support_device [1] excludes this rank's device 0"),
        ((1, 2), 0, "support_device [1, 2] excludes this rank's device 0"),
        ((), 0, "support_device [] excludes this rank's device 0"),
    ],
)
def test_decide_device_follows_the_list(devices: tuple[int, ...] | None, device: int, reason: str):
    """A device is taken when it is listed or when there is no list."""
    verdict = decide_device(plan(TensorSelection(devices=devices)), device)
    assert (verdict.accepted, verdict.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("iterations", "iteration", "reason"),
    [
        (IterationSelection(), 10**12, ""),
        (IterationSelection("0|2-3", ((0, 0), (2, 3))), 3, ""),
        (IterationSelection("0|2-3", ((0, 0), (2, 3))), 1, 'iteration "0|2-3" does not include 1'),
        (IterationSelection("5-3", ()), 4, 'iteration "5-3" does not include 4'),
    ],
)
def test_decide_iteration_quotes_the_users_text(
    iterations: IterationSelection, iteration: int, reason: str
):
    """An iteration is taken when a span holds it; the reason quotes the user's own text."""
    verdict = decide_iteration(plan(TensorSelection(iterations=iterations)), iteration)
    assert (verdict.accepted, verdict.reason) == (not reason, reason)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("outputs", [True, False])
def test_decide_side_follows_its_switch(inputs: bool, outputs: bool):
    """Each side has its own switch."""
    selected = plan(TensorSelection(inputs=inputs, outputs=outputs))
    assert decide_side(selected, TensorSide.INPUT).accepted is inputs
    assert decide_side(selected, TensorSide.OUTPUT).accepted is outputs
    if not inputs:
        assert (
            decide_side(selected, TensorSide.INPUT).reason
            == "input_output excludes tensors of the input side"
        )


@pytest.mark.parametrize(
    ("operators", "name", "accepted"),
    [
        (OperatorSelection(), "anything", True),
        (OperatorSelection(True, names=("x",)), "anything", True),
        (OperatorSelection(False), CONV, False),
        (OperatorSelection(False, names=(CONV,)), CONV, True),
        (OperatorSelection(False, names=(CONV.lower(),)), CONV, False),
        (OperatorSelection(False, names=("Conv2D-op0",)), CONV, False),
        (OperatorSelection(False, names=(CONV.removesuffix("-op0"),)), CONV, False),
        (OperatorSelection(False, types=("conv",)), CONV, True),
        (OperatorSelection(False, types=("CONV2D",)), CONV, True),
        (OperatorSelection(False, types=("conv",)), "Gradients/a/Conv2DBackpropFilter-op1", True),
        (OperatorSelection(False, types=("op0",)), CONV, False),
        (OperatorSelection(False, types=("network",)), CONV, False),
        (OperatorSelection(False, types=("conv",)), "conv1.weight", True),
        (OperatorSelection(False, types=("conv1",)), CONV, False),
        (OperatorSelection(False, types=("Parameter",)), "conv1.weight", False),
        (OperatorSelection(False, types=("OptimizerState",)), "Optimizer/fc.weight.exp_avg", True),
        (OperatorSelection(False, types=("exp_avg",)), "Optimizer/fc.weight.exp_avg", True),
        (OperatorSelection(False, types=("fc.weight",)), "Optimizer/fc.weight.exp_avg", True),
        (OperatorSelection(False, types=("conv",)), "Optimizer/fc.weight.exp_avg", False),
        (OperatorSelection(False, types=("OptimizerState",)), "fc.weight", False),
        (OperatorSelection(False, patterns=(".*Conv2D-op[0-9]+",)), CONV, True),
        (OperatorSelection(False, patterns=("Conv2D-op[0-9]+",)), CONV, False),
        (OperatorSelection(False, patterns=("Default",)), CONV, False),
        (OperatorSelection(False, patterns=(".*conv2d-op0",)), CONV, False),
        (OperatorSelection(False, patterns=("conv1.*",)), "conv1.weight", True),
        (OperatorSelection(False, patterns=("a|Default/.*",)), CONV, True),
        (OperatorSelection(False, patterns=("Default/.+",)), CONV, True),
        (OperatorSelection(False, patterns=("Default/.+",)), f"Gradients/{CONV}", False),
        (OperatorSelection(False, patterns=("Default/.+",)), f"Recompute/{CONV}", False),
        (
            OperatorSelection(False, patterns=("(Gradients/)?Default/.+",)),
            f"Gradients/{CONV}",
            True,
        ),
        (OperatorSelection(False, patterns=("Gradients/.*",)), f"Gradients/{CONV}", True),
        (OperatorSelection(False, patterns=("Gradients/.*",)), CONV, False),
        (OperatorSelection(False, names=(CONV,)), f"Recompute/{CONV}", True),
        (OperatorSelection(False, names=(f"Gradients/{CONV}",)), f"Gradients/{CONV}", True),
        (OperatorSelection(False, names=(f"Gradients/{CONV}",)), CONV, False),
        (OperatorSelection(False, names=("x",), types=("y",), patterns=("z",)), CONV, False),
        (OperatorSelection(False, names=("x",), types=("conv",), patterns=("z",)), CONV, True),
    ],
)
def test_decide_operator_matches_names_types_and_patterns(
    operators: OperatorSelection, name: str, accepted: bool
):
    """Names are exact, types are case-insensitive substrings, expressions match whole names."""
    verdict = decide_operator(operators, name)
    assert verdict.accepted is accepted
    assert verdict.reason == ("" if accepted else "kernels does not select the operator")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (CONV, "Conv2D"),
        ("ReLU-op12", "ReLU"),
        ("conv1.weight", "conv1.weight"),
        ("a/b", "b"),
        ("a-b/c", "c"),
        ("x-y-op3", "x-y"),
        ("", ""),
        ("-", ""),
        ("/", ""),
    ],
)
def test_extract_op_type_is_the_last_component(name: str, kind: str):
    """The type stands after the last slash, up to the last dash."""
    assert extract_op_type(name) == kind


def test_verdict_has_a_reason_only_when_rejected():
    """Only a rejection has a reason."""
    assert ACCEPTED_VERDICT.accepted
    assert ACCEPTED_VERDICT.reason == ""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            BLOCK,
            [
                "Default_network-Net_layer1-Sequential_0-Block_conv-a-Conv2d_Conv2d-op1",
                "Default/network-Net/layer1-Sequential/0-Block/conv-a-Conv2d",
                "network-Net/layer1-Sequential/0-Block/conv-a-Conv2d",
                "layer1.0.conv-a",
            ],
        ),
        (
            "Default/network-Net/Net-op0",
            ["Default_network-Net_Net-op0", "Default/network-Net", "network-Net"],
        ),
        # A component that is no module's has no path.
        (
            "Default/network-Net/plain/Add-op0",
            ["Default_network-Net_plain_Add-op0", "Default/network-Net/plain", "network-Net/plain"],
        ),
        ("Default/network-Net", ["Default_network-Net"]),
        ("Default/Add-op0", ["Default_Add-op0"]),
        ("conv1.weight", ["conv1_weight"]),
        (f"Gradients/{CONV}", ["Gradients_Default_network-Net_conv1-Conv2d_Conv2D-op0"]),
        ("", [""]),
    ],
)
def test_list_spellings_follows_from_the_name(name: str, found: list[str]):
    """All spellings of a name follow from the name."""
    assert list_spellings(name) == (name, *found)


@pytest.mark.parametrize("spelt", [True, False])
@pytest.mark.parametrize("entry", list_spellings(BLOCK))
@pytest.mark.parametrize("scope", ["", "Gradients/", "Recompute/"])
def test_decide_operator_uses_other_spellings_only_if_allowed(entry: str, spelt: bool, scope: str):
    """MindSpore's `kernels` accept only the full scope name; its gradients are selected with it."""
    verdict = decide_operator(OperatorSelection(False, (entry,), spelt=spelt), scope + BLOCK)
    assert verdict.accepted is (spelt or entry == BLOCK)


def test_decide_operator_path_selects_only_its_own_module():
    outer = OperatorSelection(False, ("layer1", "layer1.0"), spelt=True)
    assert not decide_operator(outer, BLOCK).accepted
    assert decide_operator(outer, "Default/network-Net/layer1-Sequential/Seq-op3").accepted


def test_decide_operator_accepts_all_names_with_a_range():
    """Any operator may be in a range, as far as its name tells."""
    operators = OperatorSelection(False, ("a",), ranges=(("b", "c"),))
    assert decide_operator(operators, CONV).accepted
    assert not decide_listed_operator(operators, CONV).accepted


@pytest.mark.parametrize(
    ("lists", "name", "side", "slot", "accepted"),
    [
        ({}, CONV, TensorSide.INPUT, 0, True),
        ({"without_types": ("Conv2D",)}, CONV, TensorSide.INPUT, 0, False),
        ({"without_types": ("conv2d",)}, CONV, TensorSide.INPUT, 0, True),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, TensorSide.INPUT, 0, False),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, TensorSide.INPUT, 1, True),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, TensorSide.OUTPUT, 0, True),
        ({"without_types": (("Conv2D", "input1"),)}, CONV, TensorSide.INPUT, 10, True),
        ({"without_names": (CONV,)}, CONV, TensorSide.OUTPUT, 3, False),
        ({"without_names": ("conv1",)}, CONV, TensorSide.OUTPUT, 3, False),
        ({"without_names": ("conv1",)}, f"Gradients/{CONV}", TensorSide.OUTPUT, 3, False),
        ({"without_names": (f"Gradients/{CONV}",)}, CONV, TensorSide.OUTPUT, 3, True),
        ({"without_names": (("conv1", "input0", "output2"),)}, CONV, TensorSide.OUTPUT, 2, False),
        ({"without_names": (("conv1", "input0", "output2"),)}, CONV, TensorSide.INPUT, 2, True),
        # One entry says less than another: all of them count.
        ({"without_names": (("conv1", "input0"), "conv1")}, CONV, TensorSide.OUTPUT, 1, False),
        ({"without_names": (("conv1", "output9x"),)}, CONV, TensorSide.OUTPUT, 9, True),
    ],
)
def test_decide_exclusion_matches_positions(
    lists, name: str, side: TensorSide, slot: int, accepted: bool
):
    """An entry without positions excludes the whole operator, any other just these positions."""
    made: dict[str, Any] = {
        key: tuple(
            TensorExclusion(entry)
            if isinstance(entry, str)
            else TensorExclusion(entry[0], entry[1:])
            for entry in entries
        )
        for key, entries in lists.items()
    }
    verdict = decide_exclusion(OperatorSelection(**made), "Conv2D", name, side, slot)
    assert verdict.accepted is accepted
    assert bool(verdict.reason) is not accepted


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        (make_watch_name("a", BLOCK), True),
        (make_watch_name(CONV, "b_To_b"), True),
        (make_watch_name("a_To_a", "b_To_b"), True),
        (make_watch_name("a", "a"), False),
        (make_watch_name(BLOCK, BLOCK), False),
        (make_watch_name("b_To_b", "a"), False),
        (BLOCK, True),
        ("b_To_b", True),
        ("a", False),
        ("_To_", False),
        pytest.param("a_To_" + "_To_" * 100_000, False, id="long"),
    ],
)
def test_decide_watched_operator_needs_node_or_layer_and_node(name: str, accepted: bool):
    """Both parts must be listed, for any split of the name."""
    watched = WatchedOperators(("a", "conv1", "a_To_a"), ("layer1.0.conv-a", "b_To_b"))
    assert decide_watched_operator(watched, name).accepted is accepted


def test_decide_watched_operator_without_layers_allows_any_layer() -> None:
    """Any name may precede that of the node."""
    watched = WatchedOperators((), ("layer1.0.conv-a",))
    assert decide_watched_operator(watched, make_watch_name("x", BLOCK)).accepted
    assert not decide_watched_operator(watched, make_watch_name("x", CONV)).accepted
    assert not decide_watched_operator(watched, "x").accepted

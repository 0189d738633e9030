"""Decisions on a plan: the answer, and the reason whenever it is no."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import (
    DumpPlan,
    Excluded,
    Iterations,
    Operators,
    Output,
    Selection,
    Watched,
)
from rankdump.contract.selection import (
    YES,
    device_verdict,
    exclusion_verdict,
    iteration_verdict,
    listed_verdict,
    operator_verdict,
    side_verdict,
    spellings,
    type_in,
    watch_name,
    watch_verdict,
)

CONV = "Default/network-Net/conv1-Conv2d/Conv2D-op0"


BLOCK = "Default/network-Net/layer1-Sequential/0-Block/conv-a-Conv2d/Conv2d-op1"


def plan(selection: Selection) -> DumpPlan:
    return DumpPlan(Output("/x"), selection)


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
def test_device(devices: tuple[int, ...] | None, device: int, reason: str):
    """A device is taken when it is listed or when there is no list."""
    verdict = device_verdict(plan(Selection(devices=devices)), device)
    assert (verdict.accepted, verdict.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("iterations", "iteration", "reason"),
    [
        (Iterations(), 10**12, ""),
        (Iterations("0|2-3", ((0, 0), (2, 3))), 3, ""),
        (Iterations("0|2-3", ((0, 0), (2, 3))), 1, 'iteration "0|2-3" does not include 1'),
        (Iterations("5-3", ()), 4, 'iteration "5-3" does not include 4'),
    ],
)
def test_iteration(iterations: Iterations, iteration: int, reason: str):
    """An iteration is taken when a span holds it; the reason quotes the user's own text."""
    verdict = iteration_verdict(plan(Selection(iterations=iterations)), iteration)
    assert (verdict.accepted, verdict.reason) == (not reason, reason)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("outputs", [True, False])
def test_side(inputs: bool, outputs: bool):
    """Each side has its own switch."""
    selected = plan(Selection(inputs=inputs, outputs=outputs))
    assert side_verdict(selected, Side.INPUT).accepted is inputs
    assert side_verdict(selected, Side.OUTPUT).accepted is outputs
    if not inputs:
        assert side_verdict(selected, Side.INPUT).reason == "input_output leaves inputs out"


@pytest.mark.parametrize(
    ("operators", "name", "accepted"),
    [
        (Operators(), "anything", True),
        (Operators(True, names=("x",)), "anything", True),
        (Operators(False), CONV, False),
        (Operators(False, names=(CONV,)), CONV, True),
        (Operators(False, names=(CONV.lower(),)), CONV, False),
        (Operators(False, names=("Conv2D-op0",)), CONV, False),
        (Operators(False, names=(CONV.removesuffix("-op0"),)), CONV, False),
        (Operators(False, types=("conv",)), CONV, True),
        (Operators(False, types=("CONV2D",)), CONV, True),
        (Operators(False, types=("conv",)), "Gradients/a/Conv2DBackpropFilter-op1", True),
        (Operators(False, types=("op0",)), CONV, False),
        (Operators(False, types=("network",)), CONV, False),
        (Operators(False, types=("conv",)), "conv1.weight", True),
        (Operators(False, types=("conv1",)), CONV, False),
        (Operators(False, types=("Parameter",)), "conv1.weight", False),
        (Operators(False, patterns=(".*Conv2D-op[0-9]+",)), CONV, True),
        (Operators(False, patterns=("Conv2D-op[0-9]+",)), CONV, False),
        (Operators(False, patterns=("Default",)), CONV, False),
        (Operators(False, patterns=(".*conv2d-op0",)), CONV, False),
        (Operators(False, patterns=("conv1.*",)), "conv1.weight", True),
        (Operators(False, patterns=("a|Default/.*",)), CONV, True),
        (Operators(False, patterns=("Default/.+",)), CONV, True),
        (Operators(False, patterns=("Default/.+",)), f"Gradients/{CONV}", False),
        (Operators(False, patterns=("Default/.+",)), f"Recompute/{CONV}", False),
        (Operators(False, patterns=("(Gradients/)?Default/.+",)), f"Gradients/{CONV}", True),
        (Operators(False, patterns=("Gradients/.*",)), f"Gradients/{CONV}", True),
        (Operators(False, patterns=("Gradients/.*",)), CONV, False),
        (Operators(False, names=(CONV,)), f"Recompute/{CONV}", True),
        (Operators(False, names=(f"Gradients/{CONV}",)), f"Gradients/{CONV}", True),
        (Operators(False, names=(f"Gradients/{CONV}",)), CONV, False),
        (Operators(False, names=("x",), types=("y",), patterns=("z",)), CONV, False),
        (Operators(False, names=("x",), types=("conv",), patterns=("z",)), CONV, True),
    ],
)
def test_operator(operators: Operators, name: str, accepted: bool):
    """Names are exact, types are case-insensitive substrings, expressions match whole names."""
    verdict = operator_verdict(operators, name)
    assert verdict.accepted is accepted
    assert verdict.reason == ("" if accepted else "kernels do not name it")


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
def test_type_in(name: str, kind: str):
    """The type stands after the last slash, up to the last dash."""
    assert type_in(name) == kind


def test_yes_has_no_reason():
    """A reason belongs to a no."""
    assert YES.accepted
    assert YES.reason == ""


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
def test_an_operator_has_several_spellings(name: str, found: list[str]):
    """Law: all that a name may be called follows from the name."""
    assert spellings(name) == (name, *found)


@pytest.mark.parametrize("spelt", [True, False])
@pytest.mark.parametrize("entry", spellings(BLOCK))
@pytest.mark.parametrize("scope", ["", "Gradients/", "Recompute/"])
def test_other_spellings_select_only_where_the_plan_allows_them(
    entry: str, spelt: bool, scope: str
):
    """Law: MindSpore's `kernels` know the full scope name alone; what belongs to it comes along."""
    verdict = operator_verdict(Operators(False, (entry,), spelt=spelt), scope + BLOCK)
    assert verdict.accepted is (spelt or entry == BLOCK)


def test_a_path_selects_its_module_and_none_inside_it():
    outer = Operators(False, ("layer1", "layer1.0"), spelt=True)
    assert not operator_verdict(outer, BLOCK).accepted
    assert operator_verdict(outer, "Default/network-Net/layer1-Sequential/Seq-op3").accepted


def test_a_range_is_known_to_the_rank_alone():
    """Law: by its name alone any operator may lie in a range."""
    operators = Operators(False, ("a",), ranges=(("b", "c"),))
    assert operator_verdict(operators, CONV).accepted
    assert not listed_verdict(operators, CONV).accepted


@pytest.mark.parametrize(
    ("lists", "name", "side", "slot", "accepted"),
    [
        ({}, CONV, Side.INPUT, 0, True),
        ({"without_types": ("Conv2D",)}, CONV, Side.INPUT, 0, False),
        ({"without_types": ("conv2d",)}, CONV, Side.INPUT, 0, True),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, Side.INPUT, 0, False),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, Side.INPUT, 1, True),
        ({"without_types": (("Conv2D", "input0"),)}, CONV, Side.OUTPUT, 0, True),
        ({"without_types": (("Conv2D", "input1"),)}, CONV, Side.INPUT, 10, True),
        ({"without_names": (CONV,)}, CONV, Side.OUTPUT, 3, False),
        ({"without_names": ("conv1",)}, CONV, Side.OUTPUT, 3, False),
        ({"without_names": ("conv1",)}, f"Gradients/{CONV}", Side.OUTPUT, 3, False),
        ({"without_names": (f"Gradients/{CONV}",)}, CONV, Side.OUTPUT, 3, True),
        ({"without_names": (("conv1", "input0", "output2"),)}, CONV, Side.OUTPUT, 2, False),
        ({"without_names": (("conv1", "input0", "output2"),)}, CONV, Side.INPUT, 2, True),
        # One entry says less than another: all of them count.
        ({"without_names": (("conv1", "input0"), "conv1")}, CONV, Side.OUTPUT, 1, False),
        ({"without_names": (("conv1", "output9x"),)}, CONV, Side.OUTPUT, 9, True),
    ],
)
def test_exclusion(lists, name: str, side: Side, slot: int, accepted: bool):
    """Law: an entry without positions leaves out the whole operator, any other just these."""
    made: dict[str, Any] = {
        key: tuple(
            Excluded(entry) if isinstance(entry, str) else Excluded(entry[0], entry[1:])
            for entry in entries
        )
        for key, entries in lists.items()
    }
    verdict = exclusion_verdict(Operators(**made), "Conv2D", name, side, slot)
    assert verdict.accepted is accepted
    assert bool(verdict.reason) is not accepted


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        (watch_name("a", BLOCK), True),
        (watch_name(CONV, "b_To_b"), True),
        (watch_name("a_To_a", "b_To_b"), True),
        (watch_name("a", "a"), False),
        (watch_name(BLOCK, BLOCK), False),
        (watch_name("b_To_b", "a"), False),
        (BLOCK, True),
        ("b_To_b", True),
        ("a", False),
        ("_To_", False),
        pytest.param("a_To_" + "_To_" * 100_000, False, id="long"),
    ],
)
def test_a_watched_name_is_of_a_node_or_of_a_layer_and_a_node(name: str, accepted: bool):
    """Law: both parts are listed, wherever the name can be cut in two."""
    watched = Watched(("a", "conv1", "a_To_a"), ("layer1.0.conv-a", "b_To_b"))
    assert watch_verdict(watched, name).accepted is accepted


def test_without_layers_every_operator_is_one() -> None:
    """Law: any name before a node's."""
    watched = Watched((), ("layer1.0.conv-a",))
    assert watch_verdict(watched, watch_name("x", BLOCK)).accepted
    assert not watch_verdict(watched, watch_name("x", CONV)).accepted
    assert not watch_verdict(watched, "x").accepted

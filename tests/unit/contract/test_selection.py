"""Decisions on a plan: the answer, and the reason whenever it is no."""

from __future__ import annotations

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Iterations, Operators, Output, Selection
from rankdump.contract.selection import (
    YES,
    device_verdict,
    iteration_verdict,
    operator_verdict,
    side_verdict,
    type_in,
)

CONV = "Default/network-Net/conv1-Conv2d/Conv2D-op0"


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
        (Operators(False, patterns=("Default/.*",)), f"Gradients/{CONV}", True),
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

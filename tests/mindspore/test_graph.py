"""Training that MindSpore compiles: its numbers stay, and its calls are recorded from outside."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

STEP = "Default/network-TrainOneStepCell/TrainOneStepCell-op0"
PARAMETERS = ["fc.weight", "fc.bias"]


class CaseResults(Protocol):
    def __call__(self, case: str) -> dict[str, Any]: ...


def _places(told: dict[str, Any]) -> list[str]:
    """Return what was taken, as `operator:input0`; of parameters the name alone."""
    return [
        taken["name"]
        if taken["op_type"] == "Parameter"
        else f"{taken['name']}:{taken['side']}{taken['slot']}"
        for taken in told["taken"]
    ]


def _values(told: dict[str, Any], name: str) -> list[float]:
    return next(taken["values"] for taken in told["taken"] if taken["name"] == name)


@pytest.mark.parametrize(
    "case",
    [
        "bytecode_capture",
        "bytecode_capture_of_the_model",
        "compiled_again",
        "compiled_cell_within_pynative",
        "compiled_gradient_function",
        "compiled_step_function",
        "gradient_function_of_graph_mode",
        "hooks_of_the_job_stay",
        "mode_is_switched",
        "model_train",
        "nothing_is_compiled",
        "one_step_cell",
        "one_step_cell_armed_later",
        "several_models",
    ],
)
def test_cell_hook_does_not_change_compiled_training(graphs: CaseResults, case: str) -> None:
    """Law: losses, gradients and parameters are those of the job without us; nothing is lost."""
    told = graphs(case)
    assert told["same"]
    assert not told["lost"]
    assert told["taken"]
    assert all("hook of rankdump failed" not in warning for warning in told["warnings"])


def _one_step(number: int = 1) -> list[str]:
    return [f"{STEP}:input0", f"{STEP}:input1", f"{STEP}:output0", *PARAMETERS] * number


def test_compiled_step_cell_is_recorded_from_outside(graphs: CaseResults) -> None:
    """The attached model is inside compiled code: the call from Python represents it."""
    assert _places(graphs("one_step_cell")) == _one_step(4)
    assert _places(graphs("one_step_cell_armed_later")) == _one_step()
    assert _places(graphs("model_train")) == _one_step(2)


def test_compiled_code_is_one_warning_with_advice(graphs: CaseResults) -> None:
    (warning,) = graphs("one_step_cell")["warnings"]
    assert "cells and operators inside it are not" in warning
    assert "`rankdump ingest THAT_PATH --into TREE --follow`" in warning


def test_gradients_given_to_an_optimizer_are_recorded(graphs: CaseResults) -> None:
    told = graphs("compiled_gradient_function")
    call = "Default/forward/value_and_grad-op0"
    inputs = [f"{call}:input0", f"{call}:input1"]
    outputs = [f"{call}:output{slot}" for slot in range(3)]
    gradients = ["Gradients/fc.weight", "Gradients/fc.bias"]
    assert _places(told) == [*inputs, *outputs, *gradients, *PARAMETERS] * 2
    for name, values in told["expected"].items():
        assert _values(told, f"Gradients/{name}") == pytest.approx(values, rel=1e-6)


def test_returned_gradients_are_recorded_without_an_optimizer(graphs: CaseResults) -> None:
    """Of `value_and_grad` with inputs and weights, and of `GradOperation`."""
    told = graphs("gradient_function_of_graph_mode")
    names = [taken["name"] for taken in told["taken"]]
    assert names.count("Gradients/fc.weight") == names.count("Gradients/fc.bias") == 2
    assert told["events"] == [
        "Default/network-WithLossCell/value_and_grad-op0",
        "Default/network-WithLossCell/grad-op0",
    ]
    for name, values in told["expected"].items():
        assert _values(told, f"Gradients/{name}") == pytest.approx(values, rel=1e-6)


def test_compiled_step_function_has_inputs_and_loss(graphs: CaseResults) -> None:
    """A compiled function that does not run the model is not one of its operators."""
    told = graphs("compiled_step_function")
    call = "Default/train_step/train_step-op0"
    one = [f"{call}:input0", f"{call}:input1", f"{call}:output0", *PARAMETERS]
    assert _places(told) == one * 2


def test_gradients_pass_through_compiled_code_within_pynative(graphs: CaseResults) -> None:
    """Hooks are off while the compiler reads, and back before the backward."""
    told = graphs("compiled_cell_within_pynative")
    places = _places(told)
    middle = "Gradients/Default/network-Mixed/middle-Compiled/Compiled-op0"
    assert {f"{middle}:input0", f"{middle}:output0"} <= set(places)
    own = ("front", "middle.inner.fc", "head")
    names = {f"Gradients/{cell}.{part}" for cell in own for part in ("weight", "bias")}
    assert names <= set(places)
    assert all(places.count(name) == 2 for name in names)
    assert "Default/network-Mixed/middle-Compiled/inner-Net/Net-op0:input0" not in places


def test_gradients_reach_tensors_given_to_a_bytecode_compiler(graphs: CaseResults) -> None:
    told = graphs("bytecode_capture")
    front = "Gradients/Default/network-Mixed/front-Dense/Dense-op0:input0"
    assert _places(told).count(front) == 2
    assert {"Gradients/front.weight", "Gradients/front.bias"} <= set(_places(told))


def test_bytecode_compiled_function_is_recorded_from_outside(graphs: CaseResults) -> None:
    told = graphs("bytecode_capture_of_the_model")
    assert told["events"] == ["Default/forward/forward-op0", "Default/forward/forward-op1"]
    assert len(told["warnings"]) == 1


def test_graph_and_pynative_mode_may_alternate(graphs: CaseResults) -> None:
    events = graphs("mode_is_switched")["events"]
    assert events.count(STEP) == 2
    assert "Gradients/Default/network-Net/fc-Dense/Dense-op0" in events


def test_missing_arguments_of_compiled_calls_are_a_warning_once(graphs: CaseResults) -> None:
    told = graphs("no_arguments")
    assert not told["configured"]
    assert [w for w in told["warnings"] if "save_kernel_args" in w] == told["warnings"][1:]
    assert len(told["warnings"]) == 2


def test_graph_mode_without_a_compiler_records_all_cells(graphs: CaseResults) -> None:
    told = graphs("nothing_is_compiled")
    assert "Default/network-Net/fc-Dense/Dense-op0" in told["events"]
    assert not told["warnings"]


def test_compiled_call_is_in_the_graph_of_each_model_that_it_runs(graphs: CaseResults) -> None:
    """A model without calls while compiled code ran may be inside that code, which is a warning."""
    told = graphs("several_models")
    second, other = told["others"]
    assert told["events"] == second["events"] == [STEP]
    assert other["events"] == []
    assert len(other["warnings"]) == 1

"""API calls of MindSpore as records."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

ONE_CALL = """
LAYER_conv_forward_input
NN_Conv2d_0_forward_input.0 NN_Conv2d_0_forward_output
Functional_relu_0_forward_input.0 Functional_relu_0_forward_output
Tensor_reshape_0_forward_input.0 Tensor_reshape_0_forward_output
LAYER_fc_forward_input
NN_Dense_0_forward_input.0 NN_Dense_0_forward_output
LAYER_block_fc_forward_input
NN_Dense_1_forward_input.0 NN_Dense_1_forward_output
LAYER_block_act_forward_input
NN_ReLU_0_forward_input.0 NN_ReLU_0_forward_output
Tensor___mul___0_forward_input.0 Tensor___mul___0_forward_output
LAYER_block_forward_input
Tensor_transpose_0_forward_input.0 Tensor_transpose_0_forward_output
Functional_MatMul_0_forward_input.0 Functional_MatMul_0_forward_input.1
Functional_MatMul_0_forward_output
Tensor___getitem___0_forward_input.0 Tensor___getitem___0_forward_output
Functional_exp_0_forward_input.0 Functional_exp_0_forward_output
Tensor___add___0_forward_input.0 Tensor___add___0_forward_input.1 Tensor___add___0_forward_output
Functional_split_0_forward_input.0
Functional_split_0_forward_output.0 Functional_split_0_forward_output.1
Functional_cat_0_forward_input.0.0 Functional_cat_0_forward_input.0.1
Functional_cat_0_forward_output
""".split()  # noqa: SIM905 - names in the order of the program, a line for each call


class CaseResults(Protocol):
    def __call__(self, case: str) -> dict[str, Any]: ...


def _values(told: dict[str, Any], name: str) -> list[float]:
    at = told["tensors"].index(name)
    return told["taken"][at]["values"]


def test_api_calls_are_named_in_program_order(apis: CaseResults) -> None:
    names = apis("names")["tensors"]
    assert names[: len(ONE_CALL)] == ONE_CALL


def test_api_call_numbers_continue_over_iterations(apis: CaseResults) -> None:
    second = apis("names")["tensors"][len(ONE_CALL) :]
    assert second[1] == "NN_Conv2d_1_forward_input.0"
    assert [name for name in second if name.startswith("NN_Dense")] == [
        f"NN_Dense_{number}_forward_{side}" for number in (2, 3) for side in ("input.0", "output")
    ]


def test_api_call_is_an_event_that_ends(apis: CaseResults) -> None:
    told = apis("names")
    assert len(told["events"]) == len(told["settlements"]) == len(set(told["events"])) + 5
    assert not told["lost"]
    assert not told["warnings"]


def test_call_stacks_are_lines_of_the_script_innermost_first(apis: CaseResults) -> None:
    stack = apis("names")["stacks"]["NN_Dense_1_forward"]
    assert stack[0].endswith("\n return self.act(self.fc(x)) * 2")
    assert stack[1].endswith("\n x = self.block(self.fc(x))")
    assert not any("site-packages/mindspore" in line for line in stack)


def test_stack_of_a_layer_mark_has_the_path_with_dots(apis: CaseResults) -> None:
    stacks = apis("names")["stacks"]
    assert stacks["LAYER_block.fc_forward"][:2] == stacks["NN_Dense_1_forward"][:2]


def test_gradients_are_recorded_in_the_order_of_the_backward(apis: CaseResults) -> None:
    names = [name for name in apis("gradients")["tensors"] if "_backward_" in name]
    assert names == [
        "Functional_cat_0_backward_input",
        "Functional_split_0_backward_input.0",
        "Functional_split_0_backward_input.1",
        "Tensor___add___0_backward_input",
        "Functional_exp_0_backward_input",
        "Tensor___getitem___0_backward_input",
        "Functional_MatMul_0_backward_input",
        "Tensor_transpose_0_backward_input",
        "Tensor___mul___0_backward_input",
        "NN_ReLU_0_backward_input",
        "NN_Dense_1_backward_input",
        "NN_Dense_0_backward_input",
        "Tensor_reshape_0_backward_input",
        "Functional_relu_0_backward_input",
        "NN_Conv2d_0_backward_input",
    ]


def test_gradient_is_that_of_the_result(apis: CaseResults) -> None:
    told = apis("gradients")
    assert set(_values(told, "Functional_cat_0_backward_input")) == {1.0}
    doubled = [2 * value for value in _values(told, "Tensor___mul___0_backward_input")]
    assert _values(told, "NN_ReLU_0_backward_input") == doubled


def test_recomputed_calls_are_marked_and_share_the_gradients_of_their_forwards(
    apis: CaseResults,
) -> None:
    plain, told = apis("gradients"), apis("recomputation")
    again = [name for name in told["tensors"] if name.endswith(":recompute")]
    assert again == [
        "NN_Dense_2_forward_input.0:recompute",
        "NN_Dense_2_forward_output:recompute",
        "NN_ReLU_1_forward_input.0:recompute",
        "NN_ReLU_1_forward_output:recompute",
        "Tensor___mul___1_forward_input.0:recompute",
        "Tensor___mul___1_forward_output:recompute",
    ]
    assert [name for name in told["tensors"] if not name.endswith(":recompute")] == plain["tensors"]
    for name in plain["tensors"]:
        if "_backward_" in name:
            assert _values(told, name) == _values(plain, name), name


def test_numbers_and_scalars_are_recorded_without_the_filter(apis: CaseResults) -> None:
    told = apis("numbers_of_python")
    assert told["tensors"][1:] == [
        "Tensor_sum_0_forward_output",
        "Functional_clamp_0_forward_input.0",
        "Functional_clamp_0_forward_input.1:=min:int",
        "Functional_clamp_0_forward_input.2:=max:float",
        "Functional_clamp_0_forward_output",
    ]
    assert _values(told, "Functional_clamp_0_forward_input.2:=max:float") == [2.5]


def test_api_input_has_its_value_from_before_the_call(apis: CaseResults) -> None:
    told = apis("before_the_call")
    before, added, after = (each["values"] for each in told["taken"])
    assert after == pytest.approx([a + b for a, b in zip(before, added, strict=True)])
    assert before != after


def test_bfloat16_is_recorded_unchanged(apis: CaseResults) -> None:
    first = apis("bfloat16")["taken"][0]
    assert (first["dtype"], first["values"]) == ("bfloat16", [1.0, 1.25, 1.5, 1.75])


def test_float8_is_recorded_unchanged(apis: CaseResults) -> None:
    first = apis("float8")["taken"][0]
    assert (first["dtype"], first["values"]) == ("float8_e4m3fn", [1.0, 1.25, 1.5, 1.75])


def test_api_hook_does_not_change_training(apis: CaseResults) -> None:
    told = apis("training_is_the_same")
    assert told["same"]
    assert "NN_Conv2d_2_backward_input" in told["tensors"]


def test_api_hook_restores_mindspore(apis: CaseResults) -> None:
    assert apis("left_as_it_was") == {"changed": True, "restored": True}


def test_compiled_code_runs_and_its_calls_are_not_recorded(apis: CaseResults) -> None:
    told = apis("compiled")
    assert all(told["same"])
    # What stands around it is seen, also behind it.
    assert [name for name in told["tensors"] if name.endswith("output")] == [
        "Tensor___getitem___0_forward_output",
        "Tensor_tile_0_forward_output",
        "Functional_relu_0_forward_output",
    ]
    (warning,) = told["warnings"]
    assert "API calls inside it are not dumped" in warning


def test_graph_mode_is_a_warning_and_records_nothing(apis: CaseResults) -> None:
    told = apis("graph_mode")
    assert told["same"]
    assert not told["tensors"]
    assert len(told["warnings"]) == 1


def test_failed_operator_raises_in_the_job_and_its_output_is_counted(apis: CaseResults) -> None:
    told = apis("errors")
    # The product fails where the job asks for it; relu at once.
    assert (told["asked"], told["called"]) == ("RuntimeError", "TypeError")
    assert told["lost"] == ["Functional_matmul_0_forward operator_failed"]
    assert ["Functional_relu_0_forward", True] in told["settlements"]
    assert not told["warnings"]
    assert told["tensors"][-1] == "Functional_exp_0_forward_output"


def test_api_calls_of_other_threads_are_recorded(apis: CaseResults) -> None:
    assert apis("threads")["tensors"] == [
        f"Functional_relu_{number}_forward_{side}"
        for number in (0, 1)
        for side in ("input.0", "output")
    ]


def test_api_calls_are_counted_while_not_armed_and_selected_by_scope(apis: CaseResults) -> None:
    told = apis("numbers_go_on")
    assert told["silent"] == []
    assert told["tensors"] == [
        "Functional_relu_1_forward_input.0",
        "Functional_relu_1_forward_output",
    ]


def test_layer_marks_are_recorded_once_if_their_file_is_the_same(apis: CaseResults) -> None:
    marks = [name for name in apis("layers_once")["tensors"] if name.startswith("LAYER")]
    assert marks == ["LAYER_fc_forward_input", "LAYER_act_forward_input"]


def test_optimizers_and_training_steps_are_not_api_calls(apis: CaseResults) -> None:
    assert apis("optimizers")["events"] == [
        "LAYER_fc_forward",
        "NN_Dense_0_forward",
        "LAYER_act_forward",
        "NN_ReLU_0_forward",
        "Tensor___mul___0_forward",
        "NN_MSELoss_0_forward",
    ]

"""Calls of MindSpore cells as records, marks, and the watches for calls and steps."""

from __future__ import annotations

from typing import Any, Protocol

FC = "Default/network-Block/fc-Dense/Dense-op0"
ACT = "Default/network-Block/act-ReLU/ReLU-op0"
BLOCK = "Default/network-Block/Block-op0"


class CaseResults(Protocol):
    def __call__(self, case: str) -> dict[str, Any]: ...


def _places(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(taken["name"], taken["side"]) for taken in told["taken"]]


def test_cells_have_names_of_mindspore_and_numbers_within_an_iteration(cells: CaseResults) -> None:
    told = cells("names")
    assert told["events"][:5] == [
        "Default/network-Net/conv1-Conv2d/Conv2d-op0",
        "Default/network-Net/fc-Dense/Dense-op0",
        "Default/network-Net/blocks-SequentialCell/0-Block/fc-Dense/Dense-op0",
        "Default/network-Net/blocks-SequentialCell/0-Block/act-ReLU/ReLU-op0",
        "Default/network-Net/blocks-SequentialCell/0-Block/Block-op0",
    ]
    assert told["events"][10] == "Default/network-Net/conv1-Conv2d/Conv2d-op1"
    assert told["events"][-1] == "Default/network-Net/fc-Dense/Dense-op0"


def test_cell_node_has_the_line_of_its_call(cells: CaseResults) -> None:
    lines = {node["name"]: node["line"] for node in cells("names")["nodes"]}
    inner = "Default/network-Net/blocks-SequentialCell/0-Block/fc-Dense/Dense-op0"
    assert lines[inner] == "return self.act(self.fc(x))"


def test_parameters_are_recorded_at_the_end_of_an_iteration(cells: CaseResults) -> None:
    states = [taken["name"] for taken in cells("names")["taken"] if taken["state"]]
    assert states[:3] == ["conv1.weight", "blocks.0.fc.weight", "blocks.0.fc.bias"]


def test_gradients_are_recorded_on_both_sides(cells: CaseResults) -> None:
    told = cells("gradients")
    assert (f"Gradients/{ACT}", "input") in _places(told)
    assert (f"Gradients/{ACT}", "output") in _places(told)
    assert told["events"] == [
        FC,
        ACT,
        BLOCK,
        f"Gradients/{ACT}",
        f"Gradients/{BLOCK}",
        f"Gradients/{FC}",
    ]


def test_gradients_of_parameters_equal_those_of_the_job(cells: CaseResults) -> None:
    told = cells("gradients")
    found = {taken["name"]: taken["values"] for taken in told["taken"]}
    assert [found["Gradients/fc.weight"], found["Gradients/fc.bias"]] == told["expected"]


def test_recomputed_calls_are_paired_with_their_forwards(cells: CaseResults) -> None:
    told = cells("recomputation")
    inside = "Default/network-SequentialCell/0-Block"
    again = [name for name in told["events"] if name.startswith("Recompute/")]
    assert again == [
        f"Recompute/{inside}/fc-Dense/Dense-op0",
        f"Recompute/{inside}/act-ReLU/ReLU-op0",
    ]
    assert len(told["events"]) == len(set(told["events"]))
    assert len(_places(told)) == len(set(_places(told)))


FC1 = ["blocks.1.fc.bias", "blocks.1.fc.weight"]
BLOCK1 = [
    "network-Net/blocks-SequentialCell/1-Block",
    "network-Net/blocks-SequentialCell/1-Block/act-ReLU",
    "network-Net/blocks-SequentialCell/1-Block/fc-Dense",
]
ONE_BLOCK = [*FC1, *BLOCK1]
BLOCKS_BUT_ONE = [*FC1, "network-Net/blocks-SequentialCell", *BLOCK1]
FC_MARKED = ["fc.bias", "fc.weight", "network-Net/fc-Dense"]
CONV_MARKED = ["conv1.weight", "network-Net/conv1-Conv2d"]


def test_marks_of_either_set_dump_cover_inner_cells(cells: CaseResults) -> None:
    """The last call counts for each cell, by either of the two functions."""
    marked = cells("marks")
    assert marked["none"] == []
    assert marked["ours"] == marked["theirs"] == ONE_BLOCK
    assert len(marked["all"]) == 17
    assert marked["taken away by ours"] == marked["taken away by theirs"] == BLOCKS_BUT_ONE
    assert marked["marked again"] == FC_MARKED


def test_mark_takes_effect_at_the_next_call(cells: CaseResults) -> None:
    """Marks set after attach count, by either function; unchanged marks are not reported again."""
    told = cells("marks_after_attach")
    assert told["told"][:4] == [FC_MARKED, sorted([*CONV_MARKED, *FC_MARKED]), FC_MARKED, []]
    assert set(ONE_BLOCK) < set(told["told"][4])
    assert told["quiet"]


def test_marked_primitive_marks_its_cell(cells: CaseResults) -> None:
    assert cells("marked_primitive")["marked"] == CONV_MARKED


def test_set_dump_accepts_only_cells_with_true_or_false(cells: CaseResults) -> None:
    told = cells("wrong_marks")["told"]
    assert len(told) == 5
    assert told[2].endswith("gen_ops_prim.MatMul is not allowed; allowed: mindspore.nn.Cell")
    assert told[3] == "set_dump: enabled=1 is not allowed; allowed: True, False"


def test_marks_of_rankdump_are_not_compiled(cells: CaseResults) -> None:
    told = cells("marks_are_not_compiled")
    assert told["flags"] == [{}] * told["count"]


def test_arguments_include_those_of_primitives(cells: CaseResults) -> None:
    """Plain attributes as texts, sorted; no state, no tensors, no flags for compilers."""
    told = cells("arguments")
    conv = told["net"]["Default/network-Net/conv1-Conv2d/Conv2d-op0"]
    assert list(conv) == sorted(conv)
    assert (conv["kernel_size"], conv["pad_mode"], conv["has_bias"]) == ("(3, 3)", "pad", "False")
    assert (conv["conv2d.stride"], conv["conv2d.pad"]) == ("(1, 1, 1, 1)", "(1, 1, 1, 1)")
    for number in (0, 1):
        dense = told["net"][f"Default/network-Net/fc-Dense/Dense-op{number}"]
        assert (dense["in_channels"], dense["matmul.transpose_b"]) == ("32", "True")
    assert told["odd"] == {
        "Default/network-Odd/Odd-op0": {
            "kind": "BFloat16",
            "listed": "[1, 2]",
            "matmul.transpose_a": "False",
            "matmul.transpose_b": "True",
            "nested": "((1, 2), (3, None))",
            "number": "1e-05",
            "off": "False",
        },
        "Default/network-Odd/part-ReLU/ReLU-op0": {},
    }


def test_compiled_model_is_recorded_from_outside_only(cells: CaseResults) -> None:
    told = cells("graph_mode")
    assert _places(told)[:2] == [(BLOCK, "input"), (BLOCK, "output")]
    assert told["events"] == [BLOCK]
    assert len(told["warnings"]) == 1


def test_neither_hook_changes_training(cells: CaseResults) -> None:
    told = cells("training_is_the_same")
    assert told["same"]
    assert not told["troubles"]
    silent, of_cells, of_calls = told["tensors"]
    assert silent == 0
    assert min(of_cells, of_calls) > 50


def test_iteration_that_is_not_armed_installs_nothing(cells: CaseResults) -> None:
    told = cells("not_armed")
    assert told["untouched"]
    assert not told["events"]


def test_outermost_watch_counts_only_outermost_calls(cells: CaseResults) -> None:
    assert cells("outermost_calls")["told"] == [0, 1]


def test_step_watch_counts_calls_and_steps_of_the_own_optimizer(cells: CaseResults) -> None:
    told = cells("steps")
    assert told["told"] == [
        "training, gradients True, trains True",
        "stepped",
        "evaluation, gradients False, trains False",
    ]
    assert (told["before"], told["after"]) == (False, True)


def test_step_watch_counts_a_cell_that_runs_whole_steps(cells: CaseResults) -> None:
    assert set(cells("whole_steps")["told"][1:]) == {"stepped"}


def test_without_dropout_no_dropout_drops_anything(cells: CaseResults) -> None:
    assert cells("dropout") == {"count": 4, "kept": [True] * 4}


def test_run_card_has_batch_weights_and_rate(cells: CaseResults) -> None:
    told = cells("cards")
    first, second = told["same"]
    assert first == second
    card, later, undumped = first
    assert card["models"] == [{**card["models"][0], "parameters": 2, "elements": 20}]
    assert list(card["parameters"]) == ["fc.weight", "fc.bias"]
    assert card["numbers"] == {"learning_rate.0": "0.125"}
    assert {"batch.0", "random.python"} <= card["digests"].keys()
    assert card["settings"]["mindspore.seed"] == "5"
    assert card["versions"]["mindspore"]
    other, other_later, _ = told["other"]
    assert other["parameters"] == card["parameters"]
    assert other["digests"]["batch.0"] == card["digests"]["batch.0"]
    assert other_later["digests"]["batch.0"] != later["digests"]["batch.0"]
    assert not {"digests", "parameters", "numbers"} & undumped.keys()

"""Info files and their steps: content, notes and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.api_dumps import ApiDumpLine, call, gradient, write_dump

from rankdump._compat.tensor_pairs import (
    ApiDumpStep,
    ApiInfoTensor,
    group_counted_steps,
    guess_steps,
    pair_steps,
    read_dump_info,
)
from rankdump.errors import CorruptedError


def tensors(lines: list[ApiDumpLine], tmp_path: Path) -> tuple[ApiInfoTensor, ...]:
    write_dump(tmp_path, lines, npy=False)
    return read_dump_info(tmp_path / "rank0" / "torch_api_dump_info.pkl").tensors


def names(steps: list[ApiDumpStep]) -> list[tuple[str, ...]]:
    return [step.names for step in steps]


@pytest.mark.parametrize("info", ["pkl", "csv"])
def test_read_dump_info_accepts_both_forms_of_lines(info, tmp_path):
    write_dump(tmp_path, call("NN_Conv2d_0"), info=info)
    found = read_dump_info(tmp_path / "rank0" / f"torch_api_dump_info.{info}")
    assert [tensor.name for tensor in found.tensors] == [
        "NN_Conv2d_0_forward_input.0",
        "NN_Conv2d_0_forward_output",
    ]
    assert found.tensors[0].shape == (2, 3)
    assert found.tensors[0].statistics == (1.0, 1.0, 1.0)
    assert not found.has_no_statistics


def test_read_dump_info_omits_an_incomplete_last_line(tmp_path):
    path = tmp_path / "info.pkl"
    path.write_text(call("NN_Conv2d_0")[0].text() + '\n["NN_Conv2d_0_forw')
    found = read_dump_info(path)
    assert len(found.tensors) == 1
    assert found.notes == (
        f"{path}: its last line is incomplete: '[\"NN_Conv2d_0_forw'; the line is omitted",
    )


def test_read_dump_info_omits_names_of_no_api(tmp_path):
    path = tmp_path / "info.pkl"
    path.write_text(ApiDumpLine("something_else").text() + "\n")
    assert "something_else" in read_dump_info(path).notes[0]


def test_read_dump_info_accepts_a_last_line_without_line_end(tmp_path):
    path = tmp_path / "info.pkl"
    path.write_text("\n".join(line.text() for line in call("NN_Conv2d_0")))
    found = read_dump_info(path)
    assert (len(found.tensors), found.notes) == (2, ())


@pytest.mark.parametrize(
    "line", ["{}", "[1, 2]", "nonsense", "[" * 100_000, '["a", 1, [], "", 3, []]']
)
def test_read_dump_info_names_a_damaged_line(line, tmp_path):
    path = tmp_path / "info.pkl"
    path.write_text(f"{line}\n")
    with pytest.raises(CorruptedError, match=r"info\.pkl, line 1"):
        read_dump_info(path)
    path.write_bytes(b'\n["NN_\xff_0", 1, [], "", [], []]\n')
    with pytest.raises(CorruptedError, match=r"info\.pkl, line 2"):
        read_dump_info(path)


def test_guess_steps_ends_a_step_at_a_gradient(tmp_path):
    """What is only forward behind the last gradient belongs to none."""
    found = tensors(
        [
            *call("NN_Conv2d_0"),
            *call("NN_ReLU_0"),
            gradient("NN_ReLU_0"),
            gradient("NN_Conv2d_0"),
            *call("NN_Conv2d_1"),
            gradient("NN_Conv2d_1"),
            *call("NN_Conv2d_2"),
        ],
        tmp_path,
    )
    steps = guess_steps(found, "pytorch")
    assert names(steps) == [("NN_Conv2d_0", "NN_ReLU_0"), ("NN_Conv2d_1",)]
    assert [step.number for step in steps] == [None, None]


def test_guess_steps_without_gradients_returns_one_step(tmp_path):
    found = tensors([*call("NN_Conv2d_0"), *call("NN_Conv2d_1")], tmp_path)
    assert names(guess_steps(found, "pytorch")) == [("NN_Conv2d_0", "NN_Conv2d_1")]


def test_counted_steps_include_accumulation_evaluation_and_recomputation(tmp_path):
    found = tensors(
        [
            *call("NN_Conv2d_0", step=4),
            gradient("NN_Conv2d_0", step=4),
            *call("NN_Conv2d_1", step=4),
            *call("NN_Conv2d_2", step=4, recomputed=True),
            gradient("NN_Conv2d_1", step=4),
            *call("NN_Conv2d_3", step=5),
        ],
        tmp_path,
    )
    steps = group_counted_steps(found, "pytorch")
    assert names(steps) == [("NN_Conv2d_0", "NN_Conv2d_1"), ("NN_Conv2d_3",)]
    assert [step.number for step in steps] == [4, 5]
    assert names(group_counted_steps(found, "pytorch", recomputed=True)) == [("NN_Conv2d_2",)]


def test_interleaved_calls_of_two_threads_are_separate(tmp_path):
    first, second = call("NN_Conv2d_0"), call("NN_Conv2d_1")
    mixed = [first[0], second[0], first[1], second[1]]
    (step,) = guess_steps(tensors(mixed, tmp_path), "pytorch")
    assert step.names == ("NN_Conv2d_0", "NN_Conv2d_1")
    assert [(each.inputs, each.outputs) for each in step.calls] == [(((2, 3),), ((2, 3),))] * 2


def test_layer_that_is_called_again_is_another_call(tmp_path):
    mark = ApiDumpLine("LAYER_fc_forward_input")
    (step,) = guess_steps(tensors([mark, *call("NN_Linear_0"), mark], tmp_path), "pytorch")
    assert step.names == ("LAYER_fc", "NN_Linear_0", "LAYER_fc")


def test_pair_steps_by_number_or_else_by_order():
    def steps(*numbers: int | None) -> list[ApiDumpStep]:
        return [ApiDumpStep(number, (), ()) for number in numbers]

    pairs, said = pair_steps(steps(3, 4, 5), steps(4, 5, 6))
    assert [one.number for one, _ in pairs] == [other.number for _, other in pairs] == [4, 5]
    assert said == "steps that only one dump has are omitted: 3, 6"
    pairs, said = pair_steps(steps(0, 1), steps(7, 8))
    assert [(one.number, other.number) for one, other in pairs] == [(0, 7), (1, 8)]
    assert not said
    pairs, said = pair_steps(steps(None, None, None), steps(None))
    assert len(pairs) == 1
    assert said == "3 steps in origin_path, 1 in target_path: the first 1 are compared"

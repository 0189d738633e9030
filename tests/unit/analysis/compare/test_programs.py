"""Programs of a dump: calls in execution order, for trees of every tool."""

from __future__ import annotations

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump import reader
from rankdump._analysis.compare.programs import read_programs
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, DumpedProgram
from rankdump._core.record import TensorSide
from rankdump._layout.profile import PROFILES

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
FC = "Default/network-Net/fc-Linear/Linear-op0"
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def written(tree: TreeBuilder, *names: str, rank: int = 0, iteration: int = 0, **more) -> None:
    for name in names:
        tree.tensor(rank, iteration, name, ARRAY, side=TensorSide.INPUT, **more)
        tree.tensor(rank, iteration, name, -ARRAY, **more)


def only(tree: TreeBuilder) -> DumpedProgram:
    (program,) = read_programs(reader.open(tree.root), [])
    return program


@pytest.mark.parametrize("profile", PROFILES)
def test_calls_are_in_execution_order(tmp_path, profile):
    tree = TreeBuilder(tmp_path, PROFILES[profile])
    written(tree, FC, CONV)
    tree.complete(0, 0)
    program = only(tree)
    assert [(c.position, c.op_name, c.op_type) for c in program.calls] == [
        (0, FC, "Linear"),
        (1, CONV, "Conv2d"),
    ]
    first = program.calls[0]
    assert [t.slot_name for t in first.tensors] == ["input.0", "output.0"]
    assert [t.seen_order for call in program.calls for t in call.tensors] == [0, 1, 2, 3]
    assert (first.inputs[0].shape, first.inputs[0].dtype) == ((2, 3), "float32")
    assert len(first.inputs[0].digest) == 32


def test_outer_module_encloses_its_calls_in_seen_order(tmp_path):
    tree = TreeBuilder(tmp_path)
    outer = "Default/network-Net/Net-op0"
    tree.tensor(0, 0, outer, ARRAY, side=TensorSide.INPUT)
    written(tree, CONV)
    tree.tensor(0, 0, outer, ARRAY)
    tree.complete(0, 0)
    net, conv = only(tree).calls
    assert (net.op_name, conv.op_name) == (outer, CONV)
    assert [t.seen_order for t in net.tensors] == [0, 3]


def test_backward_and_recomputed_calls_are_separate_calls(tmp_path):
    tree = TreeBuilder(tmp_path)
    written(tree, CONV, f"Recompute/{CONV}", f"Gradients/{CONV}")
    tree.complete(0, 0)
    assert [(c.backward, c.recomputed) for c in only(tree).calls] == [
        (False, False),
        (False, True),
        (True, False),
    ]


def test_backward_and_recomputed_calls_are_known_by_the_spelling_of_files(tmp_path):
    """Without a manifest and a graph, the value of a weight would be paired with its gradient."""
    tree = TreeBuilder(tmp_path)
    written(tree, CONV, f"Recompute/{CONV}", f"Gradients/{CONV}", "Gradients/fc.weight")
    assert [(c.backward, c.recomputed) for c in only(tree).calls] == [
        (False, False),
        (False, True),
        (True, False),
        (True, False),
    ]


def test_repeated_name_is_another_call(tmp_path):
    """Two runs in one tree, or an operator that is watched."""
    tree = TreeBuilder(tmp_path)
    written(tree, CONV, FC, CONV)
    tree.complete(0, 0)
    assert [c.op_name for c in only(tree).calls] == [CONV, FC, CONV]
    assert all(len(c.tensors) == 2 for c in only(tree).calls)


def test_programs_by_rank_iteration_and_constants(tmp_path):
    tree = TreeBuilder(tmp_path)
    for rank in (0, 1):
        for iteration in (0, 3):
            written(tree, CONV, rank=rank, iteration=iteration)
        tree.tensor(rank, 0, "mask", np.eye(2), op_type="Parameter", constant=True)
    programs = read_programs(reader.open(tree.root), [])
    assert [(p.rank, p.iteration) for p in programs] == [
        (rank, iteration) for rank in (0, 1) for iteration in (CONSTANTS_ITERATION, 0, 3)
    ]


def test_tensor_with_file_and_row_is_one_tensor(tmp_path):
    tree = TreeBuilder(tmp_path, items=("max", "min", "nan count", "md5"))
    written(tree, "Default/a,b/Linear-op0", tabled=True)
    tree.complete(0, 0)
    (call,) = only(tree).calls
    for tensor in call.tensors:
        assert tensor.entry is not None
        assert tensor.statistics.keys() == {"max", "min", "nan count"}
    assert (call.outputs[0].statistics["max"], call.outputs[0].statistics["min"]) == (0.0, -5.0)


def test_rows_without_files_make_calls(tmp_path):
    tree = TreeBuilder(tmp_path)
    tree.row(0, 0, CONV, ARRAY, side=TensorSide.INPUT)
    tree.row(0, 0, CONV, ARRAY)
    tree.complete(0, 0)
    (call,) = only(tree).calls
    assert call.op_name == CONV
    assert [(t.entry, t.shape) for t in call.tensors] == [(None, (2, 3))] * 2
    assert call.outputs[0].statistics["max"] == 5.0


def test_read_programs_applies_the_filters_of_the_dump(tmp_path):
    tree = TreeBuilder(tmp_path)
    written(tree, CONV, FC)
    dump = reader.open(tree.root).where(operator="Linear", side="input")
    (program,) = read_programs(dump, [])
    assert [t.slot_name for c in program.calls for t in c.tensors] == ["input.0"]


def test_damaged_table_is_a_problem_without_statistics(tmp_path):
    tree = TreeBuilder(tmp_path)
    written(tree, CONV, tabled=True)
    (table,) = tmp_path.rglob("statistic.csv")
    table.write_bytes(table.read_bytes()[:-5])
    dump = reader.open(tree.root)
    problems: list[str] = []
    (program,) = read_programs(dump, problems)
    assert len(program.calls[0].tensors) == 2
    assert [text for text in problems if "statistic.csv" in text]
    assert "is incomplete" in problems[0]

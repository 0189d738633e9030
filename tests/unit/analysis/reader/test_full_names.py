"""Full names of tensors without a manifest: those of a killed rank, or of a growing iteration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

import rankdump
from rankdump import reader
from rankdump._analysis.reader.full_names import index_full_names
from rankdump._analysis.reader.query import Filters
from rankdump._analysis.reader.tree_walk import locate
from rankdump._core.status import SessionState, SessionStatus
from rankdump._core.tree_session import (
    SESSIONS_FOLDER,
    TreeSession,
    format_tree_session,
    make_session_file_name,
)

LINEAR = "Default/network-Net/block-Sequential/0-Linear/Linear-op0"
WEIGHT = "block.0.weight"
ARRAY = np.ones((2, 3), np.float32)
GRAPH = f"""# Params:
%para1_{WEIGHT}: <Tensor[Float32], (2, 3)>
subgraph @kernel_graph0() {{
  %0(CNode_0) = Linear(%para1_{WEIGHT})
      # Fullname with scope: ({LINEAR})
  %1(CNode_1) = Linear()
      # Fullname with scope: (Gradients/{LINEAR})
}}
"""


def write_step(tree: TreeBuilder, iteration: int, *, rows_only: bool = False) -> None:
    write = tree.row if rows_only else tree.tensor
    write(0, iteration, LINEAR, ARRAY, op_type="Linear")
    write(0, iteration, f"Gradients/{LINEAR}", ARRAY * 2, op_type="Linear")
    write(0, iteration, f"Gradients/{WEIGHT}", ARRAY * 3, op_type="Parameter")


def list_names(root: Path, iteration: int | None = None) -> list[str]:
    filters: Filters = {} if iteration is None else {"iteration": iteration}
    return sorted({*reader.open(root).where(**filters).operators})


NAMES = sorted([LINEAR, f"Gradients/{LINEAR}", f"Gradients/{WEIGHT}"])


@pytest.mark.parametrize("rows_only", [False, True], ids=["files", "rows"])
def test_name_comes_from_a_manifest_of_another_iteration(tmp_path, rows_only):
    tree = TreeBuilder(tmp_path)
    write_step(tree, 0, rows_only=rows_only)
    tree.complete(0, 0)
    write_step(tree, 1, rows_only=rows_only)
    assert list_names(tmp_path, iteration=1) == NAMES
    assert list_names(tmp_path) == NAMES


def test_name_comes_from_the_graph_of_a_rank_that_was_killed_in_its_first_iteration(tmp_path):
    tree = TreeBuilder(tmp_path)
    write_step(tree, 0)
    tree.graph(0, GRAPH)
    status = SessionStatus("job", "session", 0, 1, 0, "host", 1, SessionState.LOST)
    (tmp_path / SESSIONS_FOLDER).mkdir(parents=True)
    file = tmp_path / SESSIONS_FOLDER / make_session_file_name(status)
    file.write_text(format_tree_session(TreeSession(status)))
    assert list_names(tmp_path) == NAMES


def test_tree_of_mindspore_keeps_the_spelling_of_its_files(tmp_path):
    """It has neither manifests nor sessions; its graphs number operators in another way."""
    tree = TreeBuilder(tmp_path)
    write_step(tree, 0)
    tree.graph(0, GRAPH)
    assert all("/" not in name for name in list_names(tmp_path))


def test_one_file_has_the_name_that_the_tree_has(tmp_path):
    tree = TreeBuilder(tmp_path)
    write_step(tree, 0)
    tree.complete(0, 0)
    path = tree.tensor(0, 1, LINEAR, ARRAY, op_type="Linear")
    (entry,) = locate(path)
    assert entry.op_name == LINEAR


def test_spelling_of_two_names_is_not_restored():
    assert index_full_names(["a/b.c", "a.b/c", "a/b", "a/b"]) == {"a_b": "a/b"}


def test_killed_iteration_agrees_with_the_one_that_ended(tmp_path):
    """No name is left in the spelling of files, whose gradients look like values of weights."""
    for name in ("a", "b"):
        tree = TreeBuilder(tmp_path / name)
        for iteration in (0, 1):
            write_step(tree, iteration)
            if name == "b" or iteration == 0:
                tree.complete(0, iteration, world_size=1)
    report = rankdump.compare(tmp_path / "a", tmp_path / "b")
    assert {row.outcome.verdict for row in report.rows} == {"same"}
    assert {(row.name_a, row.name_b) for row in report.rows} == {(each, each) for each in NAMES}

"""Map of ranks: time of iterations, and tensors that differ from those of another rank or tree."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder
from support.web_trees import GRADIENT, LINEAR, fill_tree

from rankdump._analysis.reader.coordinator_files import read_order
from rankdump._analysis.reader.order_times import read_rank_times
from rankdump._analysis.table_index import index_tree
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._web import rank_values
from rankdump.errors import CorruptedError

DIFFERENCES = "fingerprint_differences"


def read_map(client: Any, **parameters: Any) -> tuple[list[list[float | None]], dict[str, Any]]:
    answer = client.get("/ranks.json", params=parameters)
    assert answer.status_code == 200, answer.text
    assert client.get("/ranks", params=parameters).status_code == 200
    assert client.get("/ranks/map.png", params=parameters).status_code == 200
    body = answer.json()
    return [line["values"] for line in body["lines"]], body


# -- time


def test_time_is_that_of_the_order(pages):
    """Entries take 50 us every 100; rank 1 begins two entries later."""
    lines, body = read_map(pages, statistic="time")
    assert lines == [[0.49] * 3, [0.29] * 3]
    assert "by" not in body["note"].split(":")[0]
    assert "order" in body["note"]
    assert "/order?iteration=2" in pages.get("/ranks", params={"statistic": "time"}).text


def test_time_is_that_of_the_tensors_without_an_order(tmp_path, open_pages, monkeypatch):
    root = fill_tree(tmp_path / "tree")
    client = open_pages(root)
    monkeypatch.setattr(rank_values, "_MAX_ORDER_BYTES", 10)
    lines, body = read_map(client, statistic="time")
    # The clock of the builder goes on by 10 us with each of five tensors.
    assert (lines, "clock of the rank" in body["note"]) == ([[0.04] * 3] * 2, True)
    shutil.rmtree(root / GLOBAL_ORDER_FOLDER)
    assert read_map(open_pages(root), statistic="time")[0] == lines


def test_line_that_is_still_written_is_left_out(tmp_path):
    root = fill_tree(tmp_path / "tree")
    (path,) = (root / GLOBAL_ORDER_FOLDER).glob("*.csv")
    whole = read_rank_times(read_order(root)).to_pylist()
    with path.open("a") as file:
        file.write("99,2,0,OPER")
    assert read_rank_times(read_order(root)).to_pylist() == whole
    lines = path.read_text()
    for damaged in (lines.replace("OPERATOR", "OPERATOR,x"), lines.replace(",1000,", ",x,")):
        path.write_text(damaged)
        with pytest.raises(CorruptedError, match=path.name):
            read_rank_times(read_order(root))


# -- differences


def fill_copies(root: Path, *, ranks: int = 3, apart: tuple[int, int] = (2, 1)) -> Path:
    """Write gradients that ranks have in common but for one, and activations of their own."""
    tree = TreeBuilder(root)
    root.mkdir()
    for iteration in range(2):
        for rank in range(ranks):
            own = np.full((2, 3), 10 * rank + iteration, np.float32)
            # The same operator twice: the first call is compared with the first one.
            tree.tensor(rank, iteration, LINEAR, own)
            tree.tensor(rank, iteration, LINEAR, own + 1)
            for name in (GRADIENT, f"{GRADIENT}2"):
                common = np.full((2, 3), iteration, np.float32)
                if (rank, iteration) == apart and name == GRADIENT:
                    common[0, 0] = 9
                tree.tensor(rank, iteration, name, common, op_type="Parameter")
            tree.complete(rank, iteration, world_size=ranks)
    return root


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("copies")
    found = {name: fill_copies(folder / name) for name in ("walked", "indexed")}
    index_tree(found["indexed"])
    return found


@pytest.mark.parametrize("name", ["walked", "indexed"])
def test_copies_are_compared_with_the_lowest_rank(copies, open_pages, name):
    client = open_pages(copies[name])
    lines, body = read_map(client, statistic=DIFFERENCES)
    assert lines == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert body["title"] == "Parameters and gradients that differ from those of rank 0"
    assert body["note"] == "12 of 12 tensors have a counterpart with a digest"
    everything, body = read_map(client, statistic=DIFFERENCES, tensors="all")
    assert everything == [[0.0, 0.0], [2.0, 2.0], [2.0, 3.0]]
    other, body = read_map(client, statistic=DIFFERENCES, base=2, search="gradients/")
    assert (other, body["base"]) == ([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], 2)
    text = client.get("/ranks", params={"statistic": DIFFERENCES}).text.replace("&amp;", "&")
    assert "/diff?a=0&b=0&rank_a=2&rank_b=0&iteration_a=1&iteration_b=1" in text
    assert "/tensors?rank=0&iteration=1" in text


def test_trees_are_compared_rank_by_rank(copies, open_pages, tmp_path, monkeypatch):
    other = fill_copies(tmp_path / "other", apart=(1, 0))
    client = open_pages(copies["indexed"], copies["walked"], other)
    same, body = read_map(client, statistic=DIFFERENCES, against=1)
    assert same == [[0.0, 0.0]] * 3
    assert body["title"] == f"Tensors that differ from those of {copies['walked']}"
    monkeypatch.setattr(rank_values, "_MAX_ROWS", 1)
    lines, _ = read_map(client, statistic=DIFFERENCES, against=2)
    assert lines == [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    # Ranks are read one by one, and the base again for each.
    alone, body = read_map(client, statistic=DIFFERENCES, tree=2)
    assert alone == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    assert body["note"].startswith("12 of 12 tensors")
    asked = {"statistic": DIFFERENCES, "against": 2, "tree": 1}
    text = client.get("/ranks", params=asked).text.replace("&amp;", "&")
    assert "/diff?a=1&b=2&rank_a=1&rank_b=1&iteration_a=0&iteration_b=0" in text


def test_other_parts_of_a_tensor_are_not_compared(tmp_path, open_pages):
    """Shards of ranks differ, and are no copies; nor is what one rank alone has."""
    tree = TreeBuilder(tmp_path / "tree")
    for rank, rows in ((0, 3), (1, 2)):
        values = np.full((rows, 3), rank, np.float32)
        layout = shard_rows(rank, 3 * rank, (5, 3))
        tree.tensor(rank, 0, GRADIENT, values, op_type="Parameter", tensor_layout=layout)
        tree.tensor(rank, 0, f"Gradients/{rank}", values, op_type="Parameter")
        tree.complete(rank, 0)
    lines, body = read_map(open_pages(tree.root), statistic=DIFFERENCES)
    assert lines == [[0.0]]
    assert body["note"] == "2 of 4 tensors have a counterpart with a digest"


def test_fingerprints_are_compared_where_there_are_no_digests(tmp_path, open_pages):
    tree = TreeBuilder(tmp_path / "tree", fingerprints=True)
    for rank in (0, 1):
        for name, value in (("Gradients/a", 1), ("Gradients/b", rank)):
            tree.row(rank, 0, name, np.full(3, value, np.float32), op_type="Parameter")
        tree.complete(rank, 0)
    assert read_map(open_pages(tree.root), statistic=DIFFERENCES)[0] == [[0.0], [1.0]]


def test_nothing_to_compare_is_said(tmp_path, open_pages):
    tree = TreeBuilder(tmp_path / "tree")
    tree.tensor(0, 0, LINEAR, np.ones(3, np.float32))
    tree.complete(0, 0, world_size=1)
    text = open_pages(tree.root).get("/ranks", params={"statistic": DIFFERENCES}).text
    assert "No tensor has a counterpart" in text
    assert "tensors=all" in text


@pytest.mark.parametrize("wrong", [{"base": "x"}, {"against": 4}, {"tensors": "some"}])
def test_wrong_base_is_one_line(copies, open_pages, wrong):
    asked = {"statistic": DIFFERENCES, **wrong}
    answer = open_pages(copies["walked"]).get("/ranks.json", params=asked)
    assert (answer.status_code, next(iter(wrong)) in answer.json()["error"]) == (400, True)

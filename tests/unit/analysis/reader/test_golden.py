"""Trees that MindSpore wrote, where they are available."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rankdump import reader
from rankdump.reader import Query, Search, Survey, graph_files, walk

GOLDEN = Path(__file__).parents[5] / "shared" / "golden" / "mindspore"
TREES = {
    "2.0.0-dtypes": (59, 1, 22),
    "2.0.0-two-ranks": (370, 1, 29),
    "2.7.0-dtypes": (96, 1, 22),
    "2.7.0-longname": (7, 1, 4),
    "2.7.0-three-graphs": (240, 1, 24),
    "2.7.0-two-ranks": (462, 2, 29),
}


def golden(name: str) -> Path:
    path = GOLDEN / name
    if not path.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"no tree {path}")
    return path


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_of_mindspore_trees_is_read(name):
    """All names are understood, and every array is numpy's, or bfloat16 that numpy refuses."""
    dump = reader.open(golden(name))
    tensors, ranks, operators = TREES[name]
    assert (len(dump.tensors()), len(dump.ranks)) == (tensors, ranks)
    assert len(dump.operators) == operators
    assert walk(dump.root).foreign == 0
    assert dump.problems == ()
    for entry in dump.tensors():
        array = dump.load(entry)
        assert dump.load(entry.key).tobytes() == array.tobytes()
        if b"'<E2'" in entry.path.read_bytes()[:128]:
            raw = np.fromfile(entry.path, "<u2", offset=128).astype("<u4")
            expected = (raw << 16).view(np.float32).reshape(array.shape)
            assert reader.facts(entry).dtype == "bfloat16"
        else:
            expected = np.load(entry.path, allow_pickle=False)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_constants_and_long_names_of_mindspore_trees():
    """Folder `constants` of 2.0, `mapping.csv` of 2.7."""
    assert len(reader.open(golden("2.0.0-two-ranks")).constants) == 10
    long = reader.open(golden("2.7.0-longname")).tensors(op_type="ReLU")
    assert all(entry.path.name[0].isdecimal() for entry in long)
    assert len(long) == 2


def test_nonfinite_tensors_of_mindspore_trees_are_found():
    """The case that was made of NaN and infinities, and no other one."""
    survey = Survey(walk(golden("2.7.0-dtypes")), Query())
    bad = [row for row in survey if row.finite is False]
    assert [(row.op_name, row.nans, row.infinities) for row in bad] == [
        ("Default_Abs-op7", 1, 2),
        ("Default_Abs-op7", 1, 2),
        ("x", 1, 2),
    ]


@pytest.mark.parametrize(
    ("name", "question", "operators", "files"),
    [
        ("2.7.0-two-ranks", "conv.py:366", ["Conv2D-op0", "Conv2DBackpropFilter-op1"], 36),
        ("2.0.0-two-ranks", "output = self.conv2d(x, self.weight)", ["Conv2D-op37"], 18),
        ("2.0.0-two-ranks", "train_2rank.py:25", ["AllReduce-op50", "Depend-op57"], 12),
    ],
)
def test_source_line_of_mindspore_trees_leads_to_files(name, question, operators, files):
    """By the graphs that MindSpore wrote, on every rank."""
    tree = walk(golden(name))
    found = Search(question, tree.entries).origins(graph_files(tree.root, tree.ranks))
    names = sorted({origin.op_name.rpartition("/")[2] for origin in found})
    assert [n for n in operators if n in names] == operators
    assert sum(len(origin.tensors) for origin in found) == files

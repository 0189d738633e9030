"""Items of a tree besides the tensors of iterations: constants, tables, arguments."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_rows import read_table_rows
from rankdump._core.record import TensorSide
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout import statistic_tables
from rankdump._layout.profile import PROFILES
from rankdump.errors import CorruptedError
from rankdump.reader import Query, Survey, damaged, findings, load, locate, status, walk
from rankdump.reader import open as open_dump

ONES = np.ones((2, 3), np.float32)
NAN = np.array([np.nan, 1.0], np.float32)


def test_constants_belong_to_their_graph(tree):
    """They stand first, belong to no iteration, and are never missed in one."""
    tree.tensor(0, 2, "data-3", ONES, op_type="Parameter", constant=True)
    tree.tensor(0, 2, "Default/a-A/A-op0", ONES)
    tree.complete(0, 2, world_size=1)
    tree.tensor(0, 3, "Default/a-A/A-op0", ONES)
    tree.complete(0, 3, world_size=1)
    found = walk(tree.root)
    first, *_ = found.entries
    assert first.key.constant
    assert first.op_name == "data-3"
    assert first.record is not None
    assert found.foreign == 0
    assert findings(found) == ()
    assert [i.iteration for i in status(tree.root).iterations] == [2, 3]
    assert locate(first.path) == (first,)


def test_tables_and_arguments_are_known_files(tree):
    """A table is listed, an operator's arguments are passed over; neither is foreign."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, tabled=True)
    (path.parent / "A.Default_a-A_A-op0.json").write_text(json.dumps({"stride": "(1, 1)"}))
    (path.parent / "notes.json").write_text("{}")
    tree.complete(0, 0, world_size=1)
    found = walk(tree.root)
    assert [(t.rank, t.graph, t.iteration) for t in found.tables] == [(0, 0, 0)]
    assert found.foreign == 1
    assert found.problems == ()


def test_record_without_a_path_is_a_table_row(tree):
    """What was kept as figures alone is not a missing file, and its rank is not empty."""
    tree.row(0, 0, "Default/network-Net/a-A/A-op0", ONES, side=TensorSide.INPUT)
    tree.complete(0, 0, world_size=1)
    found = walk(tree.root)
    assert found.entries == ()
    assert found.problems == findings(found) == ()
    (row,) = read_table_rows(found.tables[0], TableRecords(found))
    assert row.op_name == "Default/network-Net/a-A/A-op0"
    assert row.key.op_name == "Default_network-Net_a-A_A-op0"
    assert (row.dtype, row.shape, row.data_bytes) == ("float32", (2, 3), 24)
    assert (row.number("max"), row.number("l2norm")) == (1.0, 2.44949)
    assert row.number("avg") is None


def test_rows_of_constants_belong_to_no_iteration(tree):
    """Their table is read like any other; an iteration filter leaves it out."""
    tree.row(0, 2, "data-3", NAN, op_type="Parameter", constant=True)
    tree.row(0, 2, "Default/a-A/A-op0", ONES)
    tree.complete(0, 2, world_size=1)
    found = walk(tree.root)
    assert (found.foreign, found.problems, findings(found)) == (0, (), ())
    first, second = open_dump(tree.root).statistics()
    assert (first.key.constant, first.op_name, second.key.iteration) == (True, "data-3", 2)
    assert len(open_dump(tree.root).statistics(iteration=2)) == 1
    assert open_dump(tree.root).iterations == (2,)
    assert [row.key.constant for row in Survey(found, Query())] == [True, False]


def test_tables_with_different_columns_are_both_read(tree):
    """Rows of a second job stand beside those of the first."""
    table = tree.row(0, 0, "Default/a-A/A-op0", ONES)
    table.rename(table.with_name(statistic_tables.make_second_table_name("other")))
    tree.items = ("max",)
    tree.row(0, 0, "Default/b-B/B-op0", ONES)
    tree.complete(0, 0, world_size=1)
    assert walk(tree.root).foreign == 0
    assert {row.op_name.rpartition("/")[2] for row in open_dump(tree.root).statistics()} == {
        "A-op0",
        "B-op0",
    }


def test_iteration_of_rows_without_a_manifest_is_unfinished(tree):
    """A table without a manifest is not complete either."""
    tree.row(0, 4, "Default/a-A/A-op0", ONES)
    (tree.root / STATE_FOLDER).mkdir()
    (finding,) = findings(walk(tree.root))
    assert "rank 0: iteration 4" in finding
    assert not damaged(walk(tree.root))


@pytest.mark.parametrize(
    ("items", "values", "finite"),
    [
        (("max", "min", "l2norm"), ONES, True),
        (("max", "min"), NAN, False),
        (("max",), NAN, False),
        (("max",), ONES, None),
        (("min",), np.array([1.0, -np.inf], np.float32), False),
        (("nan count", "negative inf count", "positive inf count"), ONES, True),
        (("nan count", "negative inf count", "positive inf count"), NAN, False),
        (("md5", "count"), NAN, None),
        ((), ONES, None),
    ],
)
def test_row_is_finite_by_extremes_or_counts(tree, items, values, finite):
    """Extremes or counts decide whether a tensor is finite; other columns do not know."""
    tree.items = items
    tree.row(0, 0, "Default/a-A/A-op0", values)
    found = walk(tree.root)
    (row,) = read_table_rows(found.tables[0], TableRecords(found))
    assert row.finite is finite


def test_null_statistic_is_none(tree):
    """Releases up to 2.2 write null where no finite element is left."""
    tree.profile = PROFILES["ms2.0"]
    path = tree.row(0, 0, "Default/a-A/A-op0", NAN)
    path.write_text(path.read_text().replace("nan,nan,nan", "null,null,null"))
    found = walk(tree.root)
    (row,) = read_table_rows(found.tables[0], TableRecords(found))
    assert row.number("max") is None
    assert row.finite is False


@pytest.mark.parametrize(
    ("tail", "words"),
    [("A,Default", "its last line is incomplete: 'A,Default'"), ("A,Default\n", "line 3: ")],
)
def test_torn_table_is_an_error_with_its_line(tree, tail, words):
    """Damage is one sentence with file and line; the rows before a torn end are read."""
    path = tree.row(0, 0, "Default/a-A/A-op0", ONES)
    path.write_text(path.read_text() + tail)
    found = walk(tree.root)
    with pytest.raises(CorruptedError, match=rf"statistic\.csv.*{words}"):
        list(read_table_rows(found.tables[0], TableRecords(found)))
    survey = Survey(found, Query())
    assert len(list(survey)) == (not tail.endswith("\n"))
    assert len(survey.problems) == 1


@pytest.mark.parametrize("descr", ["<E2", "<T2", "<h2"])
def test_bfloat16_of_mindspore_is_read_as_float32(tree, descr):
    """What MindSpore writes under a type string of its own comes out widened."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", np.zeros((2, 2), np.uint16), codec="none")
    header = path.read_bytes()[:128].replace(b"<u2", descr.encode())
    path.write_bytes(header + np.array([0x3F80, 0xC000, 0x7F80, 0x0000], "<u2").tobytes())
    tensor = load(walk(tree.root).entries[0])
    assert tensor.dtype == np.float32
    assert tensor.tolist() == [[1.0, -2.0], [np.inf, 0.0]]
    assert not tensor.flags.writeable


@pytest.mark.parametrize(("stray", "whole"), [(0, True), (4, True), (8, True), (9, False)])
def test_one_extra_element_after_an_empty_tensor_is_accepted(tree, stray, whole):
    """One element of them is MindSpore 2.0's habit; more is damage."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", np.empty(0, np.float32), codec="none")
    path.write_bytes(path.read_bytes() + bytes(stray))
    (entry,) = walk(tree.root).entries
    if whole:
        assert load(entry).shape == (0,)
    else:
        with pytest.raises(CorruptedError, match="9 bytes"):
            load(entry)

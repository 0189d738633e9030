"""`rankdump.compare` over trees written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.api_dumps import ApiDumpLine, write_dump
from support.api_dumps import call as api_call
from support.tree_builder import TreeBuilder

import rankdump
from rankdump import reader
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    ComparisonReport,
    DumpedProgram,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_pairs import pair_programs
from rankdump._core.record import TensorSide
from rankdump.errors import ConfigError, CorruptedError

CONV = "Default/network-Net/conv1-Conv2d/Conv2d-op0"
ACT = "Default/network-Net/act-ReLU/ReLU-op0"
FC = "Default/network-Net/fc-Linear/Linear-op0"
IR = f"""# IR entry: @kernel_graph0
subgraph @kernel_graph0() {{
  %0(conv) = Conv2d(%para1_x) {{stride: (1, 1)}}
      : (<Tensor[Float32], (2, 3)>) -> (<Tensor[Float32], (2, 3)>)
      # Fullname with scope: ({CONV})
      # In file /job/train.py:40/    loss = net(x)/
      # In file /job/model.py:7/        return self.fc(self.conv1(x))/
}}
"""
START = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def grown(
    root: Path,
    scale: float = 1.0,
    *,
    ranks: tuple[int, ...] = (0, 1),
    iterations: tuple[int, ...] = (0, 1),
    bad: float | None = None,
    tensors: bool = True,
) -> Path:
    """A chain of three operators; `scale` is the weight of the middle one, `bad` is put into it."""
    tree = TreeBuilder(root, items=("max", "min", "avg", "l2norm"))
    write = tree.tensor if tensors else tree.row
    for rank in ranks:
        tree.graph(rank, IR)
        for iteration in iterations:
            array = START + rank + iteration
            for name, weight in ((CONV, scale), (ACT, 1.0), (FC, 2.0)):
                write(rank, iteration, name, array, side=TensorSide.INPUT)
                array = array * np.float32(weight)
                if bad is not None and name == CONV:
                    array[0, 1] = bad
                write(rank, iteration, name, array)
            tree.complete(rank, iteration)
    return root


@pytest.fixture
def one(tmp_path) -> Path:
    return grown(tmp_path / "one")


def verdicts(report: ComparisonReport) -> set[TensorVerdict]:
    return {row.outcome.verdict for row in report.rows}


def test_compare_finds_no_difference_of_a_dump_to_itself(one):
    report = rankdump.compare(one, one)
    assert (report.agrees, report.origins, report.notes) == (True, (), ())
    assert len(report.rows) == 2 * 2 * 6
    assert verdicts(report) == {TensorVerdict.SAME}


def test_report_rows_are_sorted_by_iteration_order_and_rank(one):
    report = rankdump.compare(one, one)
    places = [(row.iteration, row.position, row.rank, row.slot_name) for row in report.rows]
    assert places == sorted(places)
    assert places[:3] == [(0, 0, 0, "input.0"), (0, 0, 0, "output.0"), (0, 0, 1, "input.0")]


def test_report_names_the_first_differing_operator_and_its_line(one, tmp_path):
    report = rankdump.compare(one, grown(tmp_path / "other", 1.5))
    (origin,) = report.origins
    (suspect,) = origin.suspects
    assert (origin.kind, origin.certain, suspect.name_a) == ("difference", True, CONV)
    assert (suspect.rank, suspect.iteration, suspect.position) == (0, 0, 0)
    assert [(line.file, line.line) for line in suspect.source] == [
        ("/job/train.py", 40),
        ("/job/model.py", 7),
    ]
    assert [origin.suspects[0].rank for origin in report.rank_origins] == [0, 1]
    assert not report.agrees


def test_nonfinite_origin_is_found_through_equal_digests(one, tmp_path):
    """Inputs of one digest are not read for the comparison, and still known to be finite."""
    report = rankdump.compare(one, grown(tmp_path / "other", bad=np.nan))
    nonfinite = [origin for origin in report.origins if origin.kind == "nonfinite"]
    assert [(o.side, o.certain, o.suspects[0].name_b) for o in nonfinite] == [("b", True, CONV)]
    assert nonfinite[0].suspects[0].reason.startswith("its inputs are finite")


def test_nonfinite_origin_of_values_on_both_sides(tmp_path):
    """Both put infinity out of the first operator, bit for bit; the third alone differs."""
    one = grown(tmp_path / "one", bad=np.inf, ranks=(0,), iterations=(0,))
    two = TreeBuilder(tmp_path / "two")
    for entry in reader.open(one).tensors():
        last = entry.op_name == FC and entry.key.side is TensorSide.OUTPUT
        array = reader.load(entry) + np.float32(last)
        two.tensor(0, 0, entry.op_name, array, side=entry.key.side)
    two.complete(0, 0)
    report = rankdump.compare(one, two.root)
    found = {(o.kind, o.side): (o.suspects[0].name_a, o.certain) for o in report.origins}
    assert found == {
        ("difference", ""): (FC, True),
        ("nonfinite", "a"): (CONV, True),
        ("nonfinite", "b"): (CONV, True),
    }


def test_infinite_mask_on_both_sides_does_not_hide_nan(tmp_path):
    """The mask has one digest everywhere, so nobody knew that it is infinite."""
    mask = np.full((2, 3), -np.inf, np.float32)
    trees = [TreeBuilder(tmp_path / name) for name in "ab"]
    for tree, end in zip(trees, (1.0, np.nan), strict=True):
        for name, result in ((CONV, START), (ACT, START * np.float32(end))):
            tree.tensor(0, 0, name, START, side=TensorSide.INPUT)
            tree.tensor(0, 0, name, mask, side=TensorSide.INPUT, slot=1)
            tree.tensor(0, 0, name, result)
        tree.complete(0, 0)
    report = rankdump.compare(*(tree.root for tree in trees))
    (origin,) = [origin for origin in report.origins if origin.kind == "nonfinite"]
    assert (origin.side, origin.certain, origin.suspects[0].name_b) == ("b", True, ACT)


def test_compare_two_iterations_or_ranks_of_one_tree(one):
    report = rankdump.compare(one, one, rank=0, iteration_a=0, iteration_b=1)
    assert (report.a, report.b) == (f"{one} rank 0 iteration 0", f"{one} rank 0 iteration 1")
    assert report.notes == ()
    assert {(row.rank, row.iteration) for row in report.rows} == {(0, 0)}
    assert "outside what was dumped" in report.origins[0].suspects[0].reason
    report = rankdump.compare(one, one, rank_a=1, rank_b=0, iteration=1)
    assert {(row.rank, row.iteration) for row in report.rows} == {(1, 1)}


def test_compare_different_ranks_at_different_iterations(one):
    """Data are START + rank + iteration, so these two are the same numbers."""
    report = rankdump.compare(one, one, rank_a=0, iteration_a=1, rank_b=1, iteration_b=0)
    assert report.agrees


def test_report_notes_ranks_and_iterations_of_one_side(one, tmp_path):
    other = grown(tmp_path / "other", ranks=(0, 1, 2), iterations=(0,))
    report = rankdump.compare(one, other)
    assert report.notes == (
        "only b has rank 2",
        "only a has iteration 1 of rank 0",
        "only a has iteration 1 of rank 1",
    )
    assert not report.agrees
    assert verdicts(report) == {TensorVerdict.SAME}


def test_unpaired_layer_mark_is_not_a_difference(tmp_path):
    """A dump with files has it once, where it is called first."""
    mark = ApiDumpLine("LAYER_fc_forward_input", np.zeros(1, np.float32), step=1)
    fuller = [mark, *api_call("NN_Linear_0", step=1), replace(mark, step=2)]
    both = (fuller, fuller[:-1])
    a, b = (
        write_dump(tmp_path / name, [*lines, *api_call("NN_Linear_1", step=2)], npy=False)
        for name, lines in zip("ab", both, strict=True)
    )
    report = rankdump.compare(a, b)
    assert report.agrees
    assert {row.name_a for row in report.rows if row.iteration == 2} == {"NN_Linear_1_forward"}


def test_single_ranks_are_paired_with_different_numbers(tmp_path):
    one = grown(tmp_path / "one", ranks=(0,))
    other = grown(tmp_path / "other", ranks=(3,))
    assert rankdump.compare(one, other).notes == ()


@pytest.mark.parametrize(
    ("a", "b", "gone_a", "gone_b", "pairs", "says"),
    [
        ("00 10", "00", "", "10", "00-00", "b has retired rank 1, which a has"),
        ("10", "00", "", "10", "", "b has retired rank 1, which a has; only b has rank 0"),
        ("05", "03", "", "05", "", "b has retired iteration 5 of rank 0, which a has; only b "),
        ("05", "03", "03", "", "", "only a has iteration 5 of rank 0; a has retired iteration 3 "),
        ("05", "03", "01", "02", "05-03", ""),
        ("05", "05", "", "05", "05-05", ""),
        ("02 03", "01 02", "01", "", "02-02", "only a has iteration 3 of rank 0; a has retired "),
    ],
)
def test_retired_iterations_are_not_paired_with_others(a, b, gone_a, gone_b, pairs, says):
    """Each two digits are a rank and an iteration."""

    def places(text: str) -> list[tuple[int, int]]:
        return [(int(rank), int(iteration)) for rank, iteration in text.split()]

    one, two = ([DumpedProgram(*place, ()) for place in places(text)] for text in (a, b))
    notes: list[str] = []
    gone = {"gone_a": places(gone_a), "gone_b": places(gone_b)}
    found = pair_programs(one, two, notes, **gone)
    told = [f"{p.rank}{p.iteration}-{q.rank}{q.iteration}" for p, q in found]
    assert told == pairs.split()
    assert "; ".join(notes).startswith(says)
    assert bool(notes) == bool(says)


def test_compare_applies_filters_to_both_sides(one):
    report = rankdump.compare(one, one, operator="Linear", side="output", iteration="0", rank=1)
    assert [(row.name_a, row.slot_name) for row in report.rows] == [(FC, "output.0")]
    dump = reader.open(one).where(op_type="ReLU")
    assert {row.name_a for row in rankdump.compare(dump, dump).rows} == {ACT}


def test_compare_statistics_without_elements(one, tmp_path):
    same, other = (
        grown(tmp_path / name, scale, tensors=False) for name, scale in (("same", 1), ("other", 3))
    )
    assert rankdump.compare(same, grown(tmp_path / "again", tensors=False)).agrees
    report = rankdump.compare(same, other)
    assert report.origins[0].suspects[0].name_a == CONV


def test_unreadable_file_is_a_row_of_the_report(one, tmp_path):
    other = grown(tmp_path / "other", 1.5)
    entry = reader.open(other).tensors(operator=ACT, side="output")[0]
    entry.path.write_bytes(b"no array")
    report = rankdump.compare(one, other)
    assert TensorVerdict.UNREADABLE in verdicts(report)
    assert any(entry.relative in note for note in report.notes)
    assert report.origins[0].suspects[0].name_a == CONV


def test_constants_are_compared_without_an_iteration(tmp_path):
    trees = [TreeBuilder(tmp_path / name) for name in "ab"]
    for at, tree in enumerate(trees):
        tree.tensor(0, 0, "mask", np.eye(2) + at, op_type="Parameter", constant=True)
        tree.tensor(0, 4, CONV, START)
        tree.complete(0, 4)
    report = rankdump.compare(*(tree.root for tree in trees))
    assert [(row.iteration, row.name_a) for row in report.rows] == [
        (CONSTANTS_ITERATION, "mask"),
        (4, CONV),
    ]
    assert report.origins[0].suspects[0].name_a == "mask"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rank": 7}, "rank: 7 is not allowed; allowed: 0, 1"),
        ({"iteration": 9}, "iteration: 9 is not allowed; allowed: 0, 1"),
        ({"match": "types"}, "exact, mapping, type, sequence"),
        ({"match": ""}, "exact, mapping, type, sequence"),
        ({"rtol": -1.0}, "rtol: -1.0 is not allowed"),
        ({"atol": float("nan")}, "atol: nan is not allowed"),
        ({"side": "both"}, '"input" or "output"'),
        ({"mapping": "/not/there"}, "/not/there"),
    ],
)
def test_invalid_setting_is_an_error_in_one_line(one, given, says):
    with pytest.raises(ConfigError) as error:
        rankdump.compare(one, one, **given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_to_compare_is_an_error_in_one_line(one, tmp_path):
    with pytest.raises(CorruptedError, match="no tensor has operator 'nope'"):
        rankdump.compare(one, one, operator="nope")
    other = grown(tmp_path / "other", ranks=(2, 3))
    with pytest.raises(CorruptedError, match="they have no rank and iteration in common"):
        rankdump.compare(one, other)
    with pytest.raises(CorruptedError, match="no such folder"):
        rankdump.compare(one, tmp_path / "nowhere")


def test_mapping_pairs_names_of_another_network(one, tmp_path):
    tree = TreeBuilder(tmp_path / "other")
    entries = reader.open(one).tensors(rank=0, iteration=0)
    for entry in entries:
        name = entry.op_name.replace("conv1-Conv2d/Conv2d", "first-Layer/Layer")
        tree.tensor(0, 0, name, reader.load(entry), side=entry.key.side)
    tree.complete(0, 0)
    names = tmp_path / "names"
    names.write_text(f"{CONV},Default/network-Net/first-Layer/Layer-op0\n")
    report = rankdump.compare(one, tree.root, rank=0, iteration=0, mapping=names)
    assert report.agrees
    assert {row.rule for row in report.rows} == {"mapping", "exact"}


def test_progress_is_reported(one):
    told: list[tuple[int, int]] = []
    rankdump.compare(one, one, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (24, 24)

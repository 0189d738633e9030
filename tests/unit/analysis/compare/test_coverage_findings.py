"""Ranks, files and micro-batches that a side lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankdump._analysis.compare.coverage_findings import (
    SideCoverage,
    find_uneven_microbatches,
    list_coverage_findings,
    list_microbatch_findings,
)
from rankdump._analysis.compare.report import (
    DumpedCall,
    DumpedProgram,
    DumpedTensor,
)
from rankdump._analysis.reader.tree import Entry
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE


def make_call(
    microbatch: int | None, *, backward: bool = False, op_type: str = "Linear"
) -> DumpedCall:
    key = TensorKey(0, "net", 0, 0, 0, op_type, "fc", TensorSide.OUTPUT, 0)
    facts = "a.npy", 0, op_type, "fc", "", "float32", (2,), 8, 8, "digest"
    record = ManifestRecord(*facts, microbatch=microbatch)
    entry = Entry(Path("tree"), "a.npy", key, 8, record)
    tensor = DumpedTensor(TensorSide.OUTPUT, 0, "", "float32", (2,), entry=entry)
    return DumpedCall(0, op_type, "fc", outputs=(tensor,), backward=backward)


def make_program(
    rank: int,
    forward: Sequence[int | None],
    backward: Sequence[int | None] = (),
    iteration: int = 0,
) -> DumpedProgram:
    calls = [make_call(number) for number in forward]
    calls += [make_call(number, backward=True) for number in backward]
    calls.append(make_call(None, op_type=PARAMETER_OP_TYPE))
    return DumpedProgram(rank, iteration, tuple(calls))


def list_texts(a: Sequence[DumpedProgram], b: Sequence[DumpedProgram]) -> list[str]:
    found = list_microbatch_findings(find_uneven_microbatches(a), find_uneven_microbatches(b))
    return [each.text for each in found]


def test_ranks_that_left_micro_batches_out_are_told():
    a = [make_program(0, (0, 1, 2)), make_program(1, (0, 1, 2)), make_program(2, (1, 2))]
    [found] = list_microbatch_findings(find_uneven_microbatches(a), {})
    text = "micro-batches of a were left out from iteration 0 on: rank 2 ran 2 of 3 forward"
    assert (found.text, found.ranks, found.iteration) == (text, (2,), 0)


def test_a_single_pass_without_a_number_is_one():
    b = [make_program(0, (0, 1), iteration=4), make_program(1, (None,), iteration=4)]
    text = "micro-batches of b were left out from iteration 4 on: rank 1 ran 1 of 2 forward"
    assert list_texts([], b) == [text]


def test_backward_is_told_only_where_the_forward_was_run():
    uneven = [make_program(0, (0, 1), (0, 1)), make_program(1, (0,), (0,))]
    assert [text.split()[-1] for text in list_texts(uneven, [])] == ["forward"]
    without = [make_program(0, (0, 1), (0, 1)), make_program(1, (0, 1), (0,))]
    assert [text.split()[-1] for text in list_texts(without, [])] == ["backward"]


def test_even_numbers_and_those_of_both_sides_are_not_told():
    even = [make_program(rank, (0, 1, None), (1, 0)) for rank in range(2)]
    assert list_texts(even, even) == []
    uneven = [make_program(0, (0, 1)), make_program(1, (0,))]
    assert list_texts(uneven, uneven) == []
    assert len(list_texts(uneven, [make_program(0, (0, 1)), make_program(1, (0, 1))])) == 1


def test_missing_ranks_and_files_lead_with_a_count():
    a = SideCoverage({}, ("rank_0/x.npy: named by a manifest, but missing", "rank_0/y.npy: ..."))
    b = SideCoverage({}, is_joined=True, missing_ranks=(1, 2, 3), world_size=4)
    assert [(each.subject, each.text) for each in list_coverage_findings(a, b)] == [
        ("ranks", "b has no rank 1-3, and its job had 4 ranks"),
        ("files", "a lacks 2 files; first rank_0/x.npy: named by a manifest, but missing"),
    ]
    damaged = SideCoverage({}, damages=("rank_0/.dump_metadata/manifest/x: not JSON",))
    assert [each.text for each in list_coverage_findings(SideCoverage({}), damaged)] == [
        "b has 1 problem; first rank_0/.dump_metadata/manifest/x: not JSON"
    ]
    assert list_coverage_findings(SideCoverage({}), SideCoverage({}, world_size=4)) == []

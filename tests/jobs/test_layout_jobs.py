"""Jobs of one model in several layouts, compared with the same job on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.scenario_jobs import run_scenarios

import rankdump
from rankdump._analysis.compare import comparison
from rankdump._analysis.compare.programs import read_programs
from rankdump._analysis.compare.report import (
    ComparisonReport,
    DumpedCall,
    DumpedProgram,
    TensorVerdict,
)
from rankdump._analysis.compare.report_text import describe_origin, list_card_differences
from rankdump._analysis.reader.dump import Dump

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

LAYOUTS = {
    2: (
        "ddp",
        "fsdp2",
        "tp",
        "fsdp2_bf16",
        "tp_sp",
        "pp",
        "ddp-gradients",
        "ddp-norm",
        "tp-reduction",
        "fsdp2-seed",
        "tp_dropout",
        "tp_dropout-dropout",
        "ddp_accumulate",
        "ddp_accumulate-microbatch",
    ),
    4: ("fsdp2_tp",),
}
JOB = Path(__file__).with_name("layout_job.py")


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory):
    """Return the report of a layout against one rank."""
    root = tmp_path_factory.mktemp("layouts")
    run_scenarios(JOB, root, {1: ("one", "one_dropout", "fsdp2_bf16"), **LAYOUTS})
    worlds = {name: world for world, names in LAYOUTS.items() for name in names}

    def compare_layout(
        name: str, *, unshard: bool | None = None, noise: str = ""
    ) -> ComparisonReport:
        tree = root / str(worlds[name]) / name / "tree"
        runs = [root / "1" / noise / "tree"] if noise else []
        reference = "one_dropout" if "dropout" in name else "one"
        return rankdump.compare(tree, root / "1" / reference / "tree", unshard=unshard, noise=runs)

    return compare_layout


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "ddp_accumulate", "fsdp2", "fsdp2_bf16", "fsdp2_tp", "pp"),
        *("tp", "tp_dropout", "tp_sp"),
    ],
)
def test_tensors_of_a_layout_agree_with_those_of_one_rank(compare, name):
    report = compare(name)
    assert report.origins == ()
    assert report.notes == ()
    assert report.settings.by_rounding
    assert list_card_differences(report) == []
    # 426 tensors of one rank in two iterations; each is paired.
    assert len(report.rows) == 426
    left = [row for row in report.rows if not row.outcome.verdict.agrees]
    assert len(left) <= {"tp": 12, "tp_dropout": 12, "fsdp2_tp": 12, "tp_sp": 8}.get(name, 0)
    for row in left:
        assert row.outcome.verdict is TensorVerdict.UNKNOWN
        assert "the gradient for this operator alone" in row.outcome.findings[0]


@pytest.mark.parametrize(
    ("name", "unknown"),
    [("ddp", 0), ("fsdp2", 0), ("tp", 12), ("tp_sp", 8), ("pp", 0), ("fsdp2_tp", 18)],
)
def test_statistics_and_fingerprints_agree_without_tensors(compare, name, unknown, monkeypatch):
    """As if only statistics and fingerprints of the same jobs had been saved."""

    def read_without_files(dump: Dump, notes: list[str]) -> list[DumpedProgram]:
        return [
            replace(program, calls=tuple(map(_remove_files, program.calls)))
            for program in read_programs(dump, notes)
        ]

    monkeypatch.setattr(comparison, "read_programs", read_without_files)
    report = compare(name)
    assert (report.origins, report.notes, len(report.rows)) == ((), (), 426)
    left = [row for row in report.rows if not row.outcome.verdict.agrees]
    assert {row.outcome.verdict for row in left} <= {TensorVerdict.UNKNOWN}
    assert len(left) <= unknown


def _remove_files(call: DumpedCall) -> DumpedCall:
    inputs, outputs = (
        tuple(each._replace(entry=None, row_record=each.record, digest="") for each in tensors)
        for tensors in (call.inputs, call.outputs)
    )
    return call._replace(inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("name", "operator", "reason"),
    [
        ("ddp-gradients", "Gradients/embed.weight", "a is 2 times b"),
        ("ddp-norm", "layers.1.norm1.weight", "replicas on ranks 0-1 of a differ by at most 0.5"),
        ("tp-reduction", "down-Linear/Linear-op0", "a reduction is missing"),
        ("fsdp2-seed", "embed-Embedding/Embedding-op0", "its parameter embed.weight differs too"),
        ("tp_dropout-dropout", "dropout-Dropout/Dropout-op0", "replicas on ranks 0-1 of a differ"),
    ],
)
def test_defect_of_a_layout_is_named(compare, name, operator, reason):
    report = compare(name)
    origin = report.origins[0]
    assert "the difference starts at" in describe_origin(origin)
    assert operator in origin.suspects[0].name_a
    assert origin.suspects[0].iteration == 0
    assert reason in origin.suspects[0].reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ddp_accumulate-microbatch",
            "micro-batches of a were left out from iteration 0 on: rank 1 ran 1 of 2 forward",
        ),
        ("fsdp2-seed", "the weights differ before iteration 0: 27 of 37 parameters"),
    ],
)
def test_cause_before_the_first_operator_leads(compare, name, text):
    assert list_card_differences(compare(name))[1].strip().startswith(text)


def test_ranks_can_be_compared_one_by_one(compare):
    report = compare("ddp", unshard=False)
    assert "only a has rank 1" in report.notes
    assert TensorVerdict.SHAPE in {row.outcome.verdict for row in report.rows}


def test_error_of_a_narrow_type_is_normal_beside_a_run_of_that_type(compare):
    report = compare("fsdp2_bf16", noise="fsdp2_bf16")
    assert TensorVerdict.NORMAL in {row.outcome.verdict for row in report.rows}
    assert report.agrees
    assert report.origins == ()


def test_noise_does_not_hide_a_defect(compare):
    report = compare("ddp-norm", noise="fsdp2_bf16")
    assert report.origins[0].suspects[0].name_a == "layers.1.norm1.weight"
    assert TensorVerdict.SUSPICIOUS in {row.outcome.verdict for row in report.rows}

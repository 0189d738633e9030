"""troubleshooter's three tables: their files, and their rows from a report."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rankdump._analysis.compare.api_tables import (
    ApiTable,
    ApiTableSet,
    build_api_tables,
    format_csv,
    write_api_tables,
)
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    ComparisonReport,
    ComparisonRow,
    ComparisonSettings,
    DifferenceMeasures,
    DumpedTensor,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._core.record import TensorKey, TensorSide
from rankdump.errors import ExhaustedError
from rankdump.reader import Entry

MAPPING = ApiTable(
    ("ORIGIN NET (pytorch)", "TARGET NET (pytorch)"), (("", "one\ntwo"), ('q"', "b"))
)
MEASURES = DifferenceMeasures(
    count=8,
    unequal=1,
    max_absolute=0.123456,
    max_relative=0.5,
    mean_absolute=0.000016,
    mean_relative=0.1,
    cosine=0.999996,
    rmse=0.1,
    relative_euclidean=0.1,
    kl_divergence=float("nan"),
    mean_absolute_unequal=0.123456,
    max_absolute_unequal=0.123456,
    nonfinite_a=0,
    nonfinite_b=0,
    nonfinite_apart=0,
)


def entry(name: str) -> Entry:
    key = TensorKey(0, "", 0, 0, 0, "NN_Linear", name, TensorSide.INPUT, 0)
    return Entry(Path("/dump"), f"rank0/torch_api_dump/{name}.npy", key, 1)


def row(
    name: str, outcome: PairOutcome, argument: str = "input.0", *, partner: bool = True
) -> ComparisonRow:
    side = TensorSide.OUTPUT if argument.startswith("output") else TensorSide.INPUT
    tensor = DumpedTensor(side, 0, argument, "float32", (2, 4), entry=entry(name))
    backward = name.endswith("backward")
    pair = TensorPair(tensor, tensor if partner else None)
    name_b = name if partner else ""
    return ComparisonRow(0, 3, 7, "exact", "NN_Linear", name, name_b, backward, pair, outcome)


def report(*rows: ComparisonRow) -> ComparisonReport:
    return ComparisonReport("a", "b", ComparisonSettings(), rows)


def test_format_csv_quotes_fields_and_ends_with_an_empty_line():
    assert format_csv(MAPPING) == (
        '"ORIGIN NET (pytorch)","TARGET NET (pytorch)"\n"","one\ntwo"\n"q""","b"\n\n'
    )


def test_write_api_tables_makes_private_files_and_replaces_old_ones(tmp_path):
    folder = tmp_path / "deep" / "out"
    long = ApiTable(MAPPING.titles, MAPPING.rows * 9)
    names = [path.name for path in write_api_tables([ApiTableSet(long, long, long)], folder, 4)]
    assert names == [
        "ts_api_mapping_4.csv",
        "ts_api_forward_compare_4.csv",
        "ts_api_backward_compare_4.csv",
    ]
    assert [
        path.name for path in write_api_tables([ApiTableSet(MAPPING, MAPPING)], folder, 4)
    ] == names[:2]
    assert (folder / names[0]).read_text() == format_csv(MAPPING)
    assert {path.name for path in folder.iterdir()} == set(names[:2])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / names[0]).stat().st_mode & 0o777 == 0o600


def test_write_api_tables_writes_separate_files_for_each_rank(tmp_path):
    tables = [ApiTableSet(MAPPING, rank=rank) for rank in (0, 12)]
    names = [path.name for path in write_api_tables(tables, tmp_path, 0)]
    assert names == ["ts_api_mapping_0.csv", "ts_api_mapping_rank12_0.csv"]


def test_write_api_tables_rejects_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExhaustedError, match="file"):
        write_api_tables([ApiTableSet(MAPPING)], tmp_path / "file" / "out", 0)


def test_build_api_tables_rounds_numbers_and_averages_all_elements(tmp_path):
    found = build_api_tables(
        report(
            row("LAYER_fc_forward", PairOutcome(TensorVerdict.SAME), "input"),
            row("NN_Linear_2_forward", PairOutcome(TensorVerdict.DIFFERENT, measures=MEASURES)),
            row("NN_Linear_2_forward", PairOutcome(TensorVerdict.SAME), "output"),
            row(
                "NN_Linear_3_forward", PairOutcome(TensorVerdict.UNMATCHED), "output", partner=False
            ),
            row("NN_Linear_2_backward", PairOutcome(TensorVerdict.SHAPE), "input"),
        )
    )
    assert list(found) == [3]
    (tables,) = found[3]
    assert tables.mapping.titles == ("ORIGIN NET (pytorch)", "TARGET NET (pytorch)")
    assert tables.mapping.rows == (
        ("LAYER_fc", "LAYER_fc"),
        ("NN_Linear_2", "NN_Linear_2"),
        ("NN_Linear_3", ""),
    )
    assert tables.forward is not None
    assert tables.backward is not None
    name = "NN_Linear_2_forward"
    shapes = ("(2, 4)", "(2, 4)")
    assert tables.forward.rows == (
        (f"{name}_input.0",) * 2 + shapes + ("False", "87.50%", "1.00000", "0.00002, 0.12346"),
        (f"{name}_output",) * 2 + shapes + ("True", "100.00%", "1.00000", "0.00000, 0.00000"),
        ("NN_Linear_3_forward_output", "", "(2, 4)", "", "False", "0.00%", "nan", "nan, nan"),
    )
    assert tables.backward.rows[0][4] == "Shape is inconsistent"
    written = write_api_tables(found[3], tmp_path, 3)
    with written[1].open(newline="") as file:
        assert len(next(csv.reader(file))) == 8


def test_build_api_tables_of_statistics_and_of_other_layouts():
    plain = row(
        "conv1/Conv2D-op3",
        PairOutcome(TensorVerdict.DIFFERENT, statistic_differences={"max": 1.5, "avg": 0.25}),
    )
    bare = plain.pair.a._replace(entry=None, argument="") if plain.pair.a else None
    found = build_api_tables(report(plain._replace(pair=TensorPair(bare, bare))))
    (tables,) = found[3]
    assert tables.forward == ApiTable(
        ("ORIGIN NET", "TARGET NET", "shape of orig", "shape of target", "max, min, mean diffs"),
        (("conv1/Conv2D-op3_input.0",) * 2 + ("[2, 4]", "[2, 4]", "1.50000, nan, 0.25000"),),
    )
    assert tables.backward is None


def test_build_api_tables_omits_constants():
    constant = row("weight/Parameter-op0", PairOutcome(TensorVerdict.SAME))._replace(
        iteration=CONSTANTS_ITERATION
    )
    assert list(
        build_api_tables(report(constant, row("fc/Dense-op0", PairOutcome(TensorVerdict.SAME))))
    ) == [3]

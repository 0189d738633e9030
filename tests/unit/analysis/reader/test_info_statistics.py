"""Statistics of the records of an api dump: which line of the info file is that of a record."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rankdump._analysis.reader.manifest_columns import read_manifest_columns
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tensor_columns import (
    make_columns_of_manifests,
    make_columns_of_tree,
)
from rankdump._analysis.reader.tensor_statistics import Survey
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.manifest import Manifest, ManifestRecord, ManifestSession, make_manifest_name
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    OutputSettings,
    TensorSelection,
    plan_to_json,
)
from rankdump._core.status import IterationStatus

CALL = "Functional_relu_0_forward"
MARK = "LAYER_net_forward"


def write_manifest(
    root: Path,
    *stamps: int,
    statistics: tuple[str, ...] | None = None,
    attempt: int = 0,
    name: str = CALL,
) -> str:
    """Write the manifest of iteration 3 of rank 0, with a call for each time; return its path."""
    records = tuple(
        ManifestRecord("", stamp, name, name, "input", "float32", (1,), 4, 0, "")
        for stamp in stamps
    )
    session = f"s{9 - attempt}"
    status = IterationStatus(
        "job", session, 0, 3, complete=True, expected=len(records), stored=0, attempt=attempt
    )
    about = None
    if statistics is not None:
        content = ContentSettings(saved="statistic", statistics=statistics)
        output = OutputSettings(root=str(root), layout="api-torch")
        plan = DumpPlan(output, TensorSelection(), content, DeliverySettings())
        about = ManifestSession(1, "torch", "CPU", 1, plan_to_json(plan).decode())
    folder = root / "rank0/.dump_metadata/manifest"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / make_manifest_name(3, session)
    path.write_bytes(Manifest(status, 1, 0, "here", records, about).to_json())
    return path.relative_to(root).as_posix()


def write_lines(root: Path, *values: str, step: int = 3, end: str = "", name: str = CALL) -> None:
    """Add a line of the call to the info file for each maximum."""
    with (root / "rank0/torch_api_dump_info.pkl").open("a") as file:
        for value in values:
            summary = f"[{value}, {value}, {value}]"
            file.write(f'["{name}_input", {step}, [], "torch.float32", [1], {summary}]\n')
        file.write(end)


def read(root: Path, path: str) -> tuple[pa.Table, list[str]]:
    problems: list[str] = []
    access = LocalTree(root)
    columns = read_manifest_columns(access, [path], problems)
    return make_columns_of_manifests(access, columns, problems), problems


def maxima(table: pa.Table) -> list[tuple[int, str]]:
    """Time and maximum of each row; NaN is equal to itself."""
    return [(row["timestamp_us"], repr(row["max"])) for row in table.to_pylist()]


def test_calls_of_one_name_have_their_lines_in_the_order_of_time(tmp_path: Path):
    """The first line is that of a process that was killed in this iteration."""
    path = write_manifest(tmp_path, 20, 10)
    write_lines(tmp_path, "9.0", step=2)
    write_lines(tmp_path, "7.0", "1.0", "2.0")
    write_lines(tmp_path, "8.0", step=4, end='["torn')
    table, problems = read(tmp_path, path)
    assert problems == []
    assert maxima(table) == [(10, "1.0"), (20, "2.0")]
    assert maxima(make_columns_of_tree(walk(tmp_path), [])) == maxima(table)


def test_attempts_have_their_own_lines_also_when_read_by_themselves(tmp_path: Path):
    """As where the rows of one of them are written again."""
    first = write_manifest(tmp_path, 10, 20)
    second = write_manifest(tmp_path, 110, 120, attempt=1)
    write_lines(tmp_path, "1.0", "2.0", "11.0", "12.0")
    assert maxima(read(tmp_path, first)[0]) == [(10, "1.0"), (20, "2.0")]
    assert maxima(read(tmp_path, second)[0]) == [(110, "11.0"), (120, "12.0")]
    for attempt, expected in ((0, [1.0, 2.0]), (1, [11.0, 12.0])):
        rows = make_columns_of_tree(walk(tmp_path, attempt=attempt), []).to_pylist()
        assert [row["max"] for row in rows] == expected


@pytest.mark.parametrize(
    ("statistics", "expected"), [(("max",), ["nan"]), ((), ["None"]), (None, ["None"])]
)
def test_number_that_is_nan_was_recorded_where_the_plan_says_so(
    tmp_path: Path, statistics: tuple[str, ...] | None, expected: list[str]
):
    """A line has NaN in place of what was not recorded as well."""
    path = write_manifest(tmp_path, 10, statistics=statistics)
    write_lines(tmp_path, "NaN")
    table, _ = read(tmp_path, path)
    assert [value for _, value in maxima(table)] == expected


def test_damaged_line_is_one_problem(tmp_path: Path):
    """The other lines are used."""
    path = write_manifest(tmp_path, 10, 20)
    write_lines(tmp_path, "1.0", end="[nothing\n")
    write_lines(tmp_path, "2.0")
    table, problems = read(tmp_path, path)
    assert len(problems) == 1
    assert "torch_api_dump_info.pkl, from byte 0: not a line of an info file" in problems[0]
    assert maxima(table) == [(10, "1.0"), (20, "2.0")]


def test_record_without_a_line_has_no_statistics(tmp_path: Path):
    path = write_manifest(tmp_path, 10, 20)
    table, problems = read(tmp_path, path)
    assert problems == []
    assert maxima(table) == [(10, "None"), (20, "None")]
    write_lines(tmp_path, "2.0")
    assert maxima(read(tmp_path, path)[0]) == [(10, "None"), (20, "2.0")]


def test_mark_of_a_layer_has_no_statistics_and_is_no_tensor(tmp_path: Path):
    """Its one zero would look like a dead tensor."""
    path = write_manifest(tmp_path, 10, name=MARK)
    write_lines(tmp_path, "0.0", name=MARK)
    assert maxima(read(tmp_path, path)[0]) == [(10, "None")]
    tree = walk(tmp_path)
    assert maxima(make_columns_of_tree(tree, [])) == [(10, "None")]
    assert list(Survey(tree, Query())) == []
    write_lines(tmp_path, "0.0")
    assert [row.op_name for row in Survey(walk(tmp_path), Query())] == [CALL]


def test_marks_are_not_counted_among_finite_tensors(tmp_path: Path):
    (tmp_path / "rank0/torch_api_dump").mkdir(parents=True)
    for step in range(8):
        write_lines(tmp_path, "0.0", step=step, name=MARK)
        write_lines(tmp_path, "2.0", step=step)
    survey = Survey(walk(tmp_path), Query(), skip_finite=True)
    assert len(list(survey)) + survey.skipped_rows == 8
    assert survey.skipped_rows

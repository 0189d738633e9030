"""Rows of the table of statistics in every layout that agents write: those of the agent, of
`rankdump index` and of a walk of the tree are the same, and their paths lead to files.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.reader_answers import assert_same_answers, use_small_tables

from rankdump._analysis.fsck import check_tree
from rankdump._analysis.reader import statistic_tables
from rankdump._analysis.reader.indexed_manifests import find_indexed_files
from rankdump._analysis.reader.tensor_columns import make_columns_of_tree
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.table_files import list_tensor_files
from rankdump._analysis.table_index import TableLag, compare_with_tree, index_tree
from rankdump._compat.dump_files import clear_rank_folder
from rankdump._core.plan import ContentSettings, SavedDataMode, TableForm
from rankdump._core.statistics import compute_statistic_texts
from rankdump._layout.tree_layouts import LAYOUTS
from rankdump.reader import Query, Survey
from rankdumpd.agent.table.table_process import TableRequest, write_rows

ITEMS = ("max", "min", "avg", "l2norm")
LONG = "Default/" + "block-Block/" * 30 + "MatMul-op0"
FIRST_STAMP, ATTEMPT_US = 1_700_000_000_000_000, 1_000_000
STARTED = "20261127120000"
SIDES = ("", "input", "output")
"""By their numbers on the wire."""


@dataclass(frozen=True)
class DumpForm:
    """A layout, and what of a tensor is written in which form."""

    layout: str
    saved: SavedDataMode = "full"
    files: str = "npy"
    tables: TableForm = "folder"
    codec: str = "zstd"

    def __str__(self) -> str:
        return "-".join((self.layout, self.saved, self.files, self.tables))


FORMS = [
    *(DumpForm(layout, "full") for layout in LAYOUTS),
    *(DumpForm(layout, "statistic") for layout in LAYOUTS),
    *(
        DumpForm(layout, "tensor", "bin")
        for layout in ("mindspore-async", "cann", "cann-step", "cann-op", "cann-op-step")
    ),
    *(
        DumpForm(layout, "statistic", "bin", "operator")
        for layout in ("cann", "cann-step", "cann-op", "cann-op-step")
    ),
]


@dataclass
class FormWriter:
    """Sends iterations of one rank in a form."""

    frames: Any
    form: DumpForm
    rank: int = 0
    attempt: int = 0
    number: int = 0

    def send(self, stream: Any, iterations: range, *, is_killed: bool = False) -> None:
        """Send two operators with an input and two outputs each in every iteration; the last one
        does not end where the rank `is_killed`.
        """
        for iteration in iterations:
            count = 0
            for operator in range(2):
                stamp = FIRST_STAMP + self.attempt * ATTEMPT_US + iteration * 1000 + operator * 10
                for side, slot in ((1, 0), (2, 0), (2, 1)):
                    values = (
                        np.arange(6, dtype=np.float32) * (iteration + 1)
                        + slot
                        + operator
                        + self.rank
                    )
                    values += 100 * self.attempt
                    if (operator, slot, iteration) == (1, 1, 1):
                        values[2] = np.nan
                    self._send_tensor(
                        stream, iteration, operator, side, slot, values, stamp + count
                    )
                    count += 1
            if not is_killed or iteration != iterations[-1]:
                self.number += 1
                stream.send(self.frames.end(self.number, iteration, count))
        stream.wait_acknowledged(self.number)

    def _send_tensor(self, stream, iteration, operator, side, slot, values, stamp) -> None:
        self.number += 1
        is_api = LAYOUTS[self.form.layout].api_files is not None
        api_name = f"{['NN_Conv2d', 'Tensor_' + 'add_' * 60][operator]}_{iteration}_forward"
        op_name = api_name if is_api else ["Default/fc/MatMul-op0", LONG][operator]
        place = f"{SIDES[side]}.{slot}" if side == 1 or slot else SIDES[side]
        fields = {"side": side, "slot": slot, "op_name": op_name}
        fields |= {"argument": f"{place}:=x" if is_api else "x"}
        if is_api:
            fields["op_type"] = op_name
        elif LAYOUTS[self.form.layout].shares_timestamps:
            stamp = stamp // 10 * 10
        if self.form.saved == "statistic":
            text = ",".join(compute_statistic_texts(ITEMS, "float32", values.tobytes()))
            frame = self.frames.figures(
                self.number, [(values, text)], iteration=iteration, stamps=[stamp], **fields
            )
        else:
            frame = self.frames.record(
                self.number, values, iteration=iteration, timestamp_us=stamp, **fields
            )
        stream.send(frame)


@pytest.fixture
def dump(make_rank, frames) -> Callable[..., Any]:
    """Dumps three iterations of a rank through an agent; returns the stream."""

    def send(
        address: str,
        form: DumpForm,
        root: Path,
        *,
        rank: int = 0,
        attempt: int = 0,
        is_killed: bool = False,
        **fields: Any,
    ) -> Any:
        output = {"layout": form.layout, "file_format": form.files, "started": STARTED}
        content = ContentSettings(
            saved=form.saved,
            statistics=ITEMS,
            tables=form.tables,
            fingerprints=form.saved != "statistic",
        )
        made = make_rank(
            address, root=root, rank=rank, output=output, content=content, codec=form.codec,
            session_id=f"s{9 - attempt}{rank}", pid=4711 + attempt, world_size=2, **fields,
        )  # fmt: skip
        made.open(started_us=FIRST_STAMP + attempt * ATTEMPT_US)
        stream = made.push()
        writer = FormWriter(frames, form, rank, attempt)
        writer.send(stream, range(3), is_killed=is_killed)
        if is_killed:
            return stream
        stream.send(frames.goodbye(writer.number + 1, 3))
        assert stream.finish() is grpc.StatusCode.OK
        return stream

    return send


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that grow over all iterations are read from their ends in several blocks."""
    monkeypatch.setattr(statistic_tables, "BLOCK_BYTES", 300)


def read_table(root: Path) -> list[dict[str, str]]:
    return plain(pa.concat_tables(map(pq.read_table, list_tensor_files(root))))


def plain(table: pa.Table) -> list[dict[str, str]]:
    """Rows that can be compared: NaN is equal to itself."""
    rows = [{name: repr(value) for name, value in row.items()} for row in table.to_pylist()]
    place = ("rank", "timestamp_us", "side", "slot")
    return sorted(rows, key=lambda row: [row[name] for name in place])


def list_differences(rows: list[dict[str, str]], others: list[dict[str, str]]) -> list[object]:
    """Return the columns that two tables do not have in common, or how many rows each has."""
    if len(rows) != len(others):
        return [len(rows), len(others)]
    pairs = zip(rows, others, strict=True)
    return [(name, a[name], b) for a, b in pairs for name in a if a[name] != b[name]]


def make_request(root: Path) -> TableRequest:
    found = sorted(root.glob("rank*/.dump_metadata/manifest/iteration_*.json"))
    manifests = [
        (
            path.relative_to(root).as_posix(),
            int(path.parts[-4].removeprefix("rank").removeprefix("_")),
            int(path.name.split(".")[0].removeprefix("iteration_")),
        )
        for path in found
    ]
    return TableRequest(str(root), 0o400, 0o700, False, manifests)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_a_layout_are_the_same_by_all_ways(make_agent, dump, short_dir, form: DumpForm):
    """Both ranks have device 0, as on two hosts that share a disk."""
    agent = make_agent()
    root = short_dir / "dump"
    for rank in (0, 1):
        dump(agent.address, form, root, rank=rank, device=0)
    rows = read_checked_rows(root)
    assert len(rows) == 36
    assert {row["rank"] for row in rows} == {"0", "1"}
    for column, is_kept in (("max", form.saved != "tensor"), ("sketch", form.saved != "statistic")):
        assert sum(row[column] != "None" for row in rows) == 36 * is_kept
    assert all((root / eval(row["path"])).is_file() for row in rows if form.saved != "statistic")
    assert len(list(Survey(walk(root), Query()))) == 36
    assert compare_with_tree(root) == TableLag(0, 0)
    assert index_tree(root).files == 0
    report = check_tree(root, workers=1)
    assert (report.damages, report.table) == ((), ())


def read_checked_rows(root: Path) -> list[dict[str, str]]:
    """Return the rows that the agent writes, which are those of the other ways."""
    copy, problems = root.parent / "copy", list[str]()
    shutil.copytree(root, copy, symlinks=True)
    assert write_rows(make_request(root)).error == ""
    report = index_tree(copy)
    walked = plain(make_columns_of_tree(walk(root), problems))
    rows = read_table(root)
    assert (report.problems, problems) == ([], [])
    assert list_differences(rows, read_table(copy)) == []
    assert list_differences(rows, walked) == []
    return rows


@pytest.mark.parametrize(
    "form",
    [
        DumpForm("cann-step", "full"),
        DumpForm("cann-op", "tensor", "bin"),
        DumpForm("cann-op", "statistic"),
        DumpForm("cann-op", "full"),
        DumpForm("cann", "statistic", "bin", "operator"),
        DumpForm("cann-op", "statistic", "bin", "operator"),
        DumpForm("api-torch-1.0.18", "statistic"),
        DumpForm("api-mindspore", "full"),
    ],
    ids=str,
)
def test_readers_answer_the_same_without_the_table(
    make_agent, dump, short_dir, form: DumpForm, monkeypatch: pytest.MonkeyPatch
):
    use_small_tables(monkeypatch)
    agent = make_agent()
    root = short_dir / "dump"
    for rank in (0, 1):
        dump(agent.address, form, root, rank=rank, device=0)
    assert write_rows(make_request(root)).error == ""
    assert len(find_indexed_files(root)) == 1
    assert_same_answers(root)


@pytest.mark.parametrize(
    "form",
    [
        DumpForm("mindspore-sync", "statistic"),
        DumpForm("cann-op", "statistic"),
        DumpForm("cann-op", "statistic", "bin", "operator"),
        DumpForm("api-torch", "statistic"),
    ],
    ids=str,
)
def test_rows_of_a_restarted_job_have_their_own_statistics(make_agent, dump, short_dir, form):
    """Rank 0 was killed in iteration 2, whose rows have no manifest, and began anew."""
    agent = make_agent()
    root = short_dir / "dump"
    stream = dump(agent.address, form, root, is_killed=True)
    agent.restart()
    stream.wait_over()
    dump(agent.address, form, root, attempt=1)
    rows = read_checked_rows(root)
    assert len(rows) == 30
    known = [(float(row["max"]) > 100, row["attempt"]) for row in rows if row["max"] != "nan"]
    assert {*known} == {(False, "0"), (True, "1")}


@pytest.mark.parametrize(
    "form",
    [
        DumpForm("cann", "full"),
        DumpForm("cann-op", "statistic"),
        DumpForm("cann-op", "statistic", "bin", "operator"),
    ],
    ids=str,
)
def test_rows_of_two_jobs_have_their_own_statistics(make_agent, dump, short_dir, form):
    agent = make_agent()
    root = short_dir / "dump"
    for attempt, job_id in enumerate("ab"):
        dump(agent.address, form, root, attempt=attempt, job_id=job_id)
    rows = read_checked_rows(root)
    assert len(rows) == 36
    known = [(float(row["max"]) > 100, row["job"]) for row in rows if row["max"] != "nan"]
    assert {*known} == {(False, "'a'"), (True, "'b'")}


@pytest.mark.parametrize("saved", ["full", "statistic"])
def test_rows_of_an_earlier_api_dump_are_removed_with_it(make_agent, dump, short_dir, saved):
    """The first start of a dump removes the files of another one of the same rank."""
    agent = make_agent()
    root = short_dir / "dump"
    form = DumpForm("api-torch", saved)
    for rank in (0, 1):
        dump(agent.address, form, root, rank=rank)
    for manifest in make_request(root).manifests:  # a file for each iteration
        write_rows(dataclasses.replace(make_request(root), manifests=[manifest]))
    clear_rank_folder(str(root), 0, "torch")
    # The one manifest that the new dump has yet.
    dump(agent.address, form, root, attempt=1)
    for path in root.glob("rank0/.dump_metadata/manifest/iteration_[12].*"):
        path.unlink()
    rows = read_checked_rows(root)
    assert len(rows) == 6 + 18

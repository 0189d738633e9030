"""`statistic.csv` as an agent writes it: every row once, in order, whatever becomes of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump.contract.layout import statistic_csv
from rankdump.contract.layout.profile import PROFILES
from rankdump.contract.manifest import Manifest
from rankdump.contract.plan import Content, Iterations, Selection
from rankdump.contract.statistics import figures as figures_of
from rankdump.wire.v1 import agent_pb2

TEN = statistic_csv.OLD_ITEMS
FIXED = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape"
STAMP = 1_700_000_000_000_000

# mindspore-dump.md 3.4, golden rows of MindSpore's own tests
GOLDEN = [
    ([[1, 2, 3], [4, 5, 6]], ("max", "min", "l2norm"), "6,1,9.53939,"),
    ([[7, 8, 9], [10, 11, 12]], ("max", "min", "l2norm"), "12,7,23.6432,"),
    ([[8, 10, 12], [14, 16, 18]], ("max", "min", "l2norm"), "18,8,32.9242,"),
    ([[7.5, 8.56, -9.78], [10, -11, 0]], TEN, "10,-11,0.88,6,2,3,0,0,0,1,"),
    (
        [[1, -np.inf, np.inf, -np.inf, np.inf], [np.inf, 1, -np.inf, np.inf, np.inf]],
        TEN,
        "inf,-inf,nan,10,3,7,0,3,5,0,",
    ),
    ([-2.175, 1.99, np.nan, np.nan, -1.809], TEN, "nan,nan,nan,5,2,1,2,0,0,0,"),
]


def table(root: Path, iteration: int = 0, folder: str = "") -> list[str]:
    path = root / "rank_0" / "Net" / "0" / (folder or str(iteration)) / "statistic.csv"
    text = path.read_text()
    assert text.endswith("\n")
    return text.splitlines()


def tensors(root: Path) -> list[Path]:
    return sorted((root / "rank_0" / "Net").rglob("*.npy*"))


def manifest(root: Path, iteration: int = 0) -> Manifest:
    folder = root / "rank_0" / ".dump_metadata" / "manifest"
    (path,) = folder.glob(f"iteration_{iteration}.*.json")
    return Manifest.from_json(path.read_bytes())


@pytest.fixture
def record_of(frames):
    """Makes records as their plan wants them: whole, or as figures."""

    def make(sequence: int, array: np.ndarray, content: Content, **fields) -> agent_pb2.Frame:
        frame = frames.record(sequence, array, **fields)
        if content.saved == "statistic":
            texts = figures_of(content.statistics, array.dtype.name, memoryview(array.tobytes()))
            frame.record.data = b""
            frame.record.figures.texts.extend(texts)
            frame.record.figures.SetInParent()
        return frame

    return make


@pytest.fixture
def dump(make_agent, make_rank, frames, record_of):
    """Sends tensors of one iteration, and returns their tree."""

    def send(arrays: list[np.ndarray], content: Content, **fields) -> Path:
        rank = make_rank(make_agent().address, content=content, **fields)
        rank.open()
        count = len(arrays)
        records = [record_of(n + 1, array, content) for n, array in enumerate(arrays)]
        stream = rank.push().send(
            *records, frames.end(count + 1, 0, count), frames.goodbye(count + 2)
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert rank.status().findings == []
        return rank.root

    return send


@pytest.mark.parametrize("saved", ["full", "statistic"])
@pytest.mark.parametrize(("values", "items", "tail"), GOLDEN)
def test_golden_rows(dump, saved, values, items, tail):
    """The figures of MindSpore's own tests, computed by the agent or sent by the rank."""
    array = np.array(values, dtype=np.float32)
    root = dump([array], Content(saved, items))
    shape = ",".join(map(str, array.shape))
    head = f"MatMul,Default_fc-Dense_MatMul-op0,0,0,{STAMP + 1},output,0,{array.nbytes}"
    header, row = table(root)
    assert header == statistic_csv.header(items)
    assert row == f'{head},float32,"({shape})",{tail}'
    assert len(tensors(root)) == (1 if saved == "full" else 0)


@pytest.mark.parametrize("saved", ["full", "statistic"])
@pytest.mark.parametrize(
    ("profile", "name", "end"),
    [
        ("ms2.3", "Default_fc-Dense_MatMul-op0", "2,2,"),
        ("ms2.4", "Default_fc-Dense_MatMul-op0", "2,2,"),
        ("ms2.0", "MatMul-op0", "2,2,2,2,0,2,0,0,0,0"),
    ],
)
def test_header_and_tail_of_a_profile(make_agent, make_rank, frames, saved, profile, name, end):
    """The old release has ten columns and no comma at the end, whatever was asked for."""
    content = Content(saved, ("max", "min"))
    rank = make_rank(make_agent().address, content=content, profile=profile)
    rank.open()
    array = np.array([2, 2], dtype=np.int32)
    frame = frames.record(1, array)
    items = statistic_csv.items_of(content.statistics, PROFILES[profile])
    if saved == "statistic":
        frame.record.data = b""
        texts = figures_of(items, "int32", memoryview(array.tobytes()))
        frame.record.figures.texts.extend(texts)
    rank.push().send(frame, frames.goodbye(2)).finish()
    header, row = table(rank.root)
    assert header.startswith(f"{FIXED},Max Value,Min Value")
    assert header.count(",") == 9 + len(items)
    assert row.split(",")[1] == name
    assert row.endswith(f',8,int32,"(2)",{end}')


@pytest.mark.parametrize("saved", ["full", "statistic"])
def test_rows_stand_in_the_order_of_frames(make_agent, make_rank, frames, record_of, saved):
    """Several workers finish large and small tensors in any order; rows come as they were sent."""
    content = Content(saved, ("max",))
    rank = make_rank(make_agent(encode_threads=4).address, content=content)
    rank.open()
    stream = rank.push()
    count = 60
    for number in range(1, count + 1):
        size = 200_000 if number % 5 == 1 else 3
        stream.send(record_of(number, np.full(size, number, dtype=np.float32), content))
    stream.send(frames.end(count + 1, 0, count), frames.goodbye(count + 2))
    assert stream.finish() is grpc.StatusCode.OK
    rows = statistic_csv.parse("\n".join(table(rank.root)), file="statistic.csv")
    assert [row.timestamp_us for row in rows] == [STAMP + n for n in range(1, count + 1)]
    assert [row.values[0][1] for row in rows] == [str(n) for n in range(1, count + 1)]


def test_statistics_alone_balance_and_store_no_bytes(dump):
    """A tensor of which only figures were kept is in the balance, the manifest and the table."""
    arrays = [np.full(4, n, dtype=np.float64) for n in range(3)]
    root = dump(arrays, Content("statistic"))
    found = manifest(root)
    assert (found.status.stored, found.status.balanced) == (3, True)
    assert (found.status.bytes_in, found.status.bytes_stored) == (0, 0)
    assert {(r.path, r.bytes_in, r.digest) for r in found.records} == {("", 0, "")}
    stamps = [row.timestamp_us for row in statistic_csv.parse("\n".join(table(root)), file="")]
    assert [record.timestamp_us for record in found.records] == stamps


def test_rows_are_there_before_the_iteration_ends(make_agent, make_rank, record_of):
    """A job that dies in the middle of an iteration leaves the rows of what it sent."""
    content = Content("full")
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    stream = rank.push().send(*[record_of(n, np.ones(3), content) for n in (1, 2, 3)])
    stream.wait_acknowledged(3)
    assert len(table(rank.root)) == 4
    stream.cut()


def test_complex_tensors_have_a_file_and_no_row(dump):
    """With `full` they are stored like any other, without figures."""
    root = dump([np.ones(2, dtype=np.complex64), np.ones(2)], Content("full"))
    assert len(table(root)) == 2
    assert len(tensors(root)) == 2


def test_what_has_no_figures_is_dropped_by_reason(make_agent, make_rank, frames, record_of):
    """Elements where figures are due, or figures of complex numbers: counted, nothing else."""
    content = Content("statistic", ("max",))
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    complex_frame = frames.record(2, np.ones(2, dtype=np.complex64))
    complex_frame.record.data = b""
    complex_frame.record.figures.texts.append("1")
    stream = rank.push().send(
        frames.record(1, np.ones(2)),
        complex_frame,
        record_of(3, np.ones(2), content),
        frames.end(4, 0, 3),
        frames.goodbye(5),
    )
    assert stream.finish() is grpc.StatusCode.OK
    assert dict(manifest(rank.root).status.dropped) == {"no_statistics": 2}
    assert len(table(rank.root)) == 2
    assert tensors(rank.root) == []


@pytest.mark.parametrize("saved", ["tensor", "full"])
def test_figures_that_the_plan_does_not_want_end_the_stream(make_agent, make_rank, frames, saved):
    """A rank that speaks of another plan than its own is not understood."""
    rank = make_rank(make_agent().address, content=Content(saved))
    rank.open()
    frame = frames.record(1, np.ones(2))
    frame.record.data = b""
    frame.record.figures.texts.append("1")
    assert rank.push().send(frame).wait_over() is grpc.StatusCode.INVALID_ARGUMENT


def test_constants_have_a_table_beside_them(make_agent, make_rank, frames, record_of):
    """Rows stand beside the files they speak of."""
    content = Content("full", ("max",))
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    stream = rank.push().send(
        record_of(1, np.ones(2), content, iteration=4, constant=True),
        frames.end(2, 4, 1),
        frames.goodbye(3),
    )
    assert stream.finish() is grpc.StatusCode.OK
    assert len(table(rank.root, folder="constants")) == 2
    assert [path.parent.name for path in tensors(rank.root)] == ["constants"]
    assert not (rank.root / "rank_0" / "Net" / "0" / "4").exists()


def test_script_that_switches_dumping_on_is_not_held_to_the_iterations(
    make_agent, make_rank, frames
):
    """Only the check of the iteration is left out."""
    selection = Selection(iterations=Iterations("9", ((9, 9),)), inputs=False)
    rank = make_rank(make_agent().address, selection=selection)
    rank.open()
    stream = rank.push().send(
        frames.record(1, np.ones(2), switched_on=True),
        frames.record(2, np.ones(2)),
        frames.record(3, np.ones(2), switched_on=True, side=agent_pb2.SIDE_INPUT),
        frames.end(4, 0, 3),
    )
    stream.wait_acknowledged(4)
    assert dict(manifest(rank.root).status.dropped) == {"iteration_excluded": 1, "side_excluded": 1}
    assert len(tensors(rank.root)) == 1
    stream.finish()


class TestRestarts:
    """Crashes at the worst moments, one agent after the other on the same ledger."""

    CONTENT = Content("full", ("max",))

    def test_in_the_middle_of_an_iteration(self, make_agent, make_rank, frames, record_of):
        """The next agent goes on behind the last row, and repeats none."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        first = [record_of(n, np.full(2, n), self.CONTENT) for n in (1, 2)]
        rank.push().send(*first).finish()
        agent.restart()
        rank.open()
        stream = rank.push().send(
            *first,
            record_of(3, np.full(2, 3), self.CONTENT),
            frames.end(4, 0, 3),
            frames.goodbye(5),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert [row.split(",")[-2] for row in table(rank.root)[1:]] == ["1", "2", "3"]
        assert manifest(rank.root).status.balanced

    @pytest.mark.parametrize("left", [0, 10, 170, 200, 10_000])
    def test_after_commit_and_within_the_table(
        self, make_agent, make_rank, frames, record_of, left
    ):
        """Rows that the ledger knows come into the table at the next start, torn or missing."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        records = [record_of(n, np.full(2, n), self.CONTENT) for n in range(1, 5)]
        rank.push().send(*records).finish()
        whole = table(rank.root)
        path = rank.root / "rank_0" / "Net" / "0" / "0" / "statistic.csv"
        data = path.read_bytes()
        agent.stop()
        path.unlink()
        path.write_bytes(data[:left])
        agent.start()
        assert table(rank.root) == whole
        assert len(whole) == 5

    def test_ended_iterations_are_not_read_again(self, make_agent, make_rank, frames, record_of):
        """Rows before the last end are known to be there: a new start looks at none of them."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        rank.push().send(
            record_of(1, np.ones(2), self.CONTENT),
            frames.end(2, 0, 1),
            record_of(3, np.ones(2), self.CONTENT, iteration=1),
        ).finish()
        ended, running = (
            rank.root / "rank_0" / "Net" / "0" / name / "statistic.csv" for name in "01"
        )
        agent.stop()
        ended.unlink()
        running.unlink()
        agent.start()
        assert not ended.exists()
        assert len(table(rank.root, 1)) == 2

    def test_table_that_cannot_be_written_yet(self, make_agent, make_rank, frames, record_of):
        """Rows wait for a disk that refuses them; the end counts once they are there."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        path = rank.root / "rank_0" / "Net" / "0" / "0" / "statistic.csv"
        path.mkdir(parents=True)
        stream = rank.push().send(
            record_of(1, np.ones(2), self.CONTENT), frames.end(2, 0, 1), frames.goodbye(3)
        )
        assert stream.finish() is grpc.StatusCode.OK
        (finding,) = rank.status().findings
        assert finding.startswith("rank 0, statistic.csv: rows have to wait: ")
        manifests = rank.root / "rank_0" / ".dump_metadata" / "manifest"
        assert not manifests.exists()
        path.rmdir()
        agent.restart()
        assert len(table(rank.root)) == 2
        assert manifest(rank.root).status.balanced
        agent.restart()
        assert rank.status().sessions == []


def test_rows_of_many_iterations_go_where_they_belong(make_agent, make_rank, frames, record_of):
    """Frames of several iterations in one batch end up in their own tables."""
    content = Content("full", ("max",))
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    numbers = itertools.count(1)
    sent: list[agent_pb2.Frame] = []
    for iteration in range(5):
        array = np.full(2, iteration)
        sent += [record_of(next(numbers), array, content, iteration=iteration) for _ in range(3)]
        sent.append(frames.end(next(numbers), iteration, 3))
    rank.push().send(*sent, frames.goodbye(next(numbers))).finish()
    for iteration in range(5):
        rows = table(rank.root, iteration)[1:]
        assert [row.split(",")[-2] for row in rows] == [str(iteration)] * 3


def test_manifest_knows_the_time_of_each_row(dump):
    """A script that reads manifests finds the file or the row of a record by it."""
    root = dump([np.ones(2), np.ones(3)], Content("full"))
    folder = root / "rank_0" / ".dump_metadata" / "manifest"
    body = json.loads(next(folder.iterdir()).read_text())
    assert [record["timestamp_us"] for record in body["records"]] == [STAMP + 1, STAMP + 2]

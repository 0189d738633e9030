"""`statistic.csv` of an agent: every row once and in order, also after restarts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump._core.manifest import Manifest
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    IterationSelection,
    TensorSelection,
)
from rankdump._core.statistics import compute_statistic_texts as figures_of
from rankdump._layout import statistic_tables
from rankdump._layout.profile import PROFILES
from rankdump.wire.v1 import agent_pb2

TEN = statistic_tables.FIXED_TABLE_STATISTICS
FIXED = "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape"
STAMP = 1_700_000_000_000_000

# Golden rows of MindSpore's own tests of statistic.csv.
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
    """Makes records in the form that their plan requires: with elements, or as statistics."""

    def make(
        sequence: int, array: np.ndarray, content: ContentSettings, **fields
    ) -> agent_pb2.Frame:
        if content.saved == "statistic":
            texts = figures_of(content.statistics, array.dtype.name, memoryview(array.tobytes()))
            return frames.figures(sequence, [(array, ",".join(texts))], **fields)
        return frames.record(sequence, array, **fields)

    return make


@pytest.fixture
def dump(make_agent, make_rank, frames, record_of):
    """Sends the tensors of one iteration, and returns the tree."""

    def send(arrays: list[np.ndarray], content: ContentSettings, **fields) -> Path:
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
def test_rows_equal_mindspores_own(dump, saved, values, items, tail):
    """The rows have the statistics of MindSpore's tests, computed by the agent or sent by
    the rank.
    """
    array = np.array(values, dtype=np.float32)
    root = dump([array], ContentSettings(saved, items))
    shape = ",".join(map(str, array.shape))
    head = f"MatMul,Default_fc-Dense_MatMul-op0,0,0,{STAMP + 1},output,0,{array.nbytes}"
    header, row = table(root)
    assert header == statistic_tables.format_statistic_header(items)
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
def test_old_profile_has_its_header_and_line_end(
    make_agent, make_rank, frames, saved, profile, name, end
):
    """The old release has ten columns and no comma at the end, whatever statistics are selected."""
    content = ContentSettings(saved, ("max", "min"))
    rank = make_rank(make_agent().address, content=content, profile=profile)
    rank.open()
    array = np.array([2, 2], dtype=np.int32)
    items = statistic_tables.select_table_items(content.statistics, PROFILES[profile])
    texts = figures_of(items, "int32", memoryview(array.tobytes()))
    rows = frames.figures(1, [(array, ",".join(texts))])
    frame = rows if saved == "statistic" else frames.record(1, array)
    rank.push().send(frame, frames.goodbye(2)).finish()
    header, row = table(rank.root)
    assert header.startswith(f"{FIXED},Max Value,Min Value")
    assert header.count(",") == 9 + len(items)
    assert row.split(",")[1] == name
    assert row.endswith(f',8,int32,"(2)",{end}')


@pytest.mark.parametrize("saved", ["full", "statistic"])
def test_rows_are_in_the_order_of_frames(make_agent, make_rank, frames, record_of, saved):
    """Several workers finish large and small tensors in any order; rows are in the order of
    sending.
    """
    content = ContentSettings(saved, ("max",))
    rank = make_rank(make_agent(encode_threads=4).address, content=content)
    rank.open()
    stream = rank.push()
    count = 60
    for number in range(1, count + 1):
        size = 200_000 if number % 5 == 1 else 3
        stream.send(record_of(number, np.full(size, number, dtype=np.float32), content))
    stream.send(frames.end(count + 1, 0, count), frames.goodbye(count + 2))
    assert stream.finish() is grpc.StatusCode.OK
    rows = statistic_tables.parse_statistic_table("\n".join(table(rank.root)), file="statistic.csv")
    assert [row.timestamp_us for row in rows] == [STAMP + n for n in range(1, count + 1)]
    assert [row.values[0][1] for row in rows] == [str(n) for n in range(1, count + 1)]


def test_statistics_only_records_balance_without_files(dump):
    """A tensor without elements is in the balance, the manifest and the table."""
    arrays = [np.full(4, n, dtype=np.float64) for n in range(3)]
    root = dump(arrays, ContentSettings("statistic"))
    found = manifest(root)
    assert (found.status.stored, found.status.is_balanced) == (3, True)
    assert (found.status.bytes_in, found.status.bytes_stored) == (0, 0)
    assert {(r.path, r.bytes_in, r.digest) for r in found.records} == {("", 0, "")}
    stamps = [
        row.timestamp_us
        for row in statistic_tables.parse_statistic_table("\n".join(table(root)), file="")
    ]
    assert [record.timestamp_us for record in found.records] == stamps


def test_rows_are_written_before_the_iteration_ends(make_agent, make_rank, record_of):
    """The rows of a job that dies within an iteration are in the table."""
    content = ContentSettings("full")
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    stream = rank.push().send(*[record_of(n, np.ones(3), content) for n in (1, 2, 3)])
    stream.wait_acknowledged(3)
    assert len(table(rank.root)) == 4
    stream.cut()


def test_complex_tensors_have_a_file_and_no_row(dump):
    """With `full` they are stored without statistics."""
    root = dump([np.ones(2, dtype=np.complex64), np.ones(2)], ContentSettings("full"))
    assert len(table(root)) == 2
    assert len(tensors(root)) == 2


def test_tensors_without_statistics_are_dropped_by_reason(make_agent, make_rank, frames, record_of):
    """Elements in place of statistics and statistics of complex numbers are dropped and counted."""
    content = ContentSettings("statistic", ("max",))
    rank = make_rank(make_agent().address, content=content)
    rank.open()
    complex_frame = frames.figures(2, [(np.ones(2, dtype=np.complex64), "1")])
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
def test_statistics_outside_the_plan_are_dropped(make_agent, make_rank, frames, saved):
    """The stream ends each time; the second time the rows are counted as dropped."""
    rank = make_rank(make_agent().address, content=ContentSettings(saved))
    rank.open()
    frame = frames.figures(1, [(np.ones(2), "1")])
    for _ in range(2):
        assert rank.push().send(frame).wait_over() is grpc.StatusCode.UNAVAILABLE
    stream = rank.push().send(frame, frames.end(2, 0, 1), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    assert dict(manifest(rank.root).status.dropped) == {"unreadable": 1}


def test_constants_have_a_table_in_their_folder(make_agent, make_rank, frames, record_of):
    """The rows are in the folder of the files that they describe."""
    content = ContentSettings("full", ("max",))
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


def test_dump_start_bypasses_only_the_iteration_check(make_agent, make_rank, frames):
    """The plan's other conditions still apply."""
    selection = TensorSelection(iterations=IterationSelection("9", ((9, 9),)), inputs=False)
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


class TestTableRestarts:
    """Crashes at the worst moments, one agent after the other on the same ledger."""

    CONTENT = ContentSettings("full", ("max",))

    def test_restart_within_an_iteration_continues_behind_the_last_row(
        self, make_agent, make_rank, frames, record_of
    ):
        """The next agent appends rows behind the last one, and repeats none."""
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
        assert manifest(rank.root).status.is_balanced

    @pytest.mark.parametrize("left", [0, 10, 170, 200, 10_000])
    def test_committed_rows_are_completed_in_the_table(
        self, make_agent, make_rank, frames, record_of, left
    ):
        """At its start an agent adds the committed rows that are torn or missing in the table."""
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
        """The tables of ended iterations are complete, so a starting agent does not read them."""
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

    def test_rows_wait_until_the_table_can_be_written(
        self, make_agent, make_rank, frames, record_of
    ):
        """Rows wait while the disk rejects writes; the end of their iteration is applied after
        them.
        """
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
        assert finding.startswith("rank 0, tables of statistics: rows not written: ")
        manifests = rank.root / "rank_0" / ".dump_metadata" / "manifest"
        assert not manifests.exists()
        path.rmdir()
        agent.restart()
        assert len(table(rank.root)) == 2
        assert manifest(rank.root).status.is_balanced
        agent.restart()
        assert rank.status().sessions == []


def test_rows_of_one_batch_go_to_their_own_iterations(make_agent, make_rank, frames, record_of):
    """Rows of several iterations in one batch are written to the tables of their iterations."""
    content = ContentSettings("full", ("max",))
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


def test_manifest_has_the_time_of_each_row(dump):
    """A script finds the file or row of a tensor by the time in the manifest."""
    root = dump([np.ones(2), np.ones(3)], ContentSettings("full"))
    folder = root / "rank_0" / ".dump_metadata" / "manifest"
    body = json.loads(next(folder.iterdir()).read_text())
    assert [record["timestamp_us"] for record in body["records"]] == [STAMP + 1, STAMP + 2]


def rows_of(*arrays: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """Return each row with its largest element."""
    return [
        (each, figures_of(("max",), each.dtype.name, each.data.cast("B"))[0]) for each in arrays
    ]


class TestStatisticRows:
    """Many tensors in one frame: each is a row, a record of the manifest and a count."""

    CONTENT = ContentSettings("statistic", ("max",))
    MIXED = ContentSettings("full", ("max",))

    def test_rows_and_records_are_in_the_order_of_frames(self, make_agent, make_rank, frames):
        """Rows of tensors without space are between those of tensors with elements."""
        delivery = DeliverySettings(on_full="statistic")
        rank = make_rank(make_agent(workers=4).address, content=self.MIXED, delivery=delivery)
        rank.open()
        large = np.full(300_000, 1.0)
        stream = rank.push().send(
            frames.record(1, large),
            frames.figures(2, rows_of(np.full(2, 2.0), np.full(2, 3.0)), degraded="buffer_full"),
            frames.record(3, np.full(2, 4.0)),
            frames.figures(4, rows_of(*np.arange(5.0, 9.0).reshape(4, 1)), degraded="buffer_full"),
            frames.end(5, 0, 8),
            frames.goodbye(6),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert [row.split(",")[-2] for row in table(rank.root)[1:]] == list("12345678")
        found = manifest(rank.root)
        assert (found.status.stored, found.status.degraded, found.status.is_balanced) == (
            2,
            6,
            True,
        )
        assert [bool(record.path) for record in found.records] == [n in (0, 3) for n in range(8)]

    def test_each_row_is_admitted_or_dropped_by_itself(self, make_agent, make_rank, frames):
        """Rows that the plan excludes are dropped by reason; the others are stored."""
        selection = TensorSelection(inputs=False)
        rank = make_rank(make_agent().address, content=self.CONTENT, selection=selection)
        rank.open()
        arrays = [np.ones(2), np.ones(2, dtype=np.complex64), np.full(3, 2.0)]
        rows = [(array, "1") for array in arrays]
        stream = rank.push().send(
            frames.figures(1, rows),
            frames.figures(2, rows[:1], side=agent_pb2.SIDE_INPUT),
            frames.end(3, 0, 4),
            frames.goodbye(4),
        )
        assert stream.finish() is grpc.StatusCode.OK
        found = manifest(rank.root)
        assert dict(found.status.dropped) == {"no_statistics": 1, "side_excluded": 1}
        assert (found.status.stored, found.status.is_balanced) == (2, True)
        assert [record.shape for record in found.records] == [(2,), (3,)]
        assert len(table(rank.root)) == 3

    def test_rows_of_one_frame_go_to_their_folders(self, make_agent, make_rank, frames):
        """Graphs and constants have their own tables, and each graph gets the iteration."""
        rank = make_rank(make_agent().address, content=self.CONTENT)
        rank.open()
        row = rows_of(np.ones(2))
        sent = frames.figures(1, row, iteration=3)
        for fields in ({"graph": 2}, {"constant": True}, {"graph": 2, "constant": True}):
            other = frames.figures(1, row, iteration=3, **fields).figure_rows
            sent.figure_rows.MergeFrom(other)
        rank.push().send(sent, frames.end(2, 3, 4), frames.goodbye(3)).finish()
        tables = sorted(rank.root.rglob("statistic.csv"))
        assert [
            path.parent.relative_to(rank.root / "rank_0/Net").as_posix() for path in tables
        ] == [
            "0/3",
            "0/constants",
            "2/3",
            "2/constants",
        ]
        orders = (rank.root / "rank_0/execution_order").glob("ms_global_*")
        assert {path.name[-5] for path in orders} == {"0", "2"}

    @pytest.mark.parametrize("left", [0, 130, 210, 10_000])
    def test_restart_within_an_iteration_keeps_counts_and_rows(
        self, make_agent, make_rank, frames, left
    ):
        """Counts, rows and manifest equal those of an agent that was not restarted."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        rows = [(np.ones(1), "1"), (np.ones(1, dtype=np.complex64), "2"), (np.ones(1), "3")]
        sent = [frames.figures(1, rows), frames.figures(4, rows, switched_on=True)]
        sent[1].sequence = 2
        rank.push().send(*sent).finish()
        path = rank.root / "rank_0" / "Net" / "0" / "0" / "statistic.csv"
        data = path.read_bytes()
        agent.stop()
        path.unlink()
        path.write_bytes(data[:left])
        agent.start()
        assert path.read_bytes() == data
        (before,) = rank.status().iterations
        assert (before.stored, dict(before.dropped)) == (4, {"no_statistics": 2})
        rank.open()
        stream = rank.push().send(*sent, frames.end(3, 0, 6), frames.goodbye(4))
        assert stream.finish() is grpc.StatusCode.OK
        assert path.read_bytes() == data
        found = manifest(rank.root)
        assert found.status.is_balanced
        assert [each.timestamp_us for each in found.records] == [STAMP + n for n in (1, 3, 4, 6)]

    def test_rows_wait_for_a_failing_disk(self, make_agent, make_rank, frames):
        """Rows are acknowledged once the ledger has them, and written when the disk works again."""
        agent = make_agent()
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        path = rank.root / "rank_0" / "Net" / "0" / "0" / "statistic.csv"
        path.mkdir(parents=True)
        stream = rank.push().send(frames.figures(1, rows_of(*np.eye(3))))
        stream.wait_acknowledged(1)
        path.rmdir()
        stream.send(frames.figures(2, rows_of(np.full(1, 7.0))), frames.end(3, 0, 4))
        stream.wait_acknowledged(3)
        assert [row.split(",")[-2] for row in table(rank.root)[1:]] == ["1", "1", "1", "7"]
        assert manifest(rank.root).status.is_balanced
        stream.finish()

    def test_drops_by_row_are_remembered_after_a_restart(self, make_agent, make_rank, frames):
        """Rows that were dropped for lack of space stay dropped, even if there is space now."""
        agent = make_agent(keep_free_bytes=1 << 60)
        rank = make_rank(agent.address, content=self.CONTENT)
        rank.open()
        stream = rank.push().send(frames.figures(1, rows_of(*np.eye(3))))
        stream.wait_acknowledged(1)
        stream.finish()
        agent.restart()
        (found,) = rank.status().iterations
        assert (found.stored, dict(found.dropped)) == (0, {"disk_low": 3})
        assert not list(rank.root.rglob("statistic.csv"))

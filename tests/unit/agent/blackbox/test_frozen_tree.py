"""Frozen trees from raw files: complete after a kill at any step, never over another freeze."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.black_box_rings import (
    KINDS,
    STARTED_US,
    make_frozen_rings,
    make_tensors,
    read_tree_record,
)

import rankdump
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.reader.fingerprints import read_fingerprints_of_tree
from rankdump._core.black_box import PULSE_ROW, StepState
from rankdump._core.freeze_record import FreezeRecord, format_freeze_record, parse_freeze_record
from rankdump._core.plan import BlackBoxSettings, DumpPlan, OutputSettings, plan_to_json
from rankdump._core.status import SessionState
from rankdump.errors import CorruptedError
from rankdump.reader import status_of, walk
from rankdumpd.agent.blackbox import raw_freeze
from rankdumpd.agent.blackbox.frozen_tree import (
    RETRY_INTERVAL_S,
    FrozenTreeWriter,
    RawBacklog,
    measure_frozen_trees,
)
from rankdumpd.agent.blackbox.pulse_rows import TensorDetail, iter_table_rows
from rankdumpd.agent.blackbox.raw_freeze import FrozenRing, RawFreezeFolder
from rankdumpd.agent.session.registry import read_checked_plan
from rankdumpd.agent.storage.tree import DumpTree


class KilledError(BaseException):
    """The agent is killed."""


def make_writer(agent: str = "a", shortage: str = "") -> FrozenTreeWriter:
    return FrozenTreeWriter(
        "here",
        agent,
        find_shortage=lambda root, job_id, size: shortage,
        is_stopping=lambda: False,
        now_us=lambda: STARTED_US,
    )


def write_raw(folder: Path, frozen: tuple[FreezeRecord, list[FrozenRing]]) -> Path:
    return RawFreezeFolder(folder / "state").write(*frozen)


def read_files(tree: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and path.name != "config.json"
    }


def test_tree_has_tables_manifests_and_the_record(tmp_path):
    frozen = make_frozen_rings(tmp_path / "dump")
    found = make_writer().write(write_raw(tmp_path, frozen))
    assert found
    root = Path(found[1])
    assert root == tmp_path / "dump/blackbox/1"
    table = (root / "rank_1/Net/0/1/statistic.csv").read_text().splitlines()
    assert table[2].endswith('"(2,2)",nan,nan,nan,4,5,0,0,,,,,')
    assert table[1].endswith('"(2,2)",2,-1,2,4,0,0,0,,,,,')
    record = read_tree_record(root)
    assert record == found[0]
    assert [len(rank.steps) for rank in record.ranks] == [3, 3]
    bad = record.ranks[1].steps[1]
    assert bad.first_nonfinite
    assert (bad.first_nonfinite.op_name, bad.first_nonfinite.nans) == (KINDS[1].op_name, 5)
    view = status_of(walk(root))
    assert all(each.complete and each.is_balanced for each in view.iterations)
    assert {each.state for each in view.sessions} == {SessionState.CLOSED}
    assert 0 < measure_frozen_trees(tmp_path / "dump") < 1 << 20


def test_tensors_with_details_have_all_statistics_and_fingerprints(tmp_path):
    frozen = make_frozen_rings(tmp_path / "dump")
    found = make_writer().write(write_raw(tmp_path, frozen))
    assert found
    root = Path(found[1])
    table = (root / "rank_0/Net/0/2/statistic.csv").read_text().splitlines()
    assert table[0].endswith(
        "L2Norm Value,Count,NaN Count,Negative Inf Count,Positive Inf Count,"
        "Avg Value,Negative Zero Count,Positive Zero Count,Zero Count"
    )
    assert table[1].endswith('"(2,2)",3,-1,2,4,0,0,0,0.375,2,1,1,')
    assert table[2].endswith('"(2,2)",3,-1,2,4,0,0,0,,,,,')
    steps = read_tree_record(root).ranks[0].steps
    assert [step.fingerprints for step in steps] == [1, 0, 1]
    problems: list[str] = []
    known = read_fingerprints_of_tree(root, lambda rank, iteration: True, problems)
    assert sorted((rank, record.op_name) for rank, record in known) == [
        (rank, KINDS[0].op_name) for rank in (0, 0, 1, 1)
    ]
    assert {each.digest for each in known.values()} == {int.from_bytes([7] * 8, "little")}
    assert not problems
    assert not check_tree(root, workers=1).damages


def test_tensors_in_full_are_read_back_bit_by_bit(tmp_path):
    found = make_writer().write(write_raw(tmp_path, make_frozen_rings(tmp_path / "dump")))
    assert found
    root = Path(found[1])
    dump = rankdump.open(root)
    wanted = {each.kind.side.value: each for each in make_tensors(1)}
    seen = {entry.key.side.value: entry for entry in dump.tensors()}
    assert sorted(seen) == sorted(wanted) == ["input", "output"]
    for side, entry in seen.items():
        assert (entry.key.rank, entry.key.iteration) == (1, 1)
        assert entry.op_name == KINDS[1].op_name
        assert dump.load(entry).tobytes() == wanted[side].data
    # Its row in the table is that of the file.
    [row] = dump.statistics(rank=1, iteration=1, operator=KINDS[1].op_name)
    assert row.key.timestamp_us == seen["output"].key.timestamp_us
    assert not check_tree(root, workers=1).damages
    record = read_tree_record(root)
    assert [step.full_tensors for step in record.ranks[1].steps] == [0, 2, 0]
    assert [step.full_tensors for step in record.ranks[0].steps] == [0, 0, 0]
    [status] = [s for s in status_of(walk(root)).iterations if (s.rank, s.iteration) == (1, 1)]
    assert (status.expected, status.stored, status.bytes_in) == (4, 4, 16 + 24)


def test_raw_file_of_an_earlier_release_is_written(tmp_path, monkeypatch):
    """It says nothing of tensors in full."""

    def format_earlier(record: FreezeRecord) -> bytes:
        body = json.loads(format_freeze_record(record))
        for rank in body["ranks"]:
            for name in ("held_tensors", "tensor_bytes", "dropped_tensors"):
                del rank[name]
        return json.dumps(body).encode()

    frozen = make_frozen_rings(tmp_path / "dump", full=False)
    with monkeypatch.context() as patch:
        patch.setattr(raw_freeze, "format_freeze_record", format_earlier)
        raw = write_raw(tmp_path, frozen)
    found = make_writer().write(raw)
    assert found
    assert [len(rank.steps) for rank in found[0].ranks] == [3, 3]
    assert rankdump.open(found[1]).tensors() == []


def test_room_is_looked_for_rows_and_tensors(tmp_path):
    sizes: list[int] = []
    for full in (False, True):
        record, rings = make_frozen_rings(tmp_path / f"dump-{full}", full=full)
        writer = make_writer()
        writer._find_shortage = lambda root, job_id, size: sizes.append(size) or ""
        assert writer.write(write_raw(tmp_path, (record, rings)))
    # Their elements are not taken for rows.
    assert 2 * 8192 < sizes[1] - sizes[0] < 3 * 8192


def test_tensor_that_cannot_be_written_postpones_the_tree(tmp_path, monkeypatch):
    raw = write_raw(tmp_path, make_frozen_rings(tmp_path / "dump"))
    put, clock = DumpTree.put_small_files, HandClock()

    def fail(self, folder, files):
        return [OSError(errno.ENOSPC, "no space")] * len(files)

    monkeypatch.setattr(DumpTree, "put_small_files", fail)
    backlog = make_backlog(tmp_path, make_writer(), clock)
    assert list(backlog.write_due()) == []
    assert "a tensor of the black box cannot be written (disk_full)" in backlog.findings()[0]
    assert raw.exists()
    monkeypatch.setattr(DumpTree, "put_small_files", put)
    clock.now_s = RETRY_INTERVAL_S
    [written] = backlog.write_due()
    assert len(rankdump.open(written.root).tensors()) == 2
    assert not check_tree(Path(written.root), workers=1).damages


def test_average_of_what_is_not_finite_is_not_finite():
    detail = {0: TensorDetail(1.5, 1, 2, 1, b"")}

    def find_average(**counts: int) -> str:
        rows = np.zeros(1, PULSE_ROW)
        for name, count in counts.items():
            rows[name] = count
        state = StepState(0, 0, 0, rows.tobytes())
        [(_, _, text)] = iter_table_rows(state, detail, KINDS, [0])
        return text.split(",")[7]

    assert find_average() == "0.375"
    assert find_average(nan=1) == "nan"
    assert find_average(positive_inf=1) == "inf"
    assert find_average(negative_inf=1) == "-inf"
    assert find_average(positive_inf=1, negative_inf=2) == "nan"


def test_tree_is_complete_after_a_kill_at_any_write(tmp_path, monkeypatch):
    whole = make_frozen_rings(tmp_path / "whole", steps=2)
    found = make_writer().write(write_raw(tmp_path / "w", whole))
    assert found
    expected = read_files(Path(found[1]))
    fill, left = DumpTree._fill_and_close, [0]

    def fill_or_die(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        return fill(self, *args, **kwargs)

    monkeypatch.setattr(DumpTree, "_fill_and_close", fill_or_die)
    writes = 0
    while True:
        folder = tmp_path / f"killed-{writes}"
        frozen = make_frozen_rings(folder / "dump", steps=2)
        raw = write_raw(folder, frozen)
        left[0] = writes
        try:
            make_writer().write(raw)
        except KilledError:
            writes += 1
        else:
            break
        left[0] = 1 << 30
        again = make_writer().write(raw)
        assert again
        written = read_files(Path(again[1]))
        assert written.keys() == expected.keys()
        for name, data in expected.items():
            # Plans and configurations name the root.
            if ".dump_metadata/data_dump" not in name:
                assert written[name] == data, name
    assert writes > 10


@pytest.mark.parametrize("fields", [{"job_id": "other"}, {"attempt": 1}, {"frozen_us": 7}])
def test_tree_of_another_freeze_stays(tmp_path, fields):
    record, rings = make_frozen_rings(tmp_path / "dump")
    first = make_writer().write(write_raw(tmp_path, (record, rings)))
    other = dataclasses.replace(record, **fields)
    second = make_writer().write(write_raw(tmp_path, (other, rings)))
    assert first
    assert second
    assert (first[1], second[1]) == (f"{tmp_path}/dump/blackbox/1", f"{tmp_path}/dump/blackbox/1.1")
    assert read_tree_record(Path(first[1])) == first[0]


def test_agents_of_a_job_write_one_tree(tmp_path):
    record, rings = make_frozen_rings(tmp_path / "dump")
    for at, agent in enumerate("ab"):
        part = dataclasses.replace(record, ranks=record.ranks[at : at + 1], frozen_us=at)
        found = make_writer(agent).write(write_raw(tmp_path / agent, (part, rings[at : at + 1])))
        assert found
        assert found[1] == f"{tmp_path}/dump/blackbox/1"
    assert len(list((tmp_path / "dump/blackbox/1/.rankdump").glob("black_box.here.*.json"))) == 2


def test_tree_has_the_modes_of_the_plan(tmp_path):
    record, rings = make_frozen_rings(tmp_path / "dump", ranks=1)
    output = OutputSettings(str(tmp_path / "dump"), file_mode=0o444, folder_mode=0o755)
    plan = plan_to_json(DumpPlan(output, black_box=BlackBoxSettings(8)))
    ring = dataclasses.replace(
        rings[0], request=dataclasses.replace(rings[0].request, plan_json=plan)
    )
    found = make_writer().write(write_raw(tmp_path, (record, [ring])))
    assert found
    items = [item for item in Path(found[1]).rglob("*") if not item.is_symlink()]
    assert {item.stat().st_mode & 0o777 for item in items if item.is_dir()} == {0o755}
    modes = {item.stat().st_mode & 0o777 for item in items if item.is_file()}
    assert modes == {0o444, 0o644}  # 0o644: the lock


class HandClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_backlog(folder: Path, writer: FrozenTreeWriter, clock: Callable[[], float]) -> RawBacklog:
    backlog = RawBacklog(RawFreezeFolder(folder / "state"), writer, clock)
    backlog.find_left()
    return backlog


def test_draft_of_a_killed_process_is_removed(tmp_path):
    path = write_raw(tmp_path, make_frozen_rings(tmp_path / "dump"))
    path.with_suffix(".tmp").write_bytes(b"half")
    make_backlog(tmp_path, make_writer(), HandClock())
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_raw_files_of_an_earlier_process_are_written(tmp_path):
    raw = write_raw(tmp_path, make_frozen_rings(tmp_path / "dump"))
    (raw.parent / "1.0.tmp").write_bytes(b"half")
    backlog = make_backlog(tmp_path, make_writer(), HandClock())
    assert [each.root for each in backlog.write_due()] == [f"{tmp_path}/dump/blackbox/1"]
    assert (backlog.findings(), raw.exists(), list(backlog.write_due())) == ([], False, [])


def test_full_disk_postpones_the_tree(tmp_path):
    raw, clock = write_raw(tmp_path, make_frozen_rings(tmp_path / "dump")), HandClock()
    backlog = make_backlog(tmp_path, make_writer(shortage="disk_low"), clock)
    assert list(backlog.write_due()) == []
    assert "no room (disk_low)" in backlog.findings()[0]
    assert raw.exists()
    assert not (tmp_path / "dump").exists()
    backlog._writer = make_writer()
    assert list(backlog.write_due()) == []  # not due yet
    clock.now_s = RETRY_INTERVAL_S
    assert len(list(backlog.write_due())) == 1
    assert backlog.findings() == []


@pytest.mark.parametrize("kept", [0, 10, 30, 200, -40, -1])
def test_damaged_raw_file_is_set_aside(tmp_path, kept):
    raw = write_raw(tmp_path, make_frozen_rings(tmp_path / "dump"))
    raw.write_bytes(raw.read_bytes()[:kept])
    backlog = make_backlog(tmp_path, make_writer(), HandClock())
    assert list(backlog.write_due()) == []
    [finding] = backlog.findings()
    assert "\n" not in finding
    assert str(raw.with_suffix(".damaged")) in finding
    assert raw.with_suffix(".damaged").exists()


def test_record_is_read_back_as_it_was_written():
    record, _ = make_frozen_rings(Path("/dump"))
    assert parse_freeze_record(format_freeze_record(record)) == record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": 2}',
        b'{"version": 1, "job_id": 3}',
        b"[" * 100_000,
        b'{"version": 1, "causes": [], "job_id": "a", "attempt": 0, "iteration": 0, "host": "h", '
        b'"world_size": 1, "frozen_us": 0}',
        format_freeze_record(make_frozen_rings(Path("/dump"))[0]).replace(
            b'"attempt": 0', b'"attempt": -1'
        ),
        b"\xff\xfe",
    ],
)
def test_hostile_record_is_rejected_in_one_line(data):
    with pytest.raises(CorruptedError, match="not a record of a freeze") as raised:
        parse_freeze_record(data)
    assert "\n" not in str(raised.value)


def test_writer_knows_the_trees_that_it_has_written(tmp_path):
    """So a freeze that comes again after a restart of the agent is not written twice."""
    record, rings = make_frozen_rings(tmp_path / "dump")
    plan = read_checked_plan(rings[0].request)
    assert not make_writer().is_written("job", 0, 1, plan)
    assert make_writer("b").write(write_raw(tmp_path / "b", (record, rings)))
    assert not make_writer().is_written("job", 0, 1, plan)
    assert make_writer().write(write_raw(tmp_path, (record, rings)))
    assert make_writer().is_written("job", 0, 1, plan)
    for job_id, attempt, iteration in (("other", 0, 1), ("job", 1, 1), ("job", 0, 2)):
        assert not make_writer().is_written(job_id, attempt, iteration, plan)
    # In a tree beside that of another attempt, too.
    later = dataclasses.replace(record, attempt=1)
    found = make_writer().write(write_raw(tmp_path, (later, rings)))
    assert found
    assert found[1].endswith("/1.1")
    assert make_writer().is_written("job", 1, 1, plan)


def test_freezes_of_one_microsecond_have_files_and_trees_of_their_own(tmp_path):
    """As of two workers of an agent, one of which has left its freeze to the other."""
    record, rings = make_frozen_rings(tmp_path / "dump")
    of_ranks = [
        (dataclasses.replace(record, ranks=record.ranks[at : at + 1]), rings[at : at + 1])
        for at in range(2)
    ]
    raws = [write_raw(tmp_path, each) for each in of_ranks]
    assert len(set(raws)) == 2
    found = [make_writer().write(raw) for raw in (*raws, *raws)]
    assert [each and each[1].rpartition("/")[2] for each in found] == ["1", "1.1"] * 2


def test_raw_file_keeps_its_name_when_its_freeze_joins_another(tmp_path):
    record, rings = make_frozen_rings(tmp_path / "dump")
    path = write_raw(tmp_path, (record, rings))
    joined = dataclasses.replace(record, iteration=0)
    assert RawFreezeFolder(tmp_path / "state").write(joined, rings, path) == path
    backlog = RawBacklog(RawFreezeFolder(tmp_path / "state"), make_writer(), lambda: 0.0)
    assert [each.iteration for each in backlog.find_left()] == [0]
    path.write_bytes(b"damaged")
    assert backlog.find_left() == []

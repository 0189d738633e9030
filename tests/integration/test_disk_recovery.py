"""Agent after a full or failing disk: pending work is done once the disk works again."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.slab_agents import wait_until

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings
from rankdump._wire.metadata_messages import events_to_wire
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2, status_pb2
from rankdumpd.agent.commit import committer, post_commit
from rankdumpd.agent.session import registry
from rankdumpd.agent.storage import tree

ARRAY = np.arange(12, dtype=np.float32)


class FailingDisk:
    """Fails every creation below a folder while it has an error."""

    def __init__(self, root: Path) -> None:
        self.error = 0
        self.only = ""
        self._root, self._open = str(root), os.open

    def open(self, path, flags, *args, **named):
        text = os.fspath(path)
        if named.get("dir_fd") is not None:
            folder = Path(f"/proc/self/fd/{named['dir_fd']}").readlink()
            text = f"{folder}/{text}"
        if self.error and flags & os.O_CREAT and text.startswith(self._root) and self.only in text:
            raise OSError(self.error, os.strerror(self.error), text)
        return self._open(path, flags, *args, **named)


@pytest.fixture
def disk(short_dir, monkeypatch) -> FailingDisk:
    """The disk of the tree; failed work is tried again at once."""
    monkeypatch.setattr(post_commit, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(committer, "CHECK_INTERVAL_S", 0.01)
    disk = FailingDisk(short_dir / "dump")
    monkeypatch.setattr(os, "open", disk.open)
    # Errors are injected into calls of Python, so small files are made by those too.
    monkeypatch.setattr(tree, "KERNELS", tree.KERNELS._replace(write_small_files=None))
    return disk


@pytest.fixture
def rank(disk, make_agent, make_rank):
    """A rank connected to an agent that writes to that disk."""
    return make_rank(make_agent().address)


def events(sequence: int, iteration: int) -> agent_pb2.Frame:
    columns = EventColumns.from_events(
        [RankEvent(iteration, 0, 0, 0, "Default/op0", EventKind.OPERATOR, 1, 2)]
    )
    return agent_pb2.Frame(sequence=sequence, events=events_to_wire(columns))


def manifests(root: Path) -> list[Manifest]:
    folder = root / "rank_0" / ".dump_metadata" / "manifest"
    return [Manifest.from_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def waits(rank) -> list[str]:
    return [each for each in rank.status().findings if "it is retried" in each]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS])
def test_manifest_is_written_once_a_full_disk_has_space(rank, frames, disk, code):
    """There is one finding while manifests wait, and none afterwards; later ones follow
    in order.
    """
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY), events(2, 0))
    stream.wait_acknowledged(2)
    disk.error, disk.only = code, ".dump_metadata"
    stream.send(frames.end(3, 0, 1), frames.record(4, ARRAY, iteration=1), events(5, 1))
    stream.send(frames.end(6, 1, 1)).wait_acknowledged(6)
    wait_until(lambda: waits(rank))
    (finding,) = rank.status().findings
    assert finding.startswith("rank 0, iteration 0: no manifest written: ")
    assert os.strerror(code) in finding
    assert manifests(rank.root) == []
    assert [each.complete for each in rank.status().iterations] == [True, True]
    disk.error = 0
    wait_until(lambda: len(manifests(rank.root)) == 2)
    wait_until(lambda: not rank.status().findings)
    assert all(each.status.is_balanced and len(each.records) == 1 for each in manifests(rank.root))
    order = rank.root / "rank_0" / "execution_order"
    assert (order / "ms_global_execution_order_graph_0.csv").read_text() == "0\n1\n"
    stream.send(frames.goodbye(7)).wait_acknowledged(7)
    assert rank.status().iterations[0].expected == 1
    stream.cut()


@pytest.mark.parametrize("form", ["npy", "bin"])
@pytest.mark.parametrize("cause", ["disk_cap", "disk_full"])
def test_file_without_ledger_entry_is_not_counted_as_drop(
    disk, short_dir, make_agent, make_rank, frames, cause, form
):
    """A record that is resent when the disk is full counts as stored if its file is in the tree."""
    output = {"layout": "mindspore-async", "file_format": "bin"} if form == "bin" else {}
    agent = make_agent()
    rank = make_rank(agent.address, output=output)
    rank.open()
    rank.push().send(frames.record(1, ARRAY)).wait_acknowledged(1)
    agent.stop()
    # As a kill between the two leaves it.
    with contextlib.closing(sqlite3.connect(short_dir / "state" / "ledger.sqlite")) as base, base:
        base.execute("DELETE FROM records")
        base.execute("UPDATE sessions SET watermark = 0")
    if cause == "disk_cap":
        agent = make_agent(disk_bytes=1)
    else:
        agent.start()
        disk.error = errno.ENOSPC
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1))
    stream.send(frames.end(3, 0, 2)).wait_acknowledged(3)
    (status,) = rank.status().iterations
    assert (status.stored, dict(status.dropped)) == (1, {cause: 1})
    assert len([path for path in rank.root.glob("rank_0/Net/**/*") if path.is_file()]) == 1
    disk.error = 0
    stream.cut()


def test_same_failure_of_many_iterations_is_one_finding_and_one_line(rank, frames, disk, caplog):
    """An error that does not pass, such as a missing permission, is not told once an iteration."""
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    disk.error, disk.only = errno.EACCES, "manifest"
    stream.send(*(frames.end(2 + each, each, int(not each)) for each in range(5)))
    stream.send(frames.goodbye(7)).finish()
    assert rank.status().findings == [
        "rank 0, iterations 0-4: no manifest written: Permission denied"
    ]
    lines = [each for each in caplog.records if "no manifest written" in each.getMessage()]
    assert [each.levelname for each in lines if each.levelname != "DEBUG"] == ["ERROR"]
    assert not any(each.exc_info for each in lines)


def test_session_end_does_not_wait_for_a_full_disk(disk, make_agent, make_rank, frames):
    """A rank can leave while its manifest waits; the next process has nothing left to do."""
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    disk.error = errno.ENOSPC
    stream.send(frames.end(2, 0, 1), frames.goodbye(3))
    assert stream.finish() is grpc.StatusCode.OK
    wait_until(lambda: waits(rank))
    assert rank.status().sessions[0].state == status_pb2.SESSION_STATE_CLOSED
    disk.error = 0
    wait_until(lambda: not rank.status().findings)
    assert [each.status.is_balanced for each in manifests(rank.root)] == [True]
    agent.restart()
    assert rank.status().sessions == []


def test_pending_work_is_completed_by_the_next_agent(disk, make_agent, make_rank, frames):
    """The disk is full across the restart, and the work waits in the new process as well."""
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    disk.error = errno.ENOSPC
    stream.send(frames.end(2, 0, 1)).wait_acknowledged(2)
    agent.restart()
    stream.wait_over()
    wait_until(lambda: waits(rank))
    disk.error = 0
    wait_until(lambda: len(manifests(rank.root)) == 1)
    wait_until(lambda: not waits(rank))


def test_statistics_rows_are_written_once_when_there_is_space(make_agent, make_rank, frames, disk):
    """Rows that are in their table already are not appended again."""
    rank = make_rank(
        make_agent().address, content=ContentSettings(saved="statistic", statistics=("max",))
    )
    rank.open()
    stream = rank.push().send(frames.figures(1, [(ARRAY, "1"), (ARRAY, "2")]))
    stream.wait_acknowledged(1)
    disk.error, disk.only = errno.ENOSPC, "statistic.csv"
    stream.send(frames.figures(2, [(ARRAY, "3")]), frames.end(3, 0, 3)).wait_acknowledged(3)
    wait_until(lambda: waits(rank))
    assert manifests(rank.root) == []
    disk.error = 0
    wait_until(lambda: len(manifests(rank.root)) == 1)
    (table,) = rank.root.rglob("statistic.csv")
    lines = table.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 1 + 3
    stream.cut()


def test_rank_metadata_is_written_when_there_is_space(rank, frames, disk):
    """A rank whose session was opened on a full disk has its own metadata file."""
    disk.error = errno.ENOSPC
    rank.open()
    wait_until(lambda: rank.status().findings)
    disk.error = 0
    folder = rank.root / "rank_0" / ".dump_metadata"
    wait_until((folder / "data_dump.json").exists)
    assert (folder / "data_dump.json").read_bytes() == rank.config_source
    wait_until(lambda: not rank.status().findings)


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOTCONN, errno.EROFS, errno.ESTALE]
)
def test_rank_is_admitted_after_a_transient_fault(rank, frames, disk, code, caplog):
    """It can open its session again; only a rank that cannot ever be admitted is rejected
    for good.
    """
    disk.error = code
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as failed:
            rank.open()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert os.strerror(code) in (failed.value.details() or "")
    lines = [each for each in caplog.records if "cannot be written at present" in each.message]
    assert [each.levelname for each in lines if each.name == registry.__name__] == ["WARNING"]
    disk.error = errno.EACCES
    with pytest.raises(grpc.RpcError) as failed:
        rank.open()
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    disk.error = 0
    rank.open()
    assert rank.push().send(frames.record(1, ARRAY), frames.goodbye(2)).finish() is (
        grpc.StatusCode.OK
    )


def failing(agent, error: Exception, frames: Callable[[Any], bool]) -> None:
    """Make the ledger of an agent reject every batch that has such a frame."""
    ledger = agent.agent._ledger
    real = ledger.commit

    def commit(outcomes, judged, declared, watermarks, *, synced):
        if any(map(frames, (*outcomes, *judged, *declared))):
            raise error
        real(outcomes, judged, declared, watermarks, synced=synced)

    ledger.commit = commit


class TestCommitFailures:
    def test_frame_that_cannot_be_committed_delays_no_other(self, make_agent, make_rank, frames):
        """It is tried three times, then counted; all other frames are acknowledged and in
        the tree.
        """
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        poison = sqlite3.IntegrityError("not this one")
        failing(agent, poison, lambda each: each.frame_id.sequence == 3 and each.reason == "")
        stream = rank.push()
        stream.send(*(frames.record(number, ARRAY + number) for number in range(1, 8)))
        stream.send(frames.end(8, 0, 7), frames.goodbye(9))
        assert stream.finish() is grpc.StatusCode.OK
        (iteration,) = rank.status().iterations
        assert (iteration.expected, iteration.stored) == (7, 6)
        assert dict(iteration.dropped) == {"internal_error": 1}
        assert "frame 3 (RecordOutcome): not committed" in "".join(rank.status().findings)

    def test_frame_that_cannot_be_counted_is_resent(self, make_agent, make_rank, frames):
        """Its stream ends, and its number is not taken for committed when it is resent."""
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        real = agent.agent._ledger.commit
        failing(agent, MemoryError(), lambda each: each.frame_id.sequence == 2)
        stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1))
        assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
        agent.agent._ledger.commit = real
        assert rank.open().acknowledged_sequence == 1
        stream = rank.push().send(frames.record(2, ARRAY + 1), frames.end(3, 0, 2))
        assert stream.send(frames.goodbye(4)).finish() is grpc.StatusCode.OK
        (iteration,) = rank.status().iterations
        assert (iteration.expected, iteration.stored) == (2, 2)

    def test_full_ledger_disk_is_a_finding_and_loses_nothing(
        self, make_agent, make_rank, frames, monkeypatch
    ):
        """Ranks wait while the state folder is full; the finding disappears when there is space."""
        monkeypatch.setattr("rankdumpd.agent.commit.committer.RETRY_INTERVAL_S", 0.01)
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        real = agent.agent._ledger.commit
        full = sqlite3.OperationalError("database or disk is full")
        failing(agent, full, lambda _: True)
        stream = rank.push().send(frames.record(1, ARRAY))
        wait_until(lambda: rank.status().findings)
        assert rank.status().findings == [
            "the ledger cannot be written, and ranks wait: database or disk is full"
        ]
        agent.agent._ledger.commit = real
        stream.send(frames.end(2, 0, 1), frames.goodbye(3))
        assert stream.finish() is grpc.StatusCode.OK
        assert not rank.status().findings

    def test_full_ledger_disk_delays_session_openings(self, make_agent, make_rank, monkeypatch):
        """Openings are answered with a request to retry, and the status shows the reason."""
        monkeypatch.setattr(committer, "CHECK_INTERVAL_S", 0.01)
        agent = make_agent()
        rank = make_rank(agent.address)
        agent.agent._ledger._base.execute("PRAGMA query_only = 1")
        with pytest.raises(grpc.RpcError) as failed:
            rank.open()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the ledger cannot be written at present" in (failed.value.details() or "")
        ledger, waiting = sorted(rank.status().findings, reverse=True)
        assert ledger.startswith("the ledger cannot be written, and ranks wait: ")
        assert "its session cannot be opened: the ledger cannot be written" in waiting
        agent.agent._ledger._base.execute("PRAGMA query_only = 0")
        wait_until(lambda: rank.status().findings == (waiting,) or not rank.status().findings)
        rank.open()
        wait_until(lambda: not rank.status().findings)

    def test_damaged_ledger_stops_the_process(self, make_agent, make_rank, frames, monkeypatch):
        """Nothing is acknowledged any more, and the drain reports the reason in one line."""
        asked: list[int] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: asked.append(number))
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        base = agent.agent._ledger._base

        class Damaged:
            in_transaction = False

            def execute(self, *_):
                raise sqlite3.DatabaseError("database disk image is malformed")

            def close(self):
                base.close()

        agent.agent._ledger._base = Damaged()
        stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY))
        wait_until(lambda: asked)
        with pytest.raises(CorruptedError, match=r"ledger.sqlite is damaged: .*malformed"):
            agent.agent.drain(0)
        stream.cut()
        assert stream.acknowledged == 0
        assert len(asked) == 1

"""Slabs of killed ranks, of restarted agents, and of both."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from support import slab_side
from support.slab_agents import MIB, SMALL, WAIT_S, arrays_of, counts, manifest_of, wait_until

from rankdump._core.status import SessionState
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.commit import committer
from rankdumpd.agent.ingress.servicer import OpenPushStreams

ARRAYS = [np.full(1000 + n, n, np.float32) for n in range(50)]


class StagingProcess:
    """A process that stages entries in a slab, and holds the lock of the slab while it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._staged = 0
        folder.mkdir()

    def stage(self, frame: agent_pb2.Frame, data: bytes = b"", *, torn: bool = False) -> None:
        """Add an entry to those that the process will stage."""
        path = self.folder / f"{self._staged:06}.frame"
        self._staged += 1
        path.write_bytes(frame.SerializeToString())
        if torn:
            path.with_suffix(".torn").write_text(str(len(data)))
        else:
            path.with_suffix(".data").write_bytes(data)

    def start(self, place: agent_pb2.Slab) -> None:
        """Start the process; return once everything is staged."""
        command = [sys.executable, slab_side.__file__, place.path, str(place.length)]
        self._process = subprocess.Popen(
            [*command, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "staged\n"

    def kill(self) -> None:
        """Kill the process without any clean-up; may be repeated."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for end in (self._process.stdin, self._process.stdout):
                assert end is not None
                end.close()
            self._process = None


@pytest.fixture
def child(short_dir: Path) -> Iterator[StagingProcess]:
    child = StagingProcess(short_dir / "staged")
    yield child
    child.kill()


@pytest.fixture
def agent(make_agent, short_dir):
    return make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)


@pytest.fixture
def rank(agent, make_rank):
    return make_rank(agent.address, wants_slab=True, codec="none", delivery=SMALL)


def state_of(agent) -> SessionState:
    return agent.agent.view().sessions[0].state


def test_rank_killed_right_after_staging_loses_nothing(agent, rank, child, frames, short_dir):
    """Every staged record is in the tree, although the rank sent no doorbell and had no stream."""
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.stage(frames.end(51, 0, 50))
    child.start(rank.open().slab)
    child.kill()
    wait_until(lambda: not list((short_dir / "slabs").iterdir()))
    assert arrays_of(rank.root) == [array.tobytes() for array in ARRAYS]
    assert manifest_of(rank.root).status.is_balanced
    assert counts(rank) == {"stored": 50, "degraded": 0, "expected": 50}
    assert state_of(agent) is SessionState.LOST


@pytest.fixture
def slow_agent(make_agent, short_dir, monkeypatch):
    """An agent that does not look for exited ranks by itself."""
    monkeypatch.setattr("rankdumpd.agent.shm.ring_registry.CHECK_INTERVAL_S", WAIT_S)
    return make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)


def test_wait_for_a_killed_rank_reads_its_slab(slow_agent, make_rank, child, frames):
    """`rankdump run` asks for its summary at once when a job was killed."""
    rank = make_rank(slow_agent.address, wants_slab=True, codec="none", delivery=SMALL)
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.start(rank.open().slab)
    child.kill()
    assert rank.drain().drained
    assert counts(rank)["stored"] == 50
    assert state_of(slow_agent) is SessionState.LOST


def test_wait_for_a_killed_rank_waits_for_the_end_of_its_stream(
    slow_agent, make_rank, child, frames, monkeypatch
):
    """Its stream can end a moment after the wait has begun."""
    begun, wait_for_streams = threading.Event(), OpenPushStreams.wait_until
    ended: list[bool] = []

    def note_wait(streams, have_ended, timeout_s):
        ended.append(have_ended())
        begun.set()
        wait_for_streams(streams, have_ended, timeout_s)

    monkeypatch.setattr(OpenPushStreams, "wait_until", note_wait)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        rank = make_rank(
            slow_agent.address,
            wants_slab=True,
            codec="none",
            delivery=SMALL,
            pid=process.pid,
            host=socket.gethostname(),
        )
        child.stage(frames.record(1, ARRAYS[0], first_bytes=0), ARRAYS[0].tobytes())
        child.start(rank.open().slab)
        stream = rank.push().ring(0)
        wait_until(lambda: slow_agent.agent.summarize().startswith("1 ranks"))
        process.kill()
    child.kill()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(rank.drain)
        assert begun.wait(WAIT_S)
        assert ended == [False]
        stream.cut()
        assert answer.result(WAIT_S).drained
    assert counts(rank)["stored"] == 1


def test_rank_killed_within_a_copy_drops_only_that_record(agent, rank, child, frames):
    """The record that was being copied is dropped; those before and behind it are in the tree."""
    array = ARRAYS[0]
    head = [frames.record(number, array, first_bytes=0) for number in range(5)]
    child.stage(head[1], array.tobytes())
    child.stage(head[2], array.tobytes(), torn=True)
    child.stage(head[3], array.tobytes())
    child.stage(head[4], array.tobytes()[:1000])
    place = rank.open().slab
    child.start(place)
    stream = rank.push().ring(0)
    stream.wait_acknowledged(1)
    # Its stream ends with it, as far as the agent can see; the lock says that it lives.
    stream.cut()
    wait_until(lambda: state_of(agent) is SessionState.LOST)
    assert Path(place.path).exists()
    child.kill()
    wait_until(lambda: not Path(place.path).exists())
    assert counts(rank) == {"stored": 2, "degraded": 0, "expected": 0, "torn": 2}
    assert rank.drain().drained
    assert arrays_of(rank.root) == [array.tobytes()] * 2


def test_session_end_in_remaining_entries_closes_the_session(agent, rank, child, frames):
    """A rank that is killed after its session end counts as closed."""
    child.stage(frames.goodbye(1))
    child.start(rank.open().slab)
    child.kill()
    wait_until(lambda: state_of(agent) is SessionState.CLOSED)


def test_damaged_remaining_entries_are_reported(agent, rank, child, frames, short_dir):
    """A finding reports what cannot be read; the entries before it are in the tree."""
    child.stage(frames.record(1, ARRAYS[0], first_bytes=0), ARRAYS[0].tobytes())
    child.stage(frames.record(7, ARRAYS[0], first_bytes=0), ARRAYS[0].tobytes())
    child.start(rank.open().slab)
    child.kill()
    wait_until(lambda: not list((short_dir / "slabs").iterdir()))
    assert arrays_of(rank.root) == [ARRAYS[0].tobytes()]
    assert any("frame 7 follows frame 1" in finding for finding in rank.status().findings)


def test_restarted_agent_continues_in_the_same_slab(agent, rank, child, frames):
    """Entries staged while no agent ran are in the tree, and nothing is there twice."""
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.stage(frames.end(51, 0, 50))
    child.stage(frames.goodbye(52))
    place = rank.open().slab
    inode = Path(place.path).stat().st_ino
    child.start(place)
    agent.restart()
    place = rank.open().slab
    assert Path(place.path).stat().st_ino == inode
    stream = rank.push().ring(0)
    stream.wait_acknowledged(52)
    assert stream.finish() is grpc.StatusCode.OK
    assert arrays_of(rank.root) == [array.tobytes() for array in ARRAYS]
    assert manifest_of(rank.root).status.stored == 50


def test_slab_of_a_rank_that_died_without_agent_is_read(agent, rank, child, frames, short_dir):
    """The next agent finds the slab through the ledger and reads it to its end."""
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.start(rank.open().slab)
    agent.stop()
    child.kill()
    agent.start()
    wait_until(lambda: not list((short_dir / "slabs").iterdir()))
    assert arrays_of(rank.root) == [array.tobytes() for array in ARRAYS]


def test_stop_says_that_the_next_agent_reads_what_an_exited_rank_left(
    agent, rank, child, frames, monkeypatch
):
    """The rank is gone, so it cannot send again what could not be entered in a full ledger."""

    def fail(*_args, **_named) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(committer, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(agent.agent._ledger, "commit", fail)
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.start(rank.open().slab)
    child.kill()
    wait_until(lambda: agent.agent.view().load.queued_records)
    assert agent.agent.drain(0.0) > 0
    assert agent.agent.explain_unfinished() == (
        "the next agent reads those of 1 rank that ended from shared memory, other ranks send "
        "theirs again"
    )
    agent.restart()
    wait_until(lambda: arrays_of(rank.root) == [array.tobytes() for array in ARRAYS])


def test_slab_of_a_lost_ledger_is_said_to_be_lost(agent, rank, child, frames, short_dir, caplog):
    """The rank was told that the next agent reads it; log and status say how much is gone."""
    for number, array in enumerate(ARRAYS, 1):
        child.stage(frames.record(number, array, first_bytes=0), array.tobytes())
    child.start(rank.open().slab)
    agent.stop()
    child.kill()
    shutil.rmtree(short_dir / "state")
    agent.start()
    assert not list((short_dir / "slabs").iterdir())
    (finding,) = rank.status().findings
    assert f" is removed with {len(ARRAYS)} frames (" in finding
    assert "its session is not in the ledger" in finding
    assert ("WARNING", finding) in [(each.levelname, each.getMessage()) for each in caplog.records]


def test_slab_of_a_closed_session_is_removed_without_a_word_of_loss(
    agent, rank, child, frames, short_dir
):
    """Everything in it was committed."""
    child.stage(frames.record(1, ARRAYS[0], first_bytes=0), ARRAYS[0].tobytes())
    child.stage(frames.goodbye(2))
    place = rank.open().slab
    child.start(place)
    kept = short_dir / "kept"
    shutil.copyfile(place.path, kept)
    child.kill()
    wait_until(lambda: not Path(place.path).exists())
    agent.stop()
    Path(place.path).parent.mkdir(exist_ok=True)
    shutil.copyfile(kept, place.path)
    agent.start()
    assert not Path(place.path).exists()
    assert rank.status().findings == []


@pytest.mark.parametrize("damage", [bytes(100), b""])
def test_truncated_slab_does_not_stop_the_agent(agent, rank, damage):
    """A file that was truncated while no agent ran is removed and reported."""
    path = Path(rank.open().slab.path)
    agent.stop()
    path.write_bytes(damage)
    agent.start()
    assert not path.exists()
    (finding,) = rank.status().findings
    assert "the rest of its slab is lost" in finding
    assert rank.open().HasField("slab")

"""Lock between writers and repair of a tree: never both, and no endless wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.slab_agents import wait_until

from rankdump._analysis.fsck.repair import repair_tree
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._cli.command_group import run_command_line
from rankdump.errors import UnavailableError
from rankdumpd.agent.commit import committer, post_commit
from rankdumpd.agent.storage import tree_lock
from rankdumpd.ingest.dump_file import IngestTask
from rankdumpd.ingest.runner import IngestRun

ARRAY = np.arange(12, dtype=np.float32)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Waiting work is tried again at once."""
    monkeypatch.setattr(post_commit, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(committer, "CHECK_INTERVAL_S", 0.01)


def lock_of(root: Path) -> Path:
    return root / ".rankdump" / "agent.lock"


@contextlib.contextmanager
def mending(root: Path) -> Generator[None]:
    """Hold the lock of a tree exclusively, as a repair does."""
    with lock_of(root).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def held(root: Path) -> bool:
    try:
        with mending(root):
            return False
    except BlockingIOError:
        return True


def leftover(root: Path) -> Path:
    path = root / "rank_0/Net/0/0/.x.tmp"
    path.write_bytes(b"half")
    return path


@pytest.fixture
def begun(make_agent, make_rank, frames):
    """An agent, and a rank with one tensor in the tree."""
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    stream = rank.push().send(frames.record(1, ARRAY))
    stream.wait_acknowledged(1)
    return agent, rank, stream


class TestRepairBesideAgents:
    def test_repair_is_refused_until_the_agent_leaves_the_tree(self, begun, frames, capsys):
        """From the first session to the stop, because a rank whose stream broke may reconnect."""
        agent, rank, stream = begun
        path = leftover(rank.root)
        assert run_command_line(["fsck", "--repair", str(rank.root)]) == 1
        said = f"rankdump: {rank.root}: an agent writes to the tree (process {os.getpid()}); "
        assert capsys.readouterr().err == f"{said}run --repair after the agent has stopped\n"
        stream.cut()
        wait_until(lambda: rank.status().sessions[0].state != 1)
        assert held(rank.root)
        agent.restart()
        assert held(rank.root)
        assert path.exists()
        agent.stop()
        assert run_command_line(["fsck", "--repair", str(rank.root)]) == 0
        assert f"removed: {path.relative_to(rank.root)}" in capsys.readouterr().out
        assert not path.exists()

    def test_repair_is_allowed_after_all_sessions_ended(self, begun, make_rank, frames, capsys):
        """A running agent holds no lock after the end of its sessions; a new session
        locks again.
        """
        agent, rank, stream = begun
        other = make_rank(agent.address, rank=1, world_size=2, session_id="other")
        other.open()
        second = other.push()
        stream.send(frames.end(2, 0, 1), frames.goodbye(3))
        assert stream.finish() is grpc.StatusCode.OK
        assert held(rank.root)
        second.send(frames.goodbye(1))
        assert second.finish() is grpc.StatusCode.OK
        wait_until(lambda: not held(rank.root))
        assert run_command_line(["fsck", "--repair", str(rank.root)]) == 0
        rank.open()
        stream = rank.push()
        wait_until(lambda: held(rank.root))
        stream.finish()

    def test_repair_waits_for_every_agent_of_the_tree(self, begun, make_rank, short_dir):
        """Agents share the lock; a repair gets it when the last one has released it."""
        from integration.conftest import EmbeddedAgent

        agent, rank, stream = begun
        folder = short_dir / "two"
        folder.mkdir()
        second = EmbeddedAgent(folder, keep_free_ratio=0.0, keep_free_inodes_ratio=0.0)
        other = make_rank(second.address, rank=1, world_size=2, session_id="other")
        other.open()
        stream.cut()
        agent.stop()
        assert held(rank.root)
        second.stop()
        assert not held(rank.root)

    def test_lock_file_is_not_part_of_the_dump(self, begun, frames):
        agent, rank, stream = begun
        path = lock_of(rank.root)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        stream.send(frames.end(2, 0, 1)).wait_acknowledged(2)
        stream.cut()
        agent.stop()
        assert check_tree(rank.root, workers=1).damages == ()


class TestAgentDuringRepair:
    """An agent whose tree is being repaired."""

    def test_rank_is_admitted_after_a_repair(self, begun, make_rank, frames):
        agent, rank, stream = begun
        stream.cut()
        agent.stop()
        with mending(rank.root):
            agent.start()
            with pytest.raises(grpc.RpcError) as failed:
                rank.open()
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "is being repaired (rankdump fsck --repair)" in (failed.value.details() or "")
        rank.open()
        stream = rank.push().send(frames.record(2, ARRAY + 1), frames.end(3, 0, 2))
        assert stream.send(frames.goodbye(4)).finish() is grpc.StatusCode.OK
        (iteration,) = rank.status().iterations
        assert iteration.stored == 2

    def test_pending_work_after_a_restart_waits_for_the_repair(self, begun, frames, monkeypatch):
        """A manifest that waited for a full disk is written after the repair, not before."""
        agent, rank, stream = begun
        real, full = os.open, [True]

        def no_space(path, flags, *args, **named):
            if full[0] and flags & os.O_CREAT and "iteration_0" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, flags, *args, **named)

        monkeypatch.setattr(os, "open", no_space)
        stream.send(frames.end(2, 0, 1)).wait_acknowledged(2)
        stream.cut()
        agent.stop()
        full[0] = False
        folder = rank.root / "rank_0/.dump_metadata/manifest"
        with mending(rank.root):
            agent.start()
            (finding,) = [each for each in rank.status().findings if "is retried" in each]
            assert "the tree is being repaired" in finding
            assert not any(folder.iterdir())
        wait_until(lambda: any(folder.glob("iteration_0.*.json")))
        wait_until(lambda: not any("again" in each for each in rank.status().findings))
        assert held(rank.root)

    def test_removed_tree_is_not_created_again(self, begun):
        """An agent that resumes its sessions does not make a tree that somebody removed."""
        agent, rank, stream = begun
        stream.cut()
        agent.stop()
        rank.root.rename(rank.root.with_name("away"))
        agent.start()
        assert not rank.root.exists()

    def test_tree_that_was_moved_is_a_finding_and_the_new_one_is_locked(self, begun, frames):
        """What was stored before is somewhere else; the job goes on."""
        _, rank, stream = begun
        moved = rank.root.rename(rank.root.with_name("away"))
        ends = [frames.record(2, ARRAY, iteration=1), frames.end(3, 0, 1), frames.end(4, 1, 1)]
        stream.send(*ends, frames.record(5, ARRAY, iteration=2), frames.end(6, 2, 1))
        stream.wait_acknowledged(6)
        wait_until(lambda: any(rank.root.glob("rank_0/.dump_metadata/manifest/iteration_2.*")))
        (finding,) = (each for each in rank.status().findings if "moved or removed" in each)
        assert finding.startswith(f"rank 0: {rank.root} was moved or removed while the job wrote")
        assert "of iteration 0 and earlier ones" in finding
        wait_until(lambda: lock_of(rank.root).exists() and held(rank.root))
        wait_until(lambda: not held(moved))
        assert [each.status.rank for each in read_tree_sessions(rank.root)] == [0]

    def test_recreated_tree_is_locked_as_well(self, begun, make_rank):
        """The lock file of the removed tree no longer counts."""
        agent, rank, stream = begun
        lock_of(rank.root).unlink()
        make_rank(agent.address, rank=1, world_size=2, session_id="other").open()
        assert held(rank.root)
        stream.cut()

    @pytest.mark.parametrize("place", [".rankdump", ".rankdump/agent.lock"])
    def test_planted_link_is_neither_locked_nor_followed(
        self, make_agent, make_rank, frames, short_dir, caplog, place
    ):
        """Nothing is created or locked behind it; ranks continue, and a repair is refused."""
        outside = short_dir / "outside"
        outside.mkdir()
        rank = make_rank(make_agent().address)
        (rank.root / place).parent.mkdir(parents=True)
        (rank.root / place).symlink_to(outside if place == ".rankdump" else outside / "file")
        for _ in range(2):
            rank.open()
        stream = rank.push().send(frames.record(1, ARRAY), frames.goodbye(2))
        assert stream.finish() is grpc.StatusCode.OK
        assert list(outside.iterdir()) == []
        assert [r.message for r in caplog.records if "without the tree lock" in r.message][1:] == []
        assert any("without the tree lock" in r.message for r in caplog.records)
        assert run_command_line(["fsck", "--repair", str(rank.root)]) == 1
        assert list(outside.iterdir()) == []

    def test_disk_without_locks_is_reported_by_agent_and_repair(
        self, make_agent, make_rank, frames, monkeypatch, caplog
    ):
        """Dumps continue and one line reports it; a repair says that other writers cannot be
        excluded.
        """

        def flock(file, how):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        agent = make_agent()
        monkeypatch.setattr(tree_lock.fcntl, "flock", flock)
        root = make_rank(agent.address).root
        for number in range(2):
            rank = make_rank(agent.address, rank=number, world_size=2, session_id=f"s{number}")
            rank.open()
            stream = rank.push().send(frames.record(1, ARRAY + number), frames.end(2, 0, 1))
            assert stream.send(frames.goodbye(3)).finish() is grpc.StatusCode.OK
        assert sum("without the tree lock" in record.message for record in caplog.records) == 1
        report = repair_tree(root, check_tree(root, workers=1))
        assert report.damages == ()
        assert any("has no locks" in sentence for sentence in report.unchecked)


def test_ingest_locks_its_tree_and_waits_for_a_repair(tmp_path):
    source, tree = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    task = IngestTask(source, tree)
    run = IngestRun(task, report=lambda _: None)
    assert held(tree)
    assert run.run()
    with mending(tree), pytest.raises(UnavailableError, match="is being repaired"):
        IngestRun(task, report=lambda _: None)
    assert IngestRun(task, report=lambda _: None).run()

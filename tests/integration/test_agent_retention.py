"""Retention of an agent: whole iterations are removed by age and size, oldest first."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump import reader
from rankdump._analysis.compare.comparison import compare
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._cli.command_group import run_command_line
from rankdump._core.manifest import RetiredIteration
from rankdump._core.plan import ContentSettings
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent import retention
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.limits.admission import ResourcePolicy
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.retention import RetentionManager
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.server.metrics import MetricCounters

DAY_US = 86_400_000_000
FULL = ContentSettings(saved="full", fingerprints=True)
SIZE = 3000


class SimulatedKill(BaseException):
    """Simulates the end of a process between two steps."""


class RetentionRig:
    """Retention manager on the ledger of a stopped agent, at any simulated time."""

    def __init__(self, state: Path, policy: ResourcePolicy, *, days: float = 0.0) -> None:
        self.ledger, self.usage, self.told = (
            AgentLedger(state),
            DumpUsage(),
            list[dict[str, object]](),
        )
        self.usage.restore(self.ledger.retention.list_usage(), self.ledger.retention.counts())
        registry = SessionRegistry(
            self.ledger,
            max_record_bytes=1,
            capacity_fault=lambda _: "",
            counters=MetricCounters(),
        )
        (row,) = self.ledger._select("SELECT MAX(ended_us) FROM iterations")
        self.keeper = RetentionManager(
            self.ledger,
            registry,
            self.usage,
            lambda: policy,
            audit=lambda _, fields: self.told.append(dict(fields)),
            now_us=lambda: int(row[0] + days * DAY_US),
        )

    def removed(self) -> list[int]:
        """Return the removed iterations, in the order of their removal."""
        while self.keeper.remove_due():
            pass
        return [int(str(fields["iteration"])) for fields in self.told]


@contextlib.contextmanager
def house(state: Path, policy: ResourcePolicy, *, days: float = 0.0) -> Generator[RetentionRig]:
    made = RetentionRig(state, policy, days=days)
    try:
        yield made
    finally:
        made.ledger.close()


@pytest.fixture
def state(short_dir: Path) -> Path:
    return short_dir / "state"


@pytest.fixture
def send(make_rank, frames):
    """Sends iterations of two tensors each; the second one is equal in all of them."""

    def send(agent, count: int, *, goodbye: bool = True, **fields):
        rank = make_rank(agent.address, codec="none", **{"content": FULL, **fields})
        rank.open()
        stream = rank.push()
        noise, number = np.random.default_rng(7), 0
        for iteration in range(count):
            for array in (noise.integers(0, 255, SIZE, np.uint8), np.arange(SIZE, dtype=np.int16)):
                number += 1
                stream.send(frames.record(number, array, iteration=iteration))
            number += 1
            stream.send(frames.end(number, iteration, 2))
        stream.wait_acknowledged(number)
        if goodbye:
            stream.send(frames.goodbye(number + 1, count))
            assert stream.finish() is grpc.StatusCode.OK
        return rank, stream

    return send


def iterations(root: Path, rank: int = 0) -> set[int]:
    """Return the iterations that have any file left."""
    folders = {int(path.name) for path in (root / f"rank_{rank}" / "Net" / "0").iterdir()}
    files = (root / f"rank_{rank}" / ".dump_metadata").glob("*/*iteration_*")
    return folders | {int(path.name.lstrip(".").split("_")[1].split(".")[0]) for path in files}


class TestRetentionChoice:
    """The choice of the iterations to remove."""

    def test_iterations_are_removed_by_age(self, make_agent, send, state):
        """Iterations that ended too long ago are removed, each once."""
        agent = make_agent()
        rank, _ = send(agent, 3)
        agent.stop()
        policy = ResourcePolicy(1, retain_s=86_400)
        with house(state, policy, days=0.9) as early:
            assert early.removed() == []
        with house(state, policy, days=1.1) as late:
            assert late.removed() == [0, 1, 2]
        assert iterations(rank.root) == set()
        assert check_tree(rank.root, workers=1).damages == ()
        with house(state, policy, days=1.1) as again:
            assert again.removed() == []
            assert again.usage.total == 0
            assert again.ledger.retention.counts() == {"job": 3}

    def test_removal_is_one_line_for_each_job(self, make_agent, send, state, caplog):
        """Each iteration of each rank is a line of the audit log, and of the log at debug alone."""
        caplog.set_level("INFO", retention.__name__)
        agent = make_agent()
        send(agent, 3)
        send(agent, 2, rank=1, world_size=2, session_id="other")
        agent.stop()
        with house(state, ResourcePolicy(1, retain_s=86_400), days=1.1) as late:
            assert late.keeper.remove_due() == 3
            assert len(late.told) == 5
        lines = [each.getMessage() for each in caplog.records if each.name == retention.__name__]
        (line,) = lines
        assert line.startswith("job job: iterations 0-2 of 2 ranks removed, ")
        assert line.endswith(": retain_days")

    def test_removed_iterations_are_counted_across_restarts(self, make_agent, send, state):
        agent = make_agent()
        send(agent, 3)
        agent.stop()
        with house(state, ResourcePolicy(1, retain_s=86_400), days=1.1) as late:
            assert late.removed() == [0, 1, 2]
        for _ in range(2):
            agent.restart()
            counted = {each.name: each.value for each in agent.counters.samples()}
            assert counted["rankdump_agent_retired_iterations_total"] == 3

    def test_iterations_are_removed_by_size_with_links_counted_last(self, make_agent, send, state):
        """The oldest are removed until the rest fits; a shared file counts until its last link is
        removed.
        """
        agent = make_agent()
        rank, _ = send(agent, 4)
        agent.stop()
        with house(state, ResourcePolicy(1, retain_bytes=1)) as kept:
            total = kept.usage.total
            files = {
                path.stat().st_ino: path.stat().st_size
                for path in rank.root.glob("rank_0/Net/**/*.npy")
            }
            assert total == sum(files.values())
        one = SIZE + 128
        with house(state, ResourcePolicy(1, retain_bytes=total - one)) as some:
            assert some.removed() == [0]
            assert some.usage.total == total - one
        assert check_tree(rank.root, workers=1).damages == ()
        with house(state, ResourcePolicy(1, retain_bytes=1)) as none:
            assert none.removed() == [1, 2, 3]
            assert none.usage.total == 0

    def test_files_of_a_baseline_are_kept(self, make_agent, send, state, short_dir):
        """Iterations whose tensors are in the baseline are removed, and its files stay."""
        agent = make_agent()
        first, _ = send(agent, 2)
        content = replace(FULL, baseline=str(first.root))
        about = {"job_id": "later", "session_id": "later", "root": short_dir / "later"}
        later, _ = send(agent, 2, content=content, **about)
        statuses = [each.status for each in reader.walk(later.root).manifests]
        assert [each.same_as_baseline for each in statuses] == [2, 2]
        agent.stop()
        with house(state, ResourcePolicy(1, retain_s=86_400), days=1.1) as kept:
            kept.ledger.retention.pin("job", True)
            assert kept.removed() == [0, 1]
        assert iterations(later.root) == set()
        for root, count in ((first.root, 4), (later.root, 0)):
            assert len(reader.walk(root).entries) == count
            assert check_tree(root, workers=1).damages == ()

    def test_pinned_job_is_kept(self, make_agent, send, state):
        """It is kept until it is unpinned; the status shows which jobs are pinned."""
        agent = make_agent()
        rank, _ = send(agent, 2)
        pin = agent_pb2.Pin(job_id="job", pinned=True)
        rank.stub.Control(agent_pb2.ControlRequest(pin=pin))
        (usage,) = rank.status().usage
        assert (usage.job_id, usage.pinned) == ("job", True)
        assert usage.bytes_stored > 2 * SIZE
        agent.stop()
        with house(state, ResourcePolicy(1, retain_bytes=1)) as kept:
            assert kept.removed() == []
            kept.ledger.retention.pin("job", False)
            assert kept.removed() == [0, 1]

    def test_open_and_newest_iterations_of_a_live_job_are_kept(self, make_agent, send, state):
        """An iteration that others have ended is kept for a rank that is behind."""
        agent = make_agent(retain_bytes=1)
        ahead, one = send(agent, 4, goodbye=False, session_id="ahead", world_size=2)
        _, two = send(agent, 2, goodbye=False, session_id="behind", rank=1, world_size=2)
        keeper = agent.agent._retention
        while keeper.remove_due():
            pass
        assert iterations(ahead.root) == {1, 2, 3}
        assert iterations(ahead.root, rank=1) == {1}
        one.finish()
        two.finish()


class TestRemoval:
    """The removal of iterations from a tree."""

    @pytest.mark.parametrize("steps", range(8))
    def test_kill_between_any_two_steps_leaves_no_half_removal(
        self, make_agent, send, state, monkeypatch, steps
    ):
        """The next process completes a removal that was begun, and removes nothing else."""
        agent = make_agent()
        rank, _ = send(agent, 2)
        agent.stop()
        policy = ResourcePolicy(1, retain_bytes=SIZE * 3 + 512)
        steps_taken = retention.remove_part

        def cut(part, *, shared):
            for number, step in enumerate(steps_taken(part, shared=shared)):
                if number == steps:
                    raise SimulatedKill
                yield step
            raise SimulatedKill

        with monkeypatch.context() as patched, house(state, policy) as killed:
            patched.setattr(retention, "remove_part", cut)
            with pytest.raises(SimulatedKill):
                killed.removed()
        # Before its manifest is hidden nothing is gone; after that one line says what goes on.
        damages = check_tree(rank.root, workers=1).damages
        assert [damage.kind.value for damage in damages] == ["leftover"] * (1 <= steps <= 3)
        with house(state, policy) as after:
            assert after.removed() == [0]
            assert after.ledger.retention.counts() == {"job": 1}
            left = after.usage.total
        assert iterations(rank.root) == {1}
        assert left == sum(path.stat().st_size for path in rank.root.glob("rank_0/Net/**/*.npy"))
        view = reader.status(rank.root)
        retired = "rank 0: iteration 0 is retired: removed by age or to free disk space"
        assert view.findings == (retired,)
        assert [(i.iteration, i.complete) for i in view.iterations] == [(1, True)]

    def test_tree_lists_removed_iterations(self, make_agent, send, state):
        """An iteration that one rank removed is not missing; the agent's status keeps its
        balance.
        """
        agent = make_agent()
        rank, _ = send(agent, 2, session_id="one", job_id="a", world_size=2)
        send(agent, 2, session_id="two", job_id="b", rank=1, world_size=2)
        agent.stop()
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            some.ledger.retention.pin("b", True)
            assert some.removed() == [0, 1]
            assert some.told[0]["job"] == "a"
        (said,) = reader.status(rank.root).findings
        assert said == "rank 0: iteration 0-1 is retired: removed by age or to free disk space"
        path = rank.root / "rank_0" / ".dump_metadata" / "retired.jsonl"
        lines = [RetiredIteration.from_line(line) for line in path.read_text().splitlines()]
        assert [(line.iteration, line.why) for line in lines] == [(0, "size"), (1, "size")]
        agent.start()
        assert {(i.iteration, i.stored + i.linked) for i in rank.status().iterations} <= {
            (0, 2),
            (1, 2),
        }
        # A file of the one stands in the tree of the other as well.
        usage = {job.job_id: job for job in rank.status().usage}
        assert 0 < usage["a"].bytes_stored < usage["b"].bytes_stored + 2 * SIZE
        assert (usage["a"].retired_iterations, usage["b"].retired_iterations) == (2, 0)

    def test_files_of_others_are_kept(self, make_agent, send, state):
        """A folder that holds other files keeps them, and its tables."""
        agent = make_agent()
        rank, _ = send(agent, 1)
        agent.stop()
        folder = rank.root / "rank_0" / "Net" / "0" / "0"
        (folder / "notes.txt").write_text("mine")
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            assert some.removed() == [0]
        assert {path.name for path in folder.iterdir()} == {"notes.txt", "statistic.csv"}

    @pytest.mark.parametrize("place", ["rank_0/Net", "rank_0/Net/0", "rank_0/Net/0/0"])
    def test_link_in_place_of_a_folder_is_not_followed(
        self, make_agent, send, state, short_dir, place
    ):
        """The target of the link is kept, whatever its name; everything else is removed."""
        agent = make_agent()
        rank, _ = send(agent, 2)
        agent.stop()
        outside = short_dir / "outside"
        shutil.copytree(rank.root / place, outside)
        before = {path: path.stat() for path in outside.rglob("*")}
        (rank.root / place).rename(short_dir / "moved")
        (rank.root / place).symlink_to(outside)
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            assert some.removed() == [0, 1]
            assert some.keeper.findings() == []
        assert {path: path.stat() for path in outside.rglob("*")} == before
        assert not any((rank.root / "rank_0/.dump_metadata/manifest").iterdir())
        assert (rank.root / place).is_symlink()

    @pytest.mark.parametrize("begun", [False, True])
    def test_link_above_manifests_is_reported(self, make_agent, send, state, short_dir, begun):
        """If the manifests cannot be read, no removal is begun, and one that was begun is not
        completed.
        """
        agent = make_agent()
        rank, _ = send(agent, 1)
        agent.stop()
        if begun:
            policy = ResourcePolicy(1, retain_bytes=1)
            with house(state, policy) as first, pytest.MonkeyPatch.context() as patched:
                patched.setattr(
                    retention, "remove_part", lambda part, *, shared: pytest.fail("no step")
                )
                with pytest.raises(pytest.fail.Exception):
                    first.removed()
        outside = short_dir / "outside"
        shutil.copytree(rank.root / "rank_0", outside)
        (rank.root / "rank_0").rename(short_dir / "moved")
        (rank.root / "rank_0").symlink_to(outside)
        before = {path: path.stat() for path in outside.rglob("*")}
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            assert some.removed() == []
            (said,) = some.keeper.findings()
            assert "a symbolic link is in the place of a folder" in said
        assert {path: path.stat() for path in outside.rglob("*")} == before

    def test_folder_replaced_by_a_link_during_removal_is_not_followed(
        self, make_agent, send, state, short_dir, monkeypatch
    ):
        """The folder is replaced between any two steps."""
        agent = make_agent()
        rank, _ = send(agent, 1)
        agent.stop()
        folder, outside = rank.root / "rank_0/Net/0/0", short_dir / "outside"
        steps_taken = retention.remove_part

        def swapped(part, *, shared):
            for number, step in enumerate(steps_taken(part, shared=shared)):
                if number == 2:
                    shutil.copytree(folder, outside)
                    folder.rename(short_dir / "moved")
                    folder.symlink_to(outside)
                yield step

        monkeypatch.setattr(retention, "remove_part", swapped)
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            assert some.removed() == [0]
        assert {path.name for path in outside.iterdir()} == {"statistic.csv"}

    def test_removal_waits_for_a_repair_of_the_tree(self, make_agent, send, state):
        """A removal that was begun is completed after the repair."""
        agent = make_agent()
        rank, _ = send(agent, 1)
        agent.stop()
        with house(state, ResourcePolicy(1, retain_bytes=1)) as some:
            with (rank.root / ".rankdump/agent.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                assert some.removed() == []
                (said,) = some.keeper.findings()
                assert "is being repaired" in said
            assert some.removed() == [0]
            assert some.keeper.findings() == []

    def test_missing_tree_delays_no_other(self, make_agent, send, state):
        """Iterations of a tree that somebody removed count as removed."""
        agent = make_agent()
        rank, _ = send(agent, 1)
        agent.stop()
        shutil.rmtree(rank.root)
        with house(state, ResourcePolicy(1, retain_s=1), days=1) as some:
            assert some.removed() == [0]

    def test_damaged_manifest_does_not_keep_other_iterations(self, make_agent, send, state):
        """The damage is reported, and the iteration is kept."""
        agent = make_agent()
        rank, _ = send(agent, 2)
        agent.stop()
        folder = rank.root / "rank_0" / ".dump_metadata" / "manifest"
        (path,) = folder.glob("iteration_0.*.json")
        path.chmod(0o600)
        path.write_text(json.dumps({"version": 9}))
        with house(state, ResourcePolicy(1, retain_s=1), days=1) as some:
            assert some.removed() == [1]
            (said,) = some.keeper.findings()
            assert "manifest cannot be read" in said


class TestReadersOfRetiredIterations:
    """Readers do not report removed iterations as missing."""

    @pytest.fixture
    def pair(self, make_agent, send, state, short_dir) -> tuple[Path, Path]:
        """Two dumps of the same three iterations; iterations 0 and 1 of the second are retired."""
        agent = make_agent()
        whole, _ = send(agent, 3, session_id="whole", job_id="whole", root=short_dir / "whole")
        less, _ = send(agent, 3, session_id="less", job_id="less", root=short_dir / "less")
        agent.stop()
        with house(state, ResourcePolicy(1)) as some:
            some.ledger.retention.pin("whole", True)
            kept = some.usage.job_bytes("whole") + SIZE + 128
        with house(state, ResourcePolicy(1, retain_bytes=kept + 2 * SIZE + 128)) as some:
            assert some.removed() == [0, 1]
        return whole.root, less.root

    @pytest.mark.parametrize("swapped", [False, True])
    def test_diff_notes_retired_iterations(self, pair, swapped):
        """The other iterations are compared; those that only one side has are named as retired."""
        a, b = reversed(pair) if swapped else pair
        report = compare(a, b)
        mine, its = ("b", "a") if swapped else ("a", "b")
        assert report.notes == (f"{its} has retired iterations 0, 1 of rank 0, which {mine} has",)
        assert {(row.iteration, row.outcome.verdict) for row in report.rows} == {(2, "same")}

    def test_diff_of_one_iteration_each_notes_the_retired_one(self, pair):
        """Iterations with different numbers are compared only if neither is retired."""
        whole, less = pair
        with pytest.raises(
            CorruptedError,
            match="have no rank and iteration in common; b has retired iteration 1 of rank 0",
        ):
            compare(reader.open(whole).where(iteration=1), reader.open(less))
        assert compare(whole, less, iteration_a=1, iteration_b=2).notes == ()
        with pytest.raises(CorruptedError, match="rank 0: iteration 1 is retired: removed by age"):
            compare(whole, less, iteration=1)

    def test_diff_tolerates_files_removed_meanwhile(self, pair, state, monkeypatch):
        """Files of an iteration that is being removed are not compared."""
        whole, less = pair
        manifests = less / "rank_0/.dump_metadata/manifest"
        (newest,) = manifests.glob("iteration_2.*.json")
        line = RetiredIteration("less", "less", 0, 2, 1, "age").to_line()
        with (less / "rank_0/.dump_metadata/retired.jsonl").open("a") as lines:
            lines.write(f"{line}\n")
        newest.rename(newest.with_name(f".{newest.name}"))
        assert next((less / "rank_0/Net/0/2").glob("*.npy"))
        with pytest.raises(CorruptedError, match="rank 0: iteration 0-2 is retired"):
            compare(whole, less)

    def test_fsck_lists_retired_iterations(self, pair, capsys):
        _, less = pair
        report = check_tree(less, workers=1)
        said = "rank 0: iteration 0-1 is retired: removed by age or to free disk space"
        assert (report.damages, report.unchecked, report.retired) == ((), (), (said,))
        assert run_command_line(["fsck", str(less)]) == 0
        assert said in capsys.readouterr().out
        path = less / "rank_0/.dump_metadata/retired.jsonl"
        path.chmod(0o600)
        path.write_text(path.read_text() + '{"torn"\n')
        (damage,) = check_tree(less, workers=1).damages
        assert (damage.kind.value, damage.path) == ("torn", str(path.relative_to(less)))

    def test_opened_dump_lists_retired_iterations(self, pair):
        dump = reader.open(pair[1])
        assert dump.retired == ((0, 0), (0, 1))
        assert dump.where(iteration="1-2", side="input").retired == ((0, 1),)
        assert dump.where(rank=1).retired == ()


def test_session_below_the_disk_floor_is_warned_at_once(make_agent, make_rank):
    """The warning has the numbers and comes before the first tensor is dropped; the status has it,
    too.
    """
    rank = make_rank(make_agent(keep_free_bytes=1 << 60).address)
    rank.open()
    stream = rank.push()
    stream.wait_warned()
    assert "agent.keep_free_bytes" in stream.warnings[0]
    view = rank.status()
    assert any("tensors are dropped" in sentence for sentence in view.findings)
    (disk,) = view.disks
    assert (disk.floor_bytes, disk.root) == (1 << 60, str(rank.root))
    assert view.memory.limit_bytes > view.memory.used_bytes > 0
    stream.finish()


def test_disks_of_trees_are_known_after_a_restart(make_agent, send):
    """Monitoring does not lose them until the next job begins."""
    agent = make_agent()
    rank, _ = send(agent, 1)
    agent.restart()
    assert rank.status().sessions == []
    assert [disk.root for disk in rank.status().disks] == [str(rank.root)]
    gauges = [
        each for each in agent.agent.samples() if each.name == "rankdump_agent_disk_free_bytes"
    ]
    assert [gauge.labels for gauge in gauges] == [{"root": str(rank.root)}]


@pytest.mark.parametrize(
    ("limit", "reason"), [("disk_bytes", "disk_cap"), ("job_bytes", "job_quota")]
)
def test_job_quota_is_never_exceeded_and_drops_are_counted(
    make_agent, make_rank, frames, limit, reason
):
    """Tensors beyond the quota are dropped for that reason; after a restart the space in use is
    known.
    """
    agent = make_agent(**{limit: 5 * (SIZE + 128)})
    rank = make_rank(agent.address, codec="none")
    rank.open()
    stream = rank.push()
    for number in range(1, 9):
        array = np.full(SIZE, number, np.uint8)
        stream.send(frames.record(number, array))
        stream.wait_acknowledged(number)
        if number == 2:
            stream.finish()
            agent.restart()
            rank.open()
            stream = rank.push()
    stream.send(frames.end(9, 0, 8)).wait_acknowledged(9)
    (found,) = rank.status().iterations
    assert set(found.dropped) == {reason}
    assert 3 <= found.stored <= 5
    assert found.stored + found.dropped[reason] == 8
    assert any(f"agent.{limit}" in sentence for sentence in rank.status().findings)
    stream.finish()

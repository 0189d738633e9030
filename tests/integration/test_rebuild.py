"""Ledger rebuilt from a tree: it equals the old one, and nothing is stored twice."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from support.slab_agents import wait_until

from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._cli.command_group import run_command_line
from rankdump._core.manifest import Manifest, RetiredIteration
from rankdump._core.plan import ContentSettings, DeliverySettings
from rankdump._core.tensor_layout import make_sample_layout
from rankdump._core.tree_session import SESSIONS_FOLDER
from rankdump._wire.message_fields import make_fields
from rankdump._wire.status_messages import view_from_wire
from rankdump.errors import ConfigError, CorruptedError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.rebuild import rebuild_ledger

BIN = {"layout": "mindspore-async", "file_format": "bin"}


def frames_of(frames, iterations: int) -> list:
    """Return two tensors that are equal in every iteration, one that is not, and a drop of the
    rank.
    """
    made, sequence = [], 0
    for iteration in range(iterations):
        for name in "abc":
            sequence += 1
            number = iteration if name == "c" else 0
            array = np.arange(400, dtype=np.float32) + number
            made.append(
                frames.record(sequence, array, iteration=iteration, op_name=f"Default/{name}/X-op0")
            )
        sequence += 1
        made.append(frames.end(sequence, iteration, 4, buffer_full=1))
    return made


def balances(view) -> list:
    return sorted(str(each) for each in view.iterations)


def files(root: Path) -> dict[str, bytes]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def rows(state_dir: Path, query: str) -> list:
    with sqlite3.connect(state_dir / "ledger.sqlite") as base:
        return base.execute(query).fetchall()


@pytest.mark.parametrize("output", [{}, BIN], ids=["npy", "bin"])
def test_rebuilt_ledger_equals_the_old_one(make_agent, make_rank, frames, short_dir, output):
    agent = make_agent()
    rank = make_rank(agent.address, output=output)
    rank.open()
    sent = frames_of(frames, 3)
    rank.push().send(*sent).wait_acknowledged(len(sent))
    old = balances(rank.status())
    tree = files(rank.root)
    agent.stop()
    state = short_dir / "state"
    query = (
        "SELECT sequence, iteration, graph, fate, CASE joined WHEN 0 THEN path ELSE whole END,"
        " bytes_in, bytes_stored, digest, member, shape FROM records"
    )
    before, ends = rows(state, query), rows(state, "SELECT * FROM iterations")
    assert all(end[-1] for end in ends)
    state.rename(short_dir / "lost")
    done = rebuild_ledger(rank.root, state)
    assert dataclasses.astuple(done) == (1, 3, 9)
    assert rows(state, query) == before
    again = rows(state, "SELECT * FROM iterations")
    # When it ended a tree does not say, but when its last tensor came.
    assert [end[:-1] for end in again] == [end[:-1] for end in ends]
    assert all(0 < new[-1] <= old[-1] for new, old in zip(again, ends, strict=True))
    agent.start()
    assert rank.open().acknowledged_sequence == len(sent)
    assert balances(rank.status()) == old
    # From its first frame again, and on.
    more = frames_of(frames, 4)
    rank.push().send(*more).wait_acknowledged(len(more))
    assert balances(rank.status())[:3] == old
    now = files(rank.root)
    # A session that opens again changes its file, an iteration that ends again adds a line.
    kept = {path for path in tree if "global_execution" not in path and SESSIONS_FOLDER not in path}
    assert {path: now[path] for path in kept} == {path: tree[path] for path in kept}
    assert check_tree(rank.root, workers=1).damages == ()
    assert rows(state, "SELECT COUNT(*) FROM records") == [(12,)]


def test_records_without_manifest_are_resent_and_stored_once(
    make_agent, make_rank, frames, short_dir
):
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    sent = frames_of(frames, 2)
    rank.push().send(*sent[:-2]).wait_acknowledged(len(sent) - 2)
    agent.stop()
    shutil.rmtree(short_dir / "state")
    assert dataclasses.astuple(rebuild_ledger(rank.root, short_dir / "state")) == (1, 1, 3)
    agent.start()
    assert rank.open().acknowledged_sequence == 4
    rank.push().send(*sent).wait_acknowledged(len(sent))
    assert [each.is_balanced for each in view_from_wire(rank.status()).iterations] == [True, True]
    assert check_tree(rank.root, workers=1).damages == ()


def test_rebuild_of_statistics_rows_and_old_manifests(make_agent, make_rank, frames, short_dir):
    """There are more tensors than frames, and older manifests without a session."""
    agent = make_agent()
    rank = make_rank(agent.address, content=ContentSettings("statistic", ("max",)))
    rank.open()
    array = np.ones(3, np.float32)
    some = frames.figures(1, [(array, "1")] * 5)
    rank.push().send(some, frames.end(2, 0, 5)).wait_acknowledged(2)
    agent.stop()
    assert dataclasses.astuple(rebuild_ledger(rank.root, short_dir / "one")) == (1, 1, 5)
    ledger = AgentLedger(short_dir / "one")
    assert sum(row.records for row in ledger.counts("session0000")) == 5
    assert ledger.committed_beyond("session0000", 2) == []
    ledger.close()
    (path,) = rank.root.rglob("iteration_0.*.json")
    path.chmod(0o600)
    older = dataclasses.replace(Manifest.from_json(path.read_bytes()), session=None)
    path.write_bytes(older.to_json())
    assert dataclasses.astuple(rebuild_ledger(rank.root, short_dir / "two")) == (1, 1, 5)
    agent.start()
    assert not rows(short_dir / "two", "SELECT 1 FROM sessions WHERE state <> 'closed'")


def test_reasons_of_degraded_tensors_outlive_the_ledger(make_agent, make_rank, frames, short_dir):
    """Status, metrics, manifest and a rebuilt ledger know what was kept, and why not more."""
    agent = make_agent()
    rank = make_rank(
        agent.address,
        delivery=DeliverySettings(on_full="statistic", max_step_overhead=0.1),
        content=ContentSettings(statistics=("max",)),
    )
    rank.open()
    array = np.arange(6, dtype=np.float32)
    layout = agent_pb2.TensorLayout(**make_fields(make_sample_layout((4, 3), 6)))
    sent = [
        frames.record(1, array),
        frames.record(2, array, layout=layout),
        frames.figures(3, [(array, "5")] * 3, degraded="step_overhead"),
        frames.figures(4, [(array, "5")], degraded="buffer_full", stamps=[1_700_000_000_000_009]),
    ]
    rank.push().send(*sent, frames.end(5, 0, 6)).wait_acknowledged(5)
    (old,) = view_from_wire(rank.status()).iterations
    assert (old.stored, old.linked, old.degraded, old.is_balanced) == (1, 0, 5, True)
    assert old.degraded_by == {"step_overhead": 4, "buffer_full": 1}
    name = "rankdump_agent_degraded_records_total"
    counted = {
        each.labels["reason"]: each.value
        for each in agent.counters.samples()
        if each.name == name and each.value
    }
    assert counted == old.degraded_by
    (path,) = rank.root.rglob("iteration_0.*.json")
    manifest = Manifest.from_json(path.read_bytes())
    assert manifest.status.degraded_by == old.degraded_by
    texts = [str(each.layout) for each in manifest.records if each.path and each.layout]
    assert texts == ["only the first 6 elements of [4, 3]"]
    agent.stop()
    state = short_dir / "state"
    state.rename(short_dir / "lost")
    rebuild_ledger(rank.root, state)
    agent.start()
    assert rank.open().acknowledged_sequence == 5
    (again,) = view_from_wire(rank.status()).iterations
    assert (again.degraded, again.degraded_by) == (old.degraded, old.degraded_by)


def npys(rank) -> list[Path]:
    return list(rank.root.rglob("*.npy*"))


def retired_of(rank) -> list[int]:
    return [job.retired_iterations for job in rank.status().usage]


def test_rebuild_keeps_retired_iterations_retired(make_agent, make_rank, frames, short_dir):
    """The status has them as before, and no removal is repeated."""
    agent = make_agent(retain_bytes=1)
    rank = make_rank(agent.address)
    rank.open()
    sent = frames_of(frames, 3)
    rank.push().send(*sent).wait_acknowledged(len(sent))
    while agent.agent._retention.remove_due():
        pass
    assert retired_of(rank) == [2]
    query = "SELECT session_id, iteration, began_us, done FROM retired"
    before = rows(short_dir / "state", query)
    agent.stop()
    shutil.rmtree(short_dir / "state")
    assert dataclasses.astuple(rebuild_ledger(rank.root, short_dir / "state")) == (1, 1, 3)
    assert rows(short_dir / "state", query) == before
    taken = sum(path.stat().st_size for path in {p.stat().st_ino: p for p in npys(rank)}.values())
    again = make_agent()
    assert retired_of(rank) == [2]
    assert rank.status().usage[0].bytes_stored == taken
    assert again.agent._ledger.retention.unfinished() == []


def test_rebuild_completes_an_interrupted_removal(make_agent, make_rank, frames, short_dir):
    """The hidden manifest lists the remaining files, also for a session that has no other
    iteration.
    """
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    sent = frames_of(frames, 1)
    rank.push().send(*sent).wait_acknowledged(len(sent))
    agent.stop()
    shutil.rmtree(short_dir / "state")
    (manifest,) = rank.root.rglob("iteration_0.*.json")
    manifest.rename(manifest.with_name(f".{manifest.name}"))
    lines = [
        RetiredIteration("job", "session0000", 0, 0, 7, "age"),
        RetiredIteration("job", "older", 0, 5, 6, "age"),
    ]
    text = "".join(f"{line.to_line()}\n" for line in (lines[0], *lines))
    (rank.root / "rank_0/.dump_metadata/retired.jsonl").write_text(text + '{"torn')
    assert dataclasses.astuple(rebuild_ledger(rank.root, short_dir / "state")) == (2, 0, 0)
    query = "SELECT session_id, iteration, done FROM retired ORDER BY session_id"
    assert rows(short_dir / "state", query) == [("older", 5, 1), ("session0000", 0, 0)]
    assert npys(rank)
    agent.start()
    wait_until(lambda: agent.agent._ledger.retention.counts() == {"job": 2})
    assert npys(rank) == []
    assert check_tree(rank.root, workers=1).damages == ()


def test_rebuild_rejects_unsuitable_folders(make_agent, make_rank, frames, short_dir, capfd):
    agent = make_agent()
    rank = make_rank(agent.address)
    rank.open()
    sent = frames_of(frames, 1)
    rank.push().send(*sent).wait_acknowledged(len(sent))
    with pytest.raises(ConfigError, match="without a ledger"):
        rebuild_ledger(rank.root, short_dir / "state")
    again = ["fsck", "--rebuild", "--state-dir", f"{short_dir}/new", str(rank.root)]
    assert run_command_line(again) == 0
    assert "ledger of 1 sessions, 1 iterations, 3 tensors" in capfd.readouterr().err
    assert run_command_line(again) == 2
    (manifest,) = rank.root.rglob("iteration_0.*.json")
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CorruptedError, match="cannot be read"):
        rebuild_ledger(rank.root, short_dir / "other")
    assert not (short_dir / "other/ledger.sqlite").exists()


def test_rebuild_of_folder_without_manifests_leaves_nothing(tmp_path: Path):
    """It would leave a ledger that blocks the call with the right folder."""
    (tmp_path / "tree" / "rank_0").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^TREE: .*tree' is not allowed; .*with manifests"):
        rebuild_ledger(tmp_path / "tree", tmp_path / "state")
    assert not (tmp_path / "state").exists()

"""Black boxes of an agent: rings, freezes, and the trees that come of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from support.black_box_rings import (
    KINDS,
    WIRE_KINDS,
    make_fault_message,
    make_step,
    make_step_message,
    make_tensors,
    read_tree_record,
)
from support.command_line import run_in_process
from support.worker_host import WorkerHost

import rankdump
from rankdump._analysis.black_box.fault_report import make_fault_report
from rankdump._analysis.black_box.freeze_files import read_freeze_records
from rankdump._cli.command_group import run_command_line
from rankdump._core.black_box import compute_tensor_bytes
from rankdump._core.plan import BlackBoxSettings
from rankdump._core.status import SessionState
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox import freeze_decision
from rankdumpd.agent.blackbox.step_ring import compute_step_bytes
from rankdumpd.agent.session.rank_session import MAX_RUNNING_NOTES

SETTINGS = BlackBoxSettings(steps=8, post_steps=1)
DEADLINE_S = 120


def begin(make_rank, address: str, rank: int = 0, **fields):
    """Open a session of a rank of two, and connect its stream."""
    named = {"session_id": f"session-{rank}", "rank": rank, "world_size": 2, "black_box": SETTINGS}
    opened = make_rank(address, **(named | fields))
    opened.open()
    return opened, opened.push()


def wait_until(holds) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s, "the agent does not get there"
        time.sleep(0.02)


def wait_trees(rank, count: int = 1) -> list[Path]:
    """Wait until the agent has written as many frozen trees; return them."""
    roots: list[Path] = []

    def find() -> bool:
        roots[:] = [Path(each.root) for each in rank.status().black_box.freezes if each.root]
        return len(roots) >= count

    wait_until(find)
    return roots


def wait_steps(rank, count: int) -> None:
    wait_until(lambda: rank.status().black_box.steps == count)


def check_tensors(tree: Path, iteration: int) -> None:
    """The tensors of rank 0 in full are in the tree, bit by bit."""
    dump = rankdump.open(tree)
    found = {entry.key.side: entry for entry in dump.where(rank=0, iteration=iteration).tensors()}
    for tensor in make_tensors(iteration):
        assert dump.load(found.pop(tensor.kind.side)).tobytes() == tensor.data
    assert not found


def test_fault_of_a_rank_freezes_all_ranks(make_agent, make_rank, short_dir):
    agent = make_agent()
    (first, stream), (_, other) = (begin(make_rank, agent.address, rank) for rank in range(2))
    for iteration in range(3):
        stream.step(make_step_message(iteration, nans=4 * (iteration == 2)))
        other.step(make_step_message(iteration))
    wait_steps(first, 6)
    stream.fault(make_fault_message(2))
    stream.wait_frozen()
    other.wait_frozen()
    assert (other.notices[0].iteration, other.notices[0].wants_stacks) == (2, False)
    for each in (stream, other):
        each.step(make_step_message(3))
    [tree] = wait_trees(first)
    assert tree == short_dir / "dump/blackbox/2"
    record = read_tree_record(tree)
    assert [[step.iteration for step in rank.steps] for rank in record.ranks] == [[0, 1, 2, 3]] * 2
    [cause] = record.causes
    assert (cause.rank, cause.op_name, cause.source) == (0, KINDS[1].op_name, "train.py:7")
    bad = record.ranks[0].steps[2]
    assert (bad.numbers["loss"], bad.gradient_norm, bad.nonfinite) == ("nan", "2.0", 1)
    assert len(rankdump.open(tree).where(iteration=2, rank=0).table().column("rank")) == 3
    assert not list((short_dir / "state/blackbox").glob("*.freeze"))
    assert first.status().black_box.steps == 0
    stream.wait_warned()
    assert str(tree) in stream.warnings[0]
    stream.finish()
    other.finish()


def test_frozen_tree_is_an_ordinary_tree(make_agent, make_rank, short_dir, capsys):
    agent = make_agent()
    rank, stream = begin(make_rank, agent.address, world_size=1)
    stream.step(make_step_message(0)).step(make_step_message(1, nans=1))
    stream.fault(make_fault_message(1)).step(make_step_message(2))
    [tree] = wait_trees(rank)
    stream.finish()
    for command in ("ls", "stats", "status", "fsck", "index"):
        assert run_command_line([command, str(tree)]) == 0, (command, capsys.readouterr())
    outer = short_dir / "dump"
    assert run_command_line(["ls", str(outer)]) == 0
    assert run_command_line(["status", str(outer)]) == 0
    assert f"rankdump faults {tree}" in capsys.readouterr().out
    sql = "select count(*) from tensors where nan_count > 0"
    assert run_command_line(["query", str(tree), sql, "--csv"]) == 0
    assert capsys.readouterr().out.split()[-1] == "1"
    assert run_command_line(["faults", str(outer)]) == 0
    report = capsys.readouterr().out
    assert "first value that is not finite: rank 0, iteration 1: output 0 of b/Linear-op0" in report
    assert "clean before it on that rank in that iteration: 1 tensor\n  train.py:7" in report


def test_later_causes_are_appended(make_agent, make_rank):
    agent = make_agent()
    (first, stream), (_, other) = (begin(make_rank, agent.address, rank) for rank in range(2))
    for each in (stream, other):
        each.step(make_step_message(0))
    wait_steps(first, 2)
    stream.fault(make_fault_message(0))
    stream.wait_frozen()
    other.fault(make_fault_message(0, "exception"))
    answer = first.freeze("somebody looks", job_id="job")
    [tree] = wait_trees(first)
    assert list(answer.trees) == [str(tree)]
    assert "under way" in answer.notes[0]
    causes = read_tree_record(tree).causes
    kinds = [(cause.kind.value, cause.rank) for cause in causes]
    assert kinds[0] == ("non_finite", 0)
    # The later ones came on two connections.
    assert sorted(kinds[1:], key=str) == [("exception", 1), ("request", None)]
    stream.step(make_step_message(1))
    wait_steps(first, 1)
    with pytest.raises(grpc.RpcError, match=r"not frozen: it was frozen .* \(blackbox.pause_s\)"):
        first.freeze()
    stream.finish()
    other.finish()


def test_request_that_freezes_nothing_says_why(make_agent, make_rank, short_dir):
    agent = make_agent()
    rank, stream = begin(make_rank, agent.address, black_box=BlackBoxSettings(8, post_steps=0))

    def refuse(*words: str) -> str:
        """Return the line of `rankdump freeze`."""
        done = run_in_process("freeze", *words, "--agent", agent.address)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        return done.stderr

    assert "no rank of job 'other' is known here" in refuse("other")
    assert "the ranks of job 'job' have sent no step yet" in refuse("job")
    _, bare_stream = begin(
        make_rank, agent.address, session_id="b", job_id="bare", black_box=BlackBoxSettings()
    )
    assert "job 'bare' has no black box: the setting rankdump.blackbox of its" in refuse("bare")
    _, small_stream = begin(
        make_rank,
        agent.address,
        session_id="s",
        job_id="small",
        black_box=BlackBoxSettings(8, max_bytes=500),
    )
    small_stream.step(make_step_message(0))
    stream.step(make_step_message(0))
    wait_steps(rank, 2)
    allowed = "and 500 B are allowed (blackbox.max_bytes): remove some of them, or allow more"
    assert allowed in refuse("small")
    assert "several jobs have a black box here, name one of them: job, small" in refuse()
    assert run_in_process("freeze", "job", "--agent", agent.address).returncode == 0
    stream.step(make_step_message(1))
    wait_steps(rank, 2)
    again = refuse("job")
    assert f" s ago at iteration 0: {short_dir}/dump/blackbox/0; the next freeze is " in again
    assert " s (blackbox.pause_s)" in again
    for each in (stream, bare_stream, small_stream):
        each.finish()


def test_command_freezes_the_job_of_every_worker(short_dir, make_rank, capsys):
    host = WorkerHost(short_dir, 2, KEEP_FREE_RATIO="0", TABLE="false")
    try:
        streams = [begin_at_worker(make_rank, host.address, rank) for rank in range(2)]
        for stream in streams:
            stream.step(make_step_message(3))
        wait_until(lambda: host.view().black_box.steps == 2)
        for stream in streams:
            stream.step(make_step_message(4))
        wait_until(lambda: host.view().black_box.steps == 4)
        assert run_command_line(["freeze", "job", "--agent", host.address, "--reason", "odd"]) == 0
        tree = short_dir / "dump/blackbox/4"
        assert capsys.readouterr().out == f"frozen tree: {tree}\n"
        assert len(list(tree.glob(".rankdump/black_box.*.json"))) == 2
        report = make_fault_report(str(tree), read_freeze_records(tree))
        assert (report.cause.text, [each.rank for each in report.ends]) == ("odd", [0, 1])
        assert report.absent == ()
        assert run_command_line(["freeze", "other", "--agent", host.address]) == 1
        refused = capsys.readouterr().err
        assert "no rank of job 'other' is known here" in refused
        assert refused.count("\n") == 1
        for stream in streams:
            stream.finish()
    finally:
        host.close()


def begin_at_worker(make_rank, address: str, rank: int):
    """Open a session of a rank at the worker that the supervisor names."""
    own = {"session_id": f"session-{rank}", "rank": rank, "world_size": 2, "black_box": SETTINGS}
    redirect = make_rank(address, **own).open().redirect
    return begin(make_rank, f"{address.rpartition('/')[0]}/{redirect}", rank)[1]


def test_notes_of_watch_rules_are_in_the_status_of_a_running_job(make_agent, make_rank, frames):
    """The first of each rule and tensor; the end of the session has its own."""
    agent = make_agent()
    rank, stream = begin(make_rank, agent.address, world_size=1)
    watched = "rankdump.blackbox.watch[0] (zero): all elements are zero"
    for iteration in range(4):
        notes = [f"{watched} (output 0 of layer{at})" for at in range(iteration)]
        stream.step(make_step_message(iteration, notes=tuple(notes)))
    wait_steps(rank, 4)
    (session,) = rank.status().sessions
    assert list(session.notes) == [
        f"iteration {at + 1}: {watched} (output 0 of layer{at})" for at in range(3)
    ]
    shown = run_in_process("status", "--agent", agent.address).stdout
    assert f"rank 0: iteration 1: {watched} (output 0 of layer0)\n" in shown
    stream.step(make_step_message(9, notes=[f"{watched} (output 0 of l{at})" for at in range(50)]))
    wait_steps(rank, 5)
    assert len(rank.status().sessions[0].notes) == MAX_RUNNING_NOTES
    assert stream.send(frames.goodbye(1)).finish() is grpc.StatusCode.OK
    assert list(rank.status().sessions[0].notes) == []


def test_killed_rank_freezes_its_job(make_agent, make_rank):
    agent = make_agent()
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    about = {"pid": victim.pid, "host": os.uname().nodename}
    (_, stream), (other, other_stream) = (
        begin(make_rank, agent.address, rank, **(about if rank == 0 else {})) for rank in range(2)
    )
    for each in (stream, other_stream):
        each.step(make_step_message(4))
    # Also of a step that it does not end, and without the end of another tensor.
    stream.step(make_step_message(5, nans=1, unfinished=True)).step_tensors(*make_tensors(5))
    half = agent_pb2.StepTensor(iteration=5, tensor_kind=WIRE_KINDS[0], data=b"1234")
    stream.step_pieces(half)
    sizes = compute_tensor_bytes(16) + compute_tensor_bytes(24) + 4
    steps = map(compute_step_bytes, (make_step(4), make_step(4), make_step(5, nans=1)))
    sizes += sum(steps) + 2 * sum(map(len, WIRE_KINDS))
    wait_until(lambda: other.status().black_box.step_bytes == sizes)
    victim.kill()
    victim.communicate()
    stream.cut()
    other_stream.wait_frozen()
    assert other_stream.notices[0].wants_stacks
    other_stream.step(make_step_message(5, unfinished=True, stacks=("waits in all_reduce",)))
    [tree] = wait_trees(other)
    record = read_tree_record(tree)
    assert record.causes[0].kind.value == "lost_rank"
    assert [rank.state for rank in record.ranks] == [SessionState.LOST, SessionState.OPEN]
    assert [step.full_tensors for step in record.ranks[0].steps] == [0, 2]
    assert [rank.dropped_tensors for rank in record.ranks] == [1, 0]
    check_tensors(tree, 5)
    assert record.ranks[1].steps[-1].stacks == ("waits in all_reduce",)
    assert record.ranks[1].steps[-1].unfinished
    other_stream.finish()


def test_rank_without_a_step_freezes_its_job(make_agent, make_rank, monkeypatch):
    monkeypatch.setattr(freeze_decision, "MIN_SILENCE_S", 0.5)
    monkeypatch.setattr(freeze_decision, "MIN_WAIT_S", 0.1)
    agent = make_agent()
    rank, stream = begin(make_rank, agent.address, world_size=1)
    for iteration in range(12):
        stream.step(make_step_message(iteration))
    [tree] = wait_trees(rank)
    record = read_tree_record(tree)
    assert record.causes[0].kind.value == "no_step"
    assert [step.iteration for step in record.ranks[0].steps] == [*range(4, 12)]
    stream.finish()


@pytest.mark.parametrize(
    "message",
    [
        {"step_states": agent_pb2.StepStates(states=[agent_pb2.StepState(rows=b"1")])},
        {"step_states": agent_pb2.StepStates(states=[agent_pb2.StepState(first_kind=3)])},
        {"step_tensors": agent_pb2.StepTensors(pieces=[agent_pb2.StepTensor(begin=3)])},
        {"fault": agent_pb2.FaultNotice(kind="odd")},
        {"fault": agent_pb2.FaultNotice(kind="jump", tensor_kind=b"\xff")},
    ],
)
def test_hostile_message_ends_its_stream_alone(make_agent, make_rank, message):
    agent = make_agent()
    rank, stream = begin(make_rank, agent.address, world_size=1)
    stream._requests.put(agent_pb2.PushRequest(**message))
    assert stream.wait_over() is grpc.StatusCode.INVALID_ARGUMENT
    again = rank.open() and rank.push()
    again.step(make_step_message(0))
    wait_steps(rank, 1)
    again.finish()


def test_killed_agent_writes_the_tree_after_its_restart(make_daemon, make_rank, short_dir):
    daemon = make_daemon()
    _, stream = begin(make_rank, daemon.address)
    stream.step(make_step_message(0)).step(make_step_message(1, nans=2))
    stream.step_tensors(*make_tensors(1)).fault(make_fault_message(1))
    # It waits for a step of iteration 2, and for the other rank.
    stream.wait_frozen()
    daemon.kill()
    stream.wait_over()
    assert not (short_dir / "dump/blackbox").exists()
    daemon.start()
    tree = short_dir / "dump/blackbox/1"
    wait_until(lambda: list(tree.glob(".rankdump/black_box.*.json")))
    record = read_tree_record(tree)
    assert [step.iteration for step in record.ranks[0].steps] == [0, 1]
    assert record.causes[0].text == "NaN in an output"
    check_tensors(tree, 1)
    assert run_command_line(["fsck", str(tree)]) == 0
    wait_until(lambda: not list((short_dir / "state").rglob("*.freeze")))


def test_stopped_agent_completes_its_freezes(make_daemon, make_rank, short_dir):
    daemon = make_daemon()
    rank, stream = begin(make_rank, daemon.address)
    stream.step(make_step_message(0))
    wait_steps(rank, 1)
    stream.fault(make_fault_message(0))
    stream.wait_frozen()
    daemon.terminate()
    stream.wait_draining()
    stream.finish()
    assert daemon.exit_status() == 0
    assert read_tree_record(short_dir / "dump/blackbox/0").ranks[0].held_steps == 1

"""API dumps written by an agent: each tensor, line and stack once."""

from __future__ import annotations

import json
import math
import sqlite3
import stat
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump import reader
from rankdump._core.manifest import Manifest
from rankdump._core.plan import ContentSettings
from rankdump._layout.api_files import parse_stack_key
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.ledger.agent_ledger import AgentLedger

IN, OUT = agent_pb2.SIDE_INPUT, agent_pb2.SIDE_OUTPUT
ITEMS = ("max", "min", "avg")
LINES = (
    "File net.py, line 3, in forward, \n y = f(x)",
    "File run.py, line 9, in <module>, \n n(x)",
)
OUTPUT = {"layout": "api-torch", "file_mode": 0o400, "folder_mode": 0o700}
X = np.arange(6, dtype=np.float32).reshape(2, 3) / 3


def stacks(sequence: int, *names: str, iteration: int = 0) -> agent_pb2.Frame:
    body = agent_pb2.CallStacks(
        iteration=iteration,
        calls=names,
        stacks=[0] * len(names),
        texts=[agent_pb2.CallStack(lines=LINES)],
    )
    return agent_pb2.Frame(sequence=sequence, call_stacks=body)


@pytest.fixture
def record(frames):
    """Makes a tensor of an API call."""

    def make(sequence: int, name: str, array=X, *, argument: str = "input.0", **fields):
        return frames.record(
            sequence, array, op_name=name, op_type="T", argument=argument, **fields
        )

    return make


def info(root: Path, name: str = "torch_api_dump_info.pkl") -> list[list]:
    text = (root / "rank0" / name).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def called(root: Path) -> list[str]:
    pairs = json.loads(
        (root / "rank0/torch_api_dump_stack.json").read_text(), object_pairs_hook=list
    )
    assert all(tuple(lines) == LINES for _, lines in pairs)
    return [parse_stack_key(key) for key, _ in pairs]


def test_step_is_written_as_troubleshooter_writes_it(make_agent, make_rank, record, frames):
    """Names, modes, lines and stacks agree; only manifests and a session file are added."""
    rank = make_rank(
        make_agent().address, codec="none", content=ContentSettings("full", ITEMS), output=OUTPUT
    )
    rank.open()
    a, b = "NN_Linear_0_forward", "Tensor___add___0_forward"
    stream = rank.push().send(
        stacks(1, a, b),
        record(2, a),
        record(3, a, np.array(7), argument="input.1:int"),
        record(4, a, X * 3, argument="output.1.0:recompute", side=OUT),
        record(5, b, np.array([True]), argument="input.other"),
        frames.end(6, 0, 4),
        record(7, "NN_Linear_1_forward", iteration=3),
        frames.end(8, 3, 1),
        frames.goodbye(9, 2),
    )
    stream.wait_acknowledged(9)
    root = rank.root
    figures = [1.6666666269302368, 0.0, 0.8333333134651184]
    assert info(root)[0] == [f"{a}_input.0", 0, [], "torch.float32", [2, 3], figures]
    assert [line[0] for line in info(root)] == [
        f"{a}_input.0",
        f"{a}_input.1",
        f"{a}_output.1.0",
        f"{b}_input.other",
        "NN_Linear_1_forward_input.0",
    ]
    assert info(root)[1][3:] == ["<class 'int'>", [], [7, 7, 7]]
    assert [line[1:3] for line in info(root)[2:]] == [[0, ["recompute"]], [0, []], [3, []]]
    assert called(root) == [a, b]
    # The file of the session is written again after the goodbye: hidden, then renamed.
    whole = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    files = {path.relative_to(root).as_posix() for path in whole}
    manifests = {name for name in files if "/.dump_metadata/manifest/" in name}
    assert len(manifests) == 2
    sessions = {name for name in files if name.startswith(".rankdump/sessions/rank_0.")}
    assert len(sessions) == 1
    files.remove(".rankdump/agent.lock")
    assert files - manifests - sessions == {
        "rank0/torch_api_dump_info.pkl",
        "rank0/torch_api_dump_stack.json",
        *(f"rank0/torch_api_dump/{line[0]}.npy" for line in info(root)),
    }
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in files - manifests}
    assert set(modes.values()) == {0o400, 0o600}
    assert modes[f"rank0/torch_api_dump/{a}_input.0.npy"] == 0o400
    assert {stat.S_IMODE(p.stat().st_mode) for p in root.rglob("*") if p.is_dir()} == {0o700}
    loaded = np.load(root / f"rank0/torch_api_dump/{a}_output.1.0.npy", allow_pickle=False)
    np.testing.assert_array_equal(loaded, X * 3)


def test_tree_with_manifests_is_read_with_their_facts(make_agent, make_rank, record, frames):
    """Readers give iterations, raw names, digests and source lines as the manifests have them."""
    rank = make_rank(make_agent().address, content=ContentSettings("full", ITEMS), output=OUTPUT)
    rank.open()
    name = "NN_Linear_0_forward"
    rank.push().send(
        stacks(1, name, iteration=4),
        record(2, name, np.zeros((100, 100), dtype=np.float32), iteration=4),
        record(3, name, argument="output:recompute", side=OUT, iteration=4),
        frames.end(4, 4, 2),
    ).wait_acknowledged(4)
    dump = reader.open(rank.root)
    assert (dump.ranks, dump.iterations, dump.operators) == ((0,), (4,), (name,))
    assert dump.problems == ()
    first, second = dump.tensors()
    assert first.codec == "zstd"
    assert (first.key.argument, second.key.argument) == ("input.0", "output")
    assert second.record is not None
    assert second.record.argument == "output:recompute"
    assert second.record.digest
    np.testing.assert_array_equal(dump.load(second), X)
    rows = dump.statistics()
    assert [row.key for row in rows] == [first.key, second.key]
    assert rows[1].number("max") == float(X.max())
    assert [frame.line for frame in dump.sources[name]] == [9, 3]
    assert dump.sources["NN_Linear_0_backward"] == dump.sources[name]


def test_dump_of_stacks_has_lines_without_statistics(make_agent, make_rank, frames):
    """The lines have names, types and shapes; no element is read."""
    content = ContentSettings("statistic", ())
    rank = make_rank(make_agent().address, content=content, output=OUTPUT)
    rank.open()
    fields = {"op_name": "Torch_fft_0_forward", "op_type": "T", "argument": "input.0"}
    rank.push().send(
        frames.figures(1, [(X, ""), (X.astype(np.complex64), "")], **fields), frames.end(2, 0, 2)
    ).wait_acknowledged(2)
    assert [line[3:5] for line in info(rank.root)] == [
        ["torch.float32", [2, 3]],
        ["torch.complex64", [2, 3]],
    ]
    assert all(math.isnan(value) for line in info(rank.root) for value in line[5])
    (status,) = rank.status().iterations
    assert (status.expected, status.stored) == (2, 2)


def test_second_tensor_of_one_name_is_dropped(make_agent, make_rank, record, frames):
    """The first tensor is kept and the second counted; a resent tensor is not a second one."""
    rank = make_rank(make_agent().address, content=ContentSettings("full", ITEMS), output=OUTPUT)
    rank.open()
    name = "LAYER_fc_forward"
    rank.push().send(
        record(1, name, argument="input"),
        record(2, name, argument="input"),
        record(3, name, X + 1, argument="input"),
        frames.end(4, 0, 3),
    ).wait_acknowledged(4)
    (status,) = rank.status().iterations
    assert (status.stored, dict(status.dropped)) == (2, {"name_taken": 1})
    (path,) = (rank.root / "rank0/torch_api_dump").iterdir()
    np.testing.assert_array_equal(reader.load_file(path), X)
    assert len(info(rank.root)) == 2


def test_crash_between_write_and_commit_duplicates_nothing(
    make_agent, make_rank, record, frames, monkeypatch
):
    """The next agent does not repeat lines that were written but not committed."""
    agent = make_agent()
    rank = make_rank(agent.address, content=ContentSettings("full", ITEMS), output=OUTPUT)
    rank.open()
    names = [f"Torch_matmul_{number}_forward" for number in range(3)]
    sent = [
        stacks(1, "LAYER_a.b_forward", *names),
        *(record(2 + n, name) for n, name in enumerate(names)),
        frames.end(5, 0, 3),
    ]

    def forget(*args, **fields) -> None:
        raise sqlite3.OperationalError("failing on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(AgentLedger, "mark_applied", forget)
        patch.setattr(AgentLedger, "enter_iteration_end", forget)
        rank.push().send(*sent).wait_acknowledged(5)
    agent.restart()
    rank.open()
    more = "Torch_matmul_3_forward"
    rank.push().send(
        stacks(6, "LAYER_a.b_forward", more, iteration=1),
        record(7, more, iteration=1),
        frames.end(8, 1, 1),
    ).wait_acknowledged(8)
    assert [line[0] for line in info(rank.root)] == [f"{name}_input.0" for name in (*names, more)]
    assert called(rank.root) == ["LAYER_a_b_forward", *names, more]
    for path in (rank.root / "rank0/.dump_metadata/manifest").iterdir():
        Manifest.from_json(path.read_bytes())


@pytest.mark.parametrize(
    ("stack", "sentence"),
    [
        (agent_pb2.CallStacks(calls=["a"], stacks=[]), "1 calls and 0 stacks"),
        (agent_pb2.CallStacks(calls=["a"], stacks=[0]), "stack 0 of 0"),
        (agent_pb2.CallStacks(calls=["a"] * 1025, stacks=[0] * 1025), "at most 1024"),
        (
            agent_pb2.CallStacks(calls=["a" * 70_000], stacks=[0], texts=[agent_pb2.CallStack()]),
            "70000 characters",
        ),
        (agent_pb2.CallStacks(iteration=1 << 63), "the number"),
    ],
)
def test_hostile_stacks_are_rejected(make_agent, make_rank, stack, sentence):
    """The error is one sentence."""
    rank = make_rank(make_agent().address, content=ContentSettings("full", ITEMS), output=OUTPUT)
    rank.open()
    stream = rank.push().send(agent_pb2.Frame(sequence=1, call_stacks=stack))
    stream.wait_over()
    assert sentence in stream.details


def test_plan_without_info_lines_is_rejected(make_agent, make_rank):
    """An info file has a line for every tensor, so a plan without statistics cannot be executed."""
    rank = make_rank(make_agent().address, content=ContentSettings("tensor"), output=OUTPUT)
    with pytest.raises(grpc.RpcError, match="does not support saved_data 'tensor'"):
        rank.open()

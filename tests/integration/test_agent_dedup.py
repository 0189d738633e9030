"""Agent and identical tensors: each is written once, the others are hard links."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankdump import reader
from rankdump._core.plan import ContentSettings
from rankdump._core.record import TensorSide
from rankdump.wire.v1 import agent_pb2

NAMES = [f"Default/layer{number}-Dense/MatMul-op{number}" for number in range(4)]
ACTIVATIONS = [np.arange(n, n + 4096, dtype=np.float32) for n in range(5)]
WEIGHTS = [np.full((64, 64), n, dtype=np.float32) for n in range(4)]
NOISE = np.random.default_rng(4).integers(0, 256, 1 << 17, dtype=np.uint8)


def step(frames, first: int, iteration: int = 0, *, constant: float = 0) -> list[agent_pb2.Frame]:
    """Return a forward pass: each layer reads the output of the layer before it, and its weight."""
    sent: list[agent_pb2.Frame] = []
    for number, name in enumerate(NAMES):
        for side, slot, array in (
            (agent_pb2.SIDE_INPUT, 0, ACTIVATIONS[number] + constant),
            (agent_pb2.SIDE_INPUT, 1, WEIGHTS[number]),
            (agent_pb2.SIDE_OUTPUT, 0, ACTIVATIONS[number + 1] + constant),
        ):
            sequence = first + len(sent)
            sent.append(
                frames.record(
                    sequence, array, iteration=iteration, op_name=name, side=side, slot=slot
                )
            )
    sent.append(frames.end(first + len(sent), iteration, len(sent)))
    return sent


def check(root: Path, *, constants: dict[int, float]) -> reader.Tree:
    """Check that every tensor reads as it was sent, and that manifests, disk and balances agree."""
    tree = reader.walk(root)
    assert not tree.problems
    for entry in tree.entries:
        layer = int(entry.op_name[-1])
        constant = constants[entry.key.iteration]
        expected = (
            WEIGHTS[layer]
            if entry.key.slot
            else ACTIVATIONS[layer + (entry.key.side is TensorSide.OUTPUT)] + constant
        )
        loaded = reader.load(entry)
        assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
        assert loaded.tobytes() == expected.tobytes()
    for manifest in tree.manifests:
        status = manifest.status
        assert status.expected == status.stored + status.linked
    sizes = {entry.path.stat().st_ino: entry.stored_bytes for entry in tree.entries}
    assert sum(entry.taken_bytes for entry in tree.entries) == sum(sizes.values())
    # A session's file is written by a thread of its own.
    assert not [path for path in root.rglob(".*.tmp") if path.parent.name != "sessions"]
    return tree


def inodes(tree: reader.Tree) -> int:
    return len({entry.path.stat().st_ino for entry in tree.entries})


@pytest.fixture
def rank(make_agent, make_rank):
    """A rank connected to a running agent."""
    return make_rank(make_agent().address)


def test_equal_inputs_and_unchanged_weights_are_linked(rank, frames):
    """An input is linked to the output that it equals, a weight to that of the iteration before."""
    rank.open()
    stream = rank.push().send(*step(frames, 1), *step(frames, 14, 1, constant=100))
    assert stream.send(frames.goodbye(27, 2)).finish() is grpc.StatusCode.OK
    tree = check(rank.root, constants={0: 0, 1: 100})
    assert len(tree.entries) == 24
    # Five activations in each iteration, and the weights once.
    assert inodes(tree) == 5 + 5 + 4
    assert [m.status.linked for m in sorted(tree.manifests, key=lambda m: m.status.iteration)] == [
        3,
        7,
    ]


def test_replicas_are_linked_across_ranks(make_agent, make_rank, frames):
    """Two ranks of a tree share one file for each tensor that is equal in both."""
    agent = make_agent()
    ranks = [
        make_rank(agent.address, rank=number, world_size=2, session_id=f"session{number:04}")
        for number in range(2)
    ]
    for rank in ranks:
        rank.open()
    streams = [rank.push().send(*step(frames, 1), frames.goodbye(14)) for rank in ranks]
    assert [stream.finish() for stream in streams] == [grpc.StatusCode.OK] * 2
    tree = check(ranks[0].root, constants={0: 0})
    assert tree.ranks == (0, 1)
    assert (len(tree.entries), inodes(tree)) == (24, 9)


def test_trees_and_codecs_share_no_links(make_agent, make_rank, frames, short_dir):
    """Files are linked within one tree and one codec only."""
    agent = make_agent()
    roots = [("a", "zstd"), ("b", "zstd"), ("a", "none")]
    for number, (name, codec) in enumerate(roots):
        rank = make_rank(
            agent.address,
            rank=number,
            world_size=3,
            session_id=f"session{number:04}",
            job_id=f"job{name}",
            root=short_dir / name,
            codec=codec,
        )
        rank.open()
        rank.push().send(*step(frames, 1), frames.goodbye(14)).finish()
    first = check(short_dir / "a", constants={0: 0})
    assert {(e.key.rank, e.codec) for e in first.entries} == {(0, "zstd"), (2, "none")}
    assert inodes(first) == 18
    other = check(short_dir / "b", constants={0: 0})
    assert inodes(other) == 9
    assert not {e.path.stat().st_ino for e in first.entries} & {
        e.path.stat().st_ino for e in other.entries
    }


def test_disk_without_links_gets_full_copies(rank, frames, monkeypatch):
    """If a disk rejects links, every record is written as a whole."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "refusing on purpose")

    monkeypatch.setattr(os, "link", refuse)
    rank.open()
    rank.push().send(*step(frames, 1), frames.goodbye(14)).finish()
    tree = check(rank.root, constants={0: 0})
    assert inodes(tree) == 12
    assert tree.manifests[0].status.stored == 12


def test_removing_an_iteration_keeps_files_linked_to_it(rank, frames):
    """Removing an iteration keeps links to its files, and the agent continues."""
    rank.open()
    stream = rank.push().send(*step(frames, 1))
    stream.wait_acknowledged(13)
    for path in (rank.root / "rank_0" / "Net" / "0" / "0").iterdir():
        path.unlink()
    stream.send(*step(frames, 14, 1), *step(frames, 27, 2), frames.goodbye(40, 3))
    assert stream.finish() is grpc.StatusCode.OK
    tree = reader.walk(rank.root)
    entries = [entry for entry in tree.entries if entry.key.iteration]
    assert len(entries) == 24
    assert len({entry.path.stat().st_ino for entry in entries}) == 9
    for entry in entries:
        assert reader.load(entry).size == 4096


def test_incompressible_tensor_is_stored_and_linked_uncompressed(rank, frames):
    """A tensor that zstd cannot shrink is a plain `.npy` file, and so are the links to it."""
    rank.open()
    sent = [frames.record(n, NOISE, op_name=NAMES[0], slot=n) for n in (1, 2)]
    rank.push().send(*sent, frames.end(3, 0, 2), frames.goodbye(4)).finish()
    tree = reader.walk(rank.root)
    assert not tree.problems
    assert [entry.path.suffix for entry in tree.entries] == [".npy", ".npy"]
    assert inodes(tree) == 1
    for entry in tree.entries:
        assert np.load(entry.path).tobytes() == NOISE.tobytes()
        assert reader.load(entry).tobytes() == NOISE.tobytes()


def test_linked_tensor_has_a_statistics_row(make_agent, make_rank, frames):
    """`statistic.csv` has a row for every tensor, written or linked."""
    rank = make_rank(make_agent().address, content=ContentSettings(saved="full"))
    rank.open()
    rank.push().send(*step(frames, 1), frames.goodbye(14)).finish()
    (table,) = rank.root.rglob("statistic.csv")
    assert len(table.read_text().splitlines()) == 13


def test_hidden_link_of_a_killed_agent_is_removed(make_daemon, make_rank, frames):
    """The hidden name that a killed daemon left is removed when the record is resent."""
    daemon = make_daemon()
    rank = make_rank(daemon.address)
    rank.open()
    sent = step(frames, 1)
    stream = rank.push().send(*sent[:6])
    stream.wait_acknowledged(6)
    daemon.kill()
    stream.wait_over()
    # As it stands when the kill came after a link was made and before it had its name.
    (folder,) = (rank.root / "rank_0" / "Net" / "0").iterdir()
    written = sorted(folder.glob("*.npy.zst"))[0]
    for sequence in range(7, 13):
        (folder / f".{rank.session_id}-{sequence}.tmp").hardlink_to(written)
    daemon.start()
    rank.open()
    rank.push().send(*sent, frames.goodbye(14)).finish()
    check(rank.root, constants={0: 0})

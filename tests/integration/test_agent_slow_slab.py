"""Slabs that take long to make: the session starts on the stream and loses nothing."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from support.slab_agents import MIB, SMALL, in_slab, wait_until

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdumpd.agent.shm import ring_registry
from rankdumpd.agent.shm import slab_folder as slabs_of_agent
from rankdumpd.agent.shm.slab_file import make_slab

COUNT = 40


class SlowDisk:
    """Makes slabs when it is released, and counts the requests for them."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.free = threading.Event()
        self.made = 0

    def make(self, path: Path, length: int, **more):
        self.asked.release()
        assert self.free.wait(60)
        self.made += 1
        return make_slab(path, length, **more)


@pytest.fixture
def slow(monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(slabs_of_agent, "make_slab", disk.make)
    monkeypatch.setattr(ring_registry, "SLAB_TIMEOUT_S", 0.01)
    yield disk
    disk.free.set()


@pytest.fixture
def agent(make_agent, short_dir, slow):
    return make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)


def slabs_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "slabs").glob("*.slab")]


def test_session_starts_on_the_stream_and_continues_in_its_slab(agent, slow, short_dir, caplog):
    """The opening is answered before the slab exists; no tensor is lost or duplicated."""
    tree = short_dir / "dump"
    plan = DumpPlan(
        output=OutputSettings(root=str(tree), net_name="Net", codec="none"), delivery=SMALL
    )
    session = rankdump.Session(plan, agent=agent.address)

    def dump(step: int) -> None:
        session.step(step)
        for number in range(COUNT):
            array = np.full(99, number + COUNT * step, np.float32)
            session.dump("Op", f"Default/a{number}/Op-op0", "output", 0, array)

    with caplog.at_level(logging.INFO):
        dump(0)
        wait_until(lambda: sum(i.stored for i in agent.agent.view().iterations) == COUNT)
        assert slow.asked.acquire(timeout=60)
        assert not slabs_in(short_dir)
        slow.free.set()
        wait_until(lambda: in_slab(session))
        dump(1)
        session.close()
    assert session.undelivered == 0
    found = [np.load(path)[0] for path in (tree / "rank_0" / "Net").rglob("*.npy")]
    assert sorted(found) == list(range(2 * COUNT))
    assert [i.stored for i in agent.agent.view().iterations] == [COUNT, COUNT]
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "lost the agent" in text or "stream" in text], said
    assert slow.made == 1
    wait_until(lambda: not slabs_in(short_dir))


def test_slow_slab_is_kept_for_the_next_opening(agent, slow, make_rank):
    """A rank that asks again while its slab is being made gets that slab."""
    rank = make_rank(agent.address, wants_slab=True, delivery=SMALL)
    for _ in range(3):
        assert not rank.open().HasField("slab")
    stream = rank.push()
    slow.free.set()
    stream.wait_slab()
    stream.cut()
    first = rank.open().slab
    assert Path(first.path).exists()
    # The answer may not have come through.
    assert rank.open().slab == first
    assert slow.made == 1


def test_slab_of_an_ended_session_is_removed(agent, slow, make_rank, frames, short_dir):
    """A slab that becomes ready after the end of its session is removed, and its space released."""
    rank = make_rank(agent.address, wants_slab=True, delivery=SMALL)
    rank.open()
    rank.push().send(frames.goodbye(1)).finish()
    slow.free.set()
    wait_until(lambda: agent.agent._slabs.held_bytes == 0)
    assert not list((short_dir / "slabs").iterdir())


def test_stopping_agent_leaves_no_unfinished_slab(agent, slow, make_rank, short_dir):
    """The folder holds no unfinished slab after the stop."""
    rank = make_rank(agent.address, wants_slab=True, delivery=SMALL)
    rank.open()
    assert slow.asked.acquire(timeout=60)
    # Told to end before it begins to touch: the making sees that at its first block.
    slabs = agent.agent._slabs
    slabs.stop()
    slow.free.set()
    agent.agent._rings.stop()
    assert slow.made == 1
    assert not list((short_dir / "slabs").iterdir())

"""Session openings that outlast the rank's timeout, or never end: reported, kept, counted."""

from __future__ import annotations

import errno
import logging
import threading

import numpy as np
import pytest
from support.slab_agents import MIB, wait_until

import rankdump
from rankdump._core.manifest import Manifest
from rankdump._core.plan import DeliverySettings, DumpPlan, OutputSettings
from rankdump._core.status import SessionState
from rankdumpd.agent.session import openings, registry

COUNT = 30


class BusyDisk:
    """Delays the opening of a session, by its writes, until released."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.begun = 0
        self._introduce = registry.prepare_tree

    def introduce(self, session, request, now_us: int) -> None:
        self.begun += 1
        assert self.free.wait(60)
        self._introduce(session, request, now_us)


@pytest.fixture
def busy(monkeypatch):
    disk = BusyDisk()
    monkeypatch.setattr(registry, "prepare_tree", disk.introduce)
    monkeypatch.setattr(openings, "ANSWER_TIMEOUT_S", 0.05)
    yield disk
    disk.free.set()


@pytest.fixture
def start(busy, make_agent, short_dir):
    """Starts a session on an agent whose disk is busy."""
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)

    def begin(**delivery):
        output = OutputSettings(root=str(short_dir / "dump"), net_name="Net", codec="none")
        plan = DumpPlan(output=output, delivery=DeliverySettings(buffer_bytes=MIB, **delivery))
        return agent.agent, rankdump.Session(plan, agent=agent.address)

    return begin


def dump(session: rankdump.Session, step: int) -> None:
    session.step(step)
    for number in range(COUNT):
        array = np.full(99, number + COUNT * step, np.float32)
        session.dump("Op", f"Default/a{number}/Op-op0", "output", 0, array)


def texts(caplog, word: str) -> list[str]:
    return [text for r in caplog.records if word in (text := r.getMessage())]


def test_tensors_dumped_during_a_slow_opening_are_delivered(start, busy, short_dir, caplog):
    """The rank learns the reason and asks again; one opening answers all its requests."""
    agent, session = start()
    for step in range(2):
        dump(session, step)
    wait_until(lambda: texts(caplog, "has not opened the session"))
    (said,) = texts(caplog, "has not opened the session")
    assert "1 MiB of tensors wait for it" in said
    (finding,) = agent.view().findings
    assert "its session has been opening for" in finding
    busy.free.set()
    session.close()
    assert session.undelivered == 0
    assert busy.begun == 1
    found = [np.load(path)[0] for path in (short_dir / "dump" / "rank_0" / "Net").rglob("*.npy")]
    assert sorted(found) == list(range(2 * COUNT))
    assert not agent.view().findings
    assert len(texts(caplog, "a disk is busy")) == 2  # the rank's, and the agent's


def test_losses_of_a_rank_without_session_are_counted(start, busy, short_dir, caplog):
    """The drops of the rank are in the balance of the job at once, and in the tree when
    it exists.
    """
    agent, session = start(block_timeout_s=0.2)
    for step in range(2):
        dump(session, step)
    with caplog.at_level(logging.INFO):
        session.close()
    assert session.undelivered == 2 * COUNT
    (said,) = texts(caplog, "tensors were not dumped")
    assert f"{2 * COUNT} not_taken_by_agent; the agent at" in said
    wait_until(lambda: [text for text in agent.view().findings if "gave up" in text])
    assert texts(caplog, f"and {2 * COUNT} tensors are lost")

    def balance():
        view = agent.view()
        (status,) = view.sessions
        assert (status.state, status.rank) == (SessionState.CLOSED, 0)
        assert all(i.is_balanced and i.complete for i in view.iterations)
        return [(i.expected, dict(i.dropped)) for i in view.iterations]

    lost = {"not_taken_by_agent": COUNT}
    assert balance() == [(COUNT, lost)] * 2
    view = agent.view()
    assert "was not open when it ended" in view.sessions[0].notes[-1]
    (finding,) = [text for text in view.findings if "gave up" in text]
    assert f"{2 * COUNT} tensors are lost" in finding
    busy.free.set()
    manifests = short_dir / "dump" / "rank_0" / ".dump_metadata" / "manifest"
    wait_until(lambda: manifests.is_dir() and len(list(manifests.glob("*.json"))) == 2)
    kept = [Manifest.from_json(path.read_bytes()) for path in manifests.iterdir()]
    assert [dict(each.status.dropped) for each in kept] == [lost] * 2
    wait_until(lambda: not [text for text in agent.view().findings if "gave up" in text])
    # The session is open first, and then it has the balance.
    wait_until(lambda: agent.view().sessions[0].state is SessionState.CLOSED)
    assert balance() == [(COUNT, lost)] * 2
    assert [text for text in agent.view().findings if "was not open when it ended" in text]


def test_slow_opening_is_returned_only_to_its_requester(busy, make_agent, make_rank):
    """Another process that knows the id of the session waits, and is rejected as before."""
    address = make_agent().address
    rank = make_rank(address, secret=b"s" * 16)
    assert "a disk is busy" in rank.open().opening
    thief = make_rank(address, secret=b"t" * 16, root=rank.root)
    assert not thief.open().token
    busy.free.set()
    wait_until(lambda: rank.open().token)
    with pytest.raises(Exception, match="opened by another process"):
        thief.open()


def test_opened_session_that_never_connected_is_reported(
    make_agent, make_rank, monkeypatch, caplog
):
    """Log and status report it; nothing else of the session remains."""
    from rankdumpd.agent.session import registry

    agent = make_agent()
    make_rank(agent.address).open()
    monkeypatch.setattr(registry, "CONNECT_TIMEOUT_S", -1.0)
    (finding,) = agent.agent.view().findings
    assert "opened its session and never connected" in finding
    assert texts(caplog, "never connected") == [finding]


def test_only_losses_may_follow_a_failed_opening(make_agent, make_rank, frames):
    """A frame of any other kind is rejected, and so is one with an unexpected number."""
    agent = make_agent()
    rank = make_rank(agent.address)
    for wrong in (frames.record(1, np.ones(3)), frames.goodbye(2)):
        with pytest.raises(Exception, match="frame"):
            rank.leave(wrong)
    rank.leave(frames.end(1, 0, 7, buffer_full=7), frames.goodbye(2))

    def balances():
        return [(each.expected, dict(each.dropped)) for each in agent.agent.view().iterations]

    # While the balance goes from the opening to the open session, a view may lack it.
    wait_until(lambda: balances() == [(7, {"buffer_full": 7})])


@pytest.fixture
def read_only(monkeypatch):
    """Makes the tree read-only for as long as an event is not set."""
    writable, prepare = threading.Event(), registry.prepare_tree

    def fail(session, request, now_us: int) -> None:
        if not writable.is_set():
            raise OSError(errno.EROFS, "Read-only file system", "/tree")
        prepare(session, request, now_us)

    monkeypatch.setattr(registry, "prepare_tree", fail)
    return writable


def waiting_ranks(agent) -> float:
    name = "rankdump_agent_waiting_ranks"
    return next(each.value for each in agent.samples() if each.name == name)


def test_rank_and_agent_say_why_a_session_cannot_be_opened(
    read_only, make_agent, short_dir, caplog
):
    """The tree is read-only. Its tensors are stored when it is not any more."""
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)
    plan = DumpPlan(output=OutputSettings(root=str(short_dir / "dump"), net_name="Net"))
    session = rankdump.Session(plan, agent=agent.address)
    dump(session, 0)
    reason = f"output root {str(short_dir / 'dump')!r} cannot be written at present: "
    (told,) = texts(caplog, "has not opened the session")
    assert f"the agent at {agent.address} has not opened the session ({reason}" in told
    assert "training continues" in told
    assert not texts(caplog, "no agent")
    (finding,) = agent.agent.view().findings
    assert finding.startswith("rank 0 waits for ")
    assert f"its session cannot be opened: {reason}" in finding
    assert waiting_ranks(agent.agent) == 1
    read_only.set()
    wait_until(lambda: texts(caplog, "has opened the session"))
    assert not agent.agent.view().findings
    assert waiting_ranks(agent.agent) == 0
    session.close()
    assert not texts(caplog, "not dumped")


def test_rank_that_ends_before_its_tree_is_writable_does_not_wait(
    read_only, make_agent, short_dir, caplog
):
    """Its losses are counted by the agent, with the reason."""
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)
    # A rank that waited would do so for longer than this test may take.
    delivery = DeliverySettings(buffer_bytes=MIB, block_timeout_s=3600)
    output = OutputSettings(root=str(short_dir / "dump"), net_name="Net")
    session = rankdump.Session(DumpPlan(output=output, delivery=delivery), agent=agent.address)
    dump(session, 0)
    session.close()
    (told,) = texts(caplog, "not dumped")
    assert f"{COUNT} not_taken_by_agent; the agent at " in told
    assert "cannot be written at present" in told
    wait_until(lambda: any("gave up" in each for each in agent.agent.view().findings))
    (finding,) = agent.agent.view().findings
    assert "cannot be written at present" in finding
    assert f"{COUNT} tensors are lost" in finding


@pytest.fixture(autouse=True)
def _hears(caplog):
    caplog.set_level(logging.INFO)

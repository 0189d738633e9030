"""Bits that change in shared memory are found before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from faults.agent_rig import EACH, AgentRig, dump_iteration
from faults.control_page import PLACES, ControlPage
from faults.observation import tree
from faults.rank import BitFlipper
from integration.conftest import StandaloneProcess
from support.worker_host import WAIT_S, RankPlace

import rankdump
from rankdump._cli.daemon_client import drain_agent
from rankdump._core.status import IterationStatus
from rankdump._transport.agent_client import TransportSelector
from rankdump._transport.push_stream import PushStream
from rankdump._transport.send_buffer import SendBuffer

ATTEMPT_S = 5.0
MAX_ATTEMPTS = 60


def flip_bits(monkeypatch, control: ControlPage, body: str, place: str) -> None:
    """Let ranks of this process flip bits of such entries where the control page requests it."""
    flipper = BitFlipper(control, body)
    monkeypatch.setattr(SendBuffer, "publish", flipper.publish(SendBuffer.publish))
    monkeypatch.setattr(PushStream, "requests", flipper.requests(PushStream.requests))
    control.flip_at = place


@pytest.fixture
def flip(rig: AgentRig, monkeypatch) -> Callable[..., list[IterationStatus]]:
    """Flips one bit of an entry of some kind in the second of three iterations."""

    def flipped(body: str, place: str, saved: str = "tensor") -> list[IterationStatus]:
        flip_bits(monkeypatch, rig.control, body, place)
        with rig.session(saved=saved) as session:
            played(rig, session)
        assert rig.control.hits("flip") == 1
        return rig.settled(3)

    return flipped


def played(rig: AgentRig, session: rankdump.Session) -> None:
    rig.play(session, 1)
    session.step(2)
    rig.settled(1)
    rig.control.flips = 1
    rig.play(session, 2)
    session.step(3)
    before = rig.settled(2)
    # The next process has the same balances, and a number that is sent again counts no more.
    rig.agent.restart()
    assert rig.status()[:2] == before[:2]
    rig.play(session, 3)


@pytest.mark.parametrize("place", PLACES)
def test_flipped_bit_in_a_slab_is_counted_as_corrupted(rig: AgentRig, flip, place):
    """Law: that tensor alone is dropped; those before and behind it are in the tree."""
    first, second, third = flip("record", place)
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert dict(second.dropped) == {"corrupted": 1}
    assert rig.stored() == 3 * EACH - 1


@pytest.mark.parametrize("place", ["frame", "head"])
def test_damaged_iteration_end_is_resent(rig: AgentRig, flip, place):
    """Law: what the rank still has costs nothing."""
    assert [each.kept_tensors for each in flip("iteration_end", place)] == [EACH] * 3
    assert rig.stored() == 3 * EACH


@pytest.mark.parametrize("place", ["frame", "head"])
def test_restarted_agent_does_not_read_an_abandoned_slab(socket_folder: Path, monkeypatch, place):
    """Law: the rank is not rejected by an agent that knows nothing of the damage."""
    avoid, found, restarted = TransportSelector.avoid_slabs, Event(), Event()

    def avoided(selector: TransportSelector, reason: str) -> None:
        found.set()
        assert restarted.wait(WAIT_S)
        avoid(selector, reason)

    monkeypatch.setattr(TransportSelector, "avoid_slabs", avoided)
    daemon, control = StandaloneProcess(socket_folder), ControlPage(socket_folder / "control")
    flip_bits(monkeypatch, control, "iteration_end", place)
    placed = RankPlace(socket_folder, daemon.address)
    with closing(daemon), placed.session(0) as session:
        iterations = 0
        # The agent may have read an entry when a bit of it is flipped: then the next one.
        while not found.wait(ATTEMPT_S if iterations else 0):
            iterations += 1
            assert iterations < MAX_ATTEMPTS
            dump_iteration(session, iterations)
            control.flips = 1
            session.step(iterations + 1)
        daemon.kill()
        daemon.start()
        restarted.set()
        dump_iteration(session, iterations + 1)
        session.close()
        assert drain_agent(daemon.address, timeout_s=WAIT_S) == 0
    files, manifests, _ = tree(placed.tree)
    assert [(each.kept, dict(each.dropped)) for each in manifests] == [(EACH, {})] * (
        iterations + 1
    )
    assert len(files) == (iterations + 1) * EACH
    assert not any(file.fault for file in files)


@pytest.mark.parametrize("place", ["frame", "head"])
def test_damaged_statistics_rows_are_counted_one_by_one(flip, place):
    """Law: the rank no longer has them, but knows their number."""
    first, second, third = flip("figure_rows", place, saved="statistic")
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert (second.kept_tensors, dict(second.dropped)) == (0, {"corrupted": EACH})

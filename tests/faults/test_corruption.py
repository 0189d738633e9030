"""Bits that change in shared memory are found before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.agent_rig import EACH, AgentRig
from faults.control_page import PLACES
from faults.rank import BitFlipper

import rankdump
from rankdump._core.status import IterationStatus
from rankdump._transport.push_stream import PushStream
from rankdump._transport.send_buffer import SendBuffer


@pytest.fixture
def flip(rig: AgentRig, monkeypatch) -> Callable[..., list[IterationStatus]]:
    """Flips one bit of an entry of some kind in the second of three iterations."""

    def flipped(body: str, place: str, saved: str = "tensor") -> list[IterationStatus]:
        flipper = BitFlipper(rig.control, body)
        monkeypatch.setattr(SendBuffer, "publish", flipper.publish(SendBuffer.publish))
        monkeypatch.setattr(PushStream, "requests", flipper.requests(PushStream.requests))
        rig.control.flip_at = place
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
def test_damaged_statistics_rows_are_counted_one_by_one(flip, place):
    """Law: the rank no longer has them, but knows their number."""
    first, second, third = flip("figure_rows", place, saved="statistic")
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert (second.kept_tensors, dict(second.dropped)) == (0, {"corrupted": EACH})

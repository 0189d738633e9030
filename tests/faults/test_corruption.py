"""A byte that changes in shared memory on its way is found before anything is written."""

from __future__ import annotations

from faults.rank import Flipper
from faults.stand import EACH, Stand

from rankdump.ship.depot import Depot
from rankdump.ship.outgoing import Outgoing


def test_a_flipped_byte_in_a_slab_is_counted_as_corrupted(stand: Stand, monkeypatch):
    """Law: that tensor alone is dropped; those before and behind it are in the tree."""
    flipper = Flipper(stand.control)
    monkeypatch.setattr(Depot, "publish", flipper.publish(Depot.publish))
    monkeypatch.setattr(Outgoing, "requests", flipper.requests(Outgoing.requests))
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.flips = 1
        stand.play(session, 2)
        session.step(3)
        stand.settled(2)
        assert stand.control.hits("flip") == 1
        stand.play(session, 3)
    first, second, third = stand.settled(3)
    assert (first.kept, third.kept) == (EACH, EACH)
    assert dict(second.dropped) == {"corrupted": 1}
    assert stand.stored() == 3 * EACH - 1

"""A byte that changes in shared memory on its way is found before anything is written."""

from __future__ import annotations

import threading

from faults.rank import Flipper
from faults.stand import EACH, Stand, wait_until
from integration.conftest import WAIT_S

from rankdump.contract.slab import RING_OFFSET
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


def test_a_damaged_head_costs_what_lies_in_the_slab_and_not_the_session(stand: Stand, monkeypatch):
    """Law: nobody can say where the next entry begins; what comes later takes the stream."""
    wanted, damaged = threading.Event(), threading.Event()
    requests = Outgoing.requests

    def rung(outgoing: Outgoing, stream: int):
        told = 0
        for request in requests(outgoing, stream):
            ring = outgoing._depot.ring
            if ring is not None and request.HasField("doorbell"):
                if wanted.is_set() and not damaged.is_set():
                    head = RING_OFFSET + told % ring._writer.ring_bytes
                    ring._mapping.memory[head : head + 4] = bytes(4)
                    damaged.set()
                told = request.doorbell.written
            yield request

    monkeypatch.setattr(Outgoing, "requests", rung)
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        wanted.set()
        stand.play(session, 2)
        session.step(3)
        assert damaged.wait(WAIT_S)
        wait_until(lambda: len(stand.status()) >= 2)
        stand.play(session, 3)
    wait_until(lambda: stand.of(3).complete)
    assert (stand.of(1).kept, stand.of(3).kept) == (EACH, EACH)
    assert stand.of(2).kept < EACH

"""No descriptor is left: what cannot be opened is counted, and the next one is opened."""

from __future__ import annotations

import errno

from faults.stand import EACH, Stand, wait_until


def test_missing_descriptors_are_counted_as_drop_reason(stand: Stand):
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.fail("open", errno.EMFILE, 1000)
        stand.play(session, 2)
        session.step(3)
        wait_until(lambda: stand.of(2).dropped.get("no_descriptors") == EACH)
        stand.control.heal()
        stand.play(session, 3)
    first, second, third = stand.settled(3)
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert dict(second.dropped) == {"no_descriptors": EACH}
    assert stand.stored() == 2 * EACH
    stand.wait_manifests([1, 2, 3])

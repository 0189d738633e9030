"""Missing descriptors: files that cannot be opened are counted, and the next one is opened."""

from __future__ import annotations

import errno

from faults.agent_rig import EACH, AgentRig, wait_until


def test_missing_descriptors_are_counted_as_drop_reason(rig: AgentRig):
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        rig.control.fail("open", errno.EMFILE, 1000)
        rig.play(session, 2)
        session.step(3)
        wait_until(lambda: rig.of(2).dropped.get("no_descriptors") == EACH)
        rig.control.heal()
        rig.play(session, 3)
    first, second, third = rig.settled(3)
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert dict(second.dropped) == {"no_descriptors": EACH}
    assert rig.stored() == 2 * EACH
    rig.wait_manifests([1, 2, 3])

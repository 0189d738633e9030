"""Disk that hangs: ranks wait, status is answered, and nothing is lost."""

from __future__ import annotations

from faults.agent_rig import EACH, AgentRig, wait_until

from rankdump._cli.daemon_client import fetch_agent_status


def test_stalled_disk_blocks_no_status_call_and_loses_nothing(rig: AgentRig):
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        # Until its manifest is written, its bytes are not released, and both do not fit.
        rig.wait_manifests([1])
        rig.control.stalled = True
        rig.play(session, 2)
        wait_until(lambda: rig.control.hits("stall"))
        view = fetch_agent_status(rig.agent.address, timeout_s=20)
        assert [each.complete for each in view.iterations[:1]] == [True]
        rig.control.heal()
    assert [each.kept_tensors for each in rig.settled(2)] == [EACH] * 2
    assert rig.stored() == 2 * EACH

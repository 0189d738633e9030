"""A disk that does not answer: ranks wait, people are answered, and nothing is lost."""

from __future__ import annotations

from faults.stand import EACH, Stand, wait_until

from rankdump._cli.daemon_client import fetch_agent_status


def test_stalled_disk_blocks_no_status_call_and_loses_nothing(stand: Stand):
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.stalled = True
        stand.play(session, 2)
        wait_until(lambda: stand.control.hits("stall"))
        view = fetch_agent_status(stand.agent.address, timeout_s=20)
        assert [each.complete for each in view.iterations[:1]] == [True]
        stand.control.heal()
    assert [each.kept_tensors for each in stand.settled(2)] == [EACH] * 2
    assert stand.stored() == 2 * EACH

"""EIO from a disk: failed writes are counted drops, and all else continues."""

from __future__ import annotations

import errno

import pytest
from faults.agent_rig import EACH, AgentRig, wait_until


def test_failed_writes_are_counted_and_the_iteration_ends(rig: AgentRig):
    """Law: dropped for `write_error`, every one of them, and none of the next iteration."""
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        rig.control.fail("write", errno.EIO, 1000)
        rig.play(session, 2)
        session.step(3)
        wait_until(lambda: rig.of(2).dropped.get("write_error") == EACH)
        rig.control.heal()
        rig.play(session, 3)
    first, second, third = rig.settled(3)
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert (second.kept_tensors, dict(second.dropped)) == (0, {"write_error": EACH})
    assert rig.stored() == 2 * EACH
    rig.wait_manifests([1, 2, 3])


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_dropped_tensor_has_no_final_name(rig: AgentRig, call: str):
    """Law: after a failed sync or link it is dropped and not there, or there and not dropped."""
    with rig.session(durability="synced") as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        rig.control.fail(call, errno.EIO, 300)
        rig.play(session, 2)
        session.step(3)
        wait_until(lambda: rig.of(2).accounted_tensors == EACH)
        rig.control.heal()
    _, second = rig.settled(2)[:2]
    dropped = second.dropped.get("write_error", 0)
    assert 0 < dropped < EACH
    assert rig.stored() == 2 * EACH - dropped


@pytest.mark.parametrize("call", ["mkdir", "statvfs", "link", "unlink"])
def test_other_failed_calls_end_no_session(rig: AgentRig, call: str):
    """Law: failures are drops with a reason; no rank is rejected permanently."""
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        rig.control.fail(call, errno.EIO, 1000)
        rig.play(session, 2)
        session.step(3)
        wait_until(lambda: rig.of(2).accounted_tensors == EACH)
        rig.control.heal()
        rig.play(session, 3)
    views = rig.settled(3)
    assert views[2].kept_tensors == EACH
    assert rig.stored() == sum(each.kept_tensors for each in views)


def test_session_opened_while_the_disk_fails_dumps_later(rig: AgentRig):
    """Law: a passing error while a rank introduces itself does not refuse it for good."""
    rig.control.fail("open", errno.EIO, 1000)
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        wait_until(lambda: rig.control.hits("open") > 2)
        rig.control.heal()
        # Whoever ends before an agent ever took it in does not wait for one.
        wait_until(lambda: rig.of(1).complete)
        rig.play(session, 2)
    views = rig.settled(2)
    assert views[1].kept_tensors == EACH
    assert rig.stored() == sum(each.kept_tensors for each in views)


def test_failing_ledger_loses_nothing(rig: AgentRig):
    """Law: what cannot be committed is not acknowledged, and tried again until it can be."""
    with rig.session() as session:
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        rig.control.fail("sqlite", errno.EIO, 1000)
        rig.play(session, 2)
        wait_until(lambda: rig.control.hits("sqlite"))
        rig.control.heal()
    assert [each.kept_tensors for each in rig.settled(2)] == [EACH] * 2
    assert rig.stored() == 2 * EACH

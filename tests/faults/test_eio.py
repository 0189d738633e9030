"""A disk that says EIO: what it refuses is dropped and counted, all else goes on by itself."""

from __future__ import annotations

import errno

import pytest
from faults.stand import EACH, Stand, wait_until


def test_failed_writes_are_counted_and_the_iteration_ends(stand: Stand):
    """Law: dropped for `write_error`, every one of them, and none of the next iteration."""
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.fail("write", errno.EIO, 1000)
        stand.play(session, 2)
        session.step(3)
        wait_until(lambda: stand.of(2).dropped.get("write_error") == EACH)
        stand.control.heal()
        stand.play(session, 3)
    first, second, third = stand.settled(3)
    assert (first.kept_tensors, third.kept_tensors) == (EACH, EACH)
    assert (second.kept_tensors, dict(second.dropped)) == (0, {"write_error": EACH})
    assert stand.stored() == 2 * EACH
    stand.wait_manifests([1, 2, 3])


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_dropped_tensor_has_no_final_name(stand: Stand, call: str):
    """Law: after a failed sync or link it is dropped and not there, or there and not dropped."""
    with stand.session(durability="synced") as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.fail(call, errno.EIO, 300)
        stand.play(session, 2)
        session.step(3)
        wait_until(lambda: stand.of(2).accounted_tensors == EACH)
        stand.control.heal()
    _, second = stand.settled(2)[:2]
    dropped = second.dropped.get("write_error", 0)
    assert 0 < dropped < EACH
    assert stand.stored() == 2 * EACH - dropped


@pytest.mark.parametrize("call", ["mkdir", "statvfs", "link", "unlink"])
def test_other_failed_calls_end_no_session(stand: Stand, call: str):
    """Law: what fails meanwhile is dropped with a reason; nobody is refused for good."""
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.fail(call, errno.EIO, 1000)
        stand.play(session, 2)
        session.step(3)
        wait_until(lambda: stand.of(2).accounted_tensors == EACH)
        stand.control.heal()
        stand.play(session, 3)
    views = stand.settled(3)
    assert views[2].kept_tensors == EACH
    assert stand.stored() == sum(each.kept_tensors for each in views)


def test_session_opened_while_the_disk_fails_dumps_later(stand: Stand):
    """Law: a passing error while a rank introduces itself does not refuse it for good."""
    stand.control.fail("open", errno.EIO, 1000)
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        wait_until(lambda: stand.control.hits("open") > 2)
        stand.control.heal()
        # Whoever ends before an agent ever took it in does not wait for one.
        wait_until(lambda: stand.of(1).complete)
        stand.play(session, 2)
    views = stand.settled(2)
    assert views[1].kept_tensors == EACH
    assert stand.stored() == sum(each.kept_tensors for each in views)


def test_failing_ledger_loses_nothing(stand: Stand):
    """Law: what cannot be committed is not acknowledged, and tried again until it can be."""
    with stand.session() as session:
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        stand.control.fail("sqlite", errno.EIO, 1000)
        stand.play(session, 2)
        wait_until(lambda: stand.control.hits("sqlite"))
        stand.control.heal()
    assert [each.kept_tensors for each in stand.settled(2)] == [EACH] * 2
    assert stand.stored() == 2 * EACH

"""Freezes that an agent reports, and those of the coordinator that it has seen."""

from __future__ import annotations

from rankdump._core.black_box import FaultKind
from rankdump._core.freeze_record import FreezeReach, FrozenCause, JobFreeze, RelayedFreeze
from rankdumpd.agent.blackbox import freeze_state
from rankdumpd.agent.blackbox.freeze_state import REPORTED_S, RecentFreezes


class HandClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def freeze(iteration: int) -> JobFreeze:
    return JobFreeze("j", 0, iteration, FrozenCause(FaultKind.JUMP, iteration, "it jumped", 1, 0))


def test_freeze_is_reported_for_its_time():
    clock = HandClock()
    recent = RecentFreezes(clock)
    recent.add(freeze(3))
    recent.add(freeze(5), age_s=REPORTED_S - 10)
    recent.add(freeze(6), age_s=REPORTED_S)
    assert recent.list_reported() == (freeze(3), freeze(5))
    clock.now_s += 10
    assert recent.list_reported() == (freeze(3),)
    clock.now_s += REPORTED_S - 10
    assert recent.list_reported() == ()


def test_freeze_that_became_part_of_another_is_not_reported():
    recent = RecentFreezes(HandClock())
    recent.add(freeze(3))
    recent.remove(freeze(3).key)
    recent.add(freeze(5))
    assert recent.list_reported() == (freeze(5),)


def test_freeze_of_the_coordinator_is_new_once_and_its_reach_is_the_last(monkeypatch):
    recent = RecentFreezes(HandClock())
    assert recent.note_relayed(RelayedFreeze(freeze(3))) == (True, [])
    assert recent.note_relayed(RelayedFreeze(freeze(3), FreezeReach(4, 2))) == (False, [])
    assert recent.find_reach(freeze(3).key) == FreezeReach(4, 2)
    assert recent.find_reach(freeze(4).key) == FreezeReach()
    monkeypatch.setattr(freeze_state, "MAX_RELAYED", 2)
    for iteration in (4, 5):
        assert recent.note_relayed(RelayedFreeze(freeze(iteration)))[0]
    assert recent.find_reach(freeze(3).key) == FreezeReach()


def test_later_causes_of_the_coordinator_are_new_once():
    recent = RecentFreezes(HandClock())
    first, second = freeze(4).cause, freeze(5).cause
    assert recent.note_relayed(RelayedFreeze(freeze(3), later_causes=(first,))) == (True, [first])
    both = RelayedFreeze(freeze(3), later_causes=(first, second))
    assert recent.note_relayed(both) == (False, [second])
    assert recent.note_relayed(both) == (False, [])

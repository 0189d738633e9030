"""Time that pulses leave for fingerprints."""

from __future__ import annotations

from rankdump._recorder.fingerprint_credit import FingerprintCredit

STEP_NS = 100_000_000


def test_nothing_is_afforded_before_a_step_has_ended():
    assert not FingerprintCredit(0.01).can_afford(1)


def test_pulses_come_first():
    credit = FingerprintCredit(0.01)
    credit.end_step(STEP_NS, 1_000_000)
    assert not credit.can_afford(1)
    credit.end_step(STEP_NS, 800_000)
    # 0.2 ms at 2 ns a byte, without what each tensor takes.
    assert credit.can_afford(95_000)
    assert not credit.can_afford(95_000, tensors=2)
    assert not credit.can_afford(96_000)


def test_four_steps_are_saved_up_and_no_more():
    credit = FingerprintCredit(0.01)
    for _ in range(10):
        credit.end_step(STEP_NS, 0)
    assert credit.can_afford(1_990_000)
    assert not credit.can_afford(2_000_000)
    assert credit.is_too_large(2_000_000)
    assert not credit.is_too_large(1_990_000)


def test_what_is_spent_is_missing_and_changes_the_estimate():
    credit = FingerprintCredit(0.01)
    credit.end_step(STEP_NS, 0)
    credit.spend(400_000, 400_000)
    # 0.6 ms are left, and a byte now takes 1.75 ns.
    assert credit.can_afford(336_000)
    assert not credit.can_afford(338_000)
    credit.spend(10, 700_000)
    assert not credit.can_afford(0)


def test_a_debt_is_bounded():
    credit = FingerprintCredit(0.01)
    credit.end_step(STEP_NS, 50 * STEP_NS)
    for _ in range(5):
        credit.end_step(STEP_NS, 0)
    assert credit.can_afford(1000)

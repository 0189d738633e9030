"""Time that pulses leave for fingerprints."""

from __future__ import annotations

from rankdump._core.recorder_protocol import TurnSpending
from rankdump._recorder.pulse_decisions import TurnCredit

STEP_NS = 100_000_000


def fingerprint(byte_count: int, tensors: int = 1) -> TurnSpending:
    return TurnSpending(byte_count, tensors)


def test_nothing_is_afforded_before_a_step_has_ended():
    assert not TurnCredit(0.01).can_afford(fingerprint(1))


def test_pulses_come_first():
    credit = TurnCredit(0.01)
    credit.end_step(STEP_NS, 1_000_000)
    assert not credit.can_afford(fingerprint(1))
    credit.end_step(STEP_NS, 800_000)
    # 0.2 ms at 2 ns a byte, without what each tensor takes.
    assert credit.can_afford(fingerprint(95_000))
    assert not credit.can_afford(fingerprint(95_000, tensors=2))
    assert not credit.can_afford(fingerprint(96_000))


def test_four_steps_are_saved_up_and_no_more():
    credit = TurnCredit(0.01)
    for _ in range(10):
        credit.end_step(STEP_NS, 0)
    assert credit.can_afford(fingerprint(1_990_000))
    assert not credit.can_afford(fingerprint(2_000_000))
    assert credit.is_too_much(fingerprint(2_000_000))
    assert not credit.is_too_much(fingerprint(1_990_000))


def test_what_is_spent_is_missing_and_changes_the_estimate():
    credit = TurnCredit(0.01)
    credit.end_step(STEP_NS, 0)
    credit.spend_fingerprint(400_000, 400_000)
    # 0.6 ms are left, and a byte now takes 1.75 ns.
    assert credit.can_afford(fingerprint(336_000))
    assert not credit.can_afford(fingerprint(338_000))
    credit.spend_fingerprint(10, 700_000)
    assert not credit.can_afford(fingerprint(0))


def test_a_debt_is_bounded():
    credit = TurnCredit(0.01)
    credit.end_step(STEP_NS, 50 * STEP_NS)
    for _ in range(5):
        credit.end_step(STEP_NS, 0)
    assert credit.can_afford(fingerprint(1000))


def test_copies_take_what_sending_them_takes_as_well():
    credit = TurnCredit(0.01)
    credit.end_step(STEP_NS, 0)
    # 1 ms at 0.5 ns a byte for the copy and 1 ns for the sender, without 10 us for the tensor.
    assert credit.can_afford(TurnSpending(copied_bytes=660_000, copies=1))
    assert not credit.can_afford(TurnSpending(copied_bytes=661_000, copies=1))
    assert not credit.can_afford(TurnSpending(100_000, 1, 600_000, 1))
    credit.spend_copy(400_000, 200_000)
    assert credit.can_afford(TurnSpending(copied_bytes=260_000, copies=1))
    assert not credit.can_afford(TurnSpending(copied_bytes=261_000, copies=1))
    assert credit.is_too_much(TurnSpending(copied_bytes=2_700_000, copies=1))
    assert not credit.is_too_much(TurnSpending(copied_bytes=2_600_000, copies=1))

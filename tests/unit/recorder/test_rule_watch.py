"""Conditions of watch rules, and which tensors they hold for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankdump._core.plan import WatchRule
from rankdump._core.record import TensorKind, TensorSide
from rankdump._recorder import pulse_decisions
from rankdump._recorder.pulse_decisions import RuleWatch, names_operator

NAME = "Default/network-Net/layer1-Sequential/0-Conv2d/Conv2d-op0"


def kind_of(name: str = NAME) -> TensorKind:
    return TensorKind(0, "Conv2d", name, TensorSide.OUTPUT, 0, "float32", (2, 3), 24)


def pulse(largest: float = 2.0, smallest: float = -1.0, squares: float = 4.0, *bad: int) -> Any:
    return (6, largest, smallest, 0.0, squares, *(bad or (0, 0, 0)), 1, 1, 4)


def judge(rule: WatchRule, *steps: Any) -> dict[int, str]:
    """Return the iterations in which a rule matched, with its text, of one pulse a step or more."""
    watch = RuleWatch([rule])
    watch.add_tensor(5, kind_of())
    found: dict[int, str] = {}
    for iteration, pulses in enumerate(steps):
        for each in pulses if isinstance(pulses, list) else [pulses]:
            for match in watch.judge(5, iteration, each):
                assert (match.rule, match.number, match.kind) == (rule, 0, kind_of())
                assert match.iteration == iteration
                assert iteration not in found
                found[iteration] = match.text.partition(": ")[2]
    return found


ZERO = pulse(0.0, 0.0, 0.0)


def test_non_finite_says_what_there_is():
    bad = pulse(math.nan, math.nan, math.nan, 2, 0, 1)
    assert judge(WatchRule("non_finite"), pulse(), bad, bad, pulse(), bad) == {
        1: "it has 2 NaN and 1 -inf",
        4: "it has 2 NaN and 1 -inf",
    }


def test_zero_wants_all_elements_zero():
    assert judge(WatchRule("zero"), pulse(), ZERO, pulse(0.0, -1.0)) == {
        1: "all of its elements are zero"
    }
    assert not judge(WatchRule("zero"), pulse(math.nan, math.nan, 0.0, 6, 0, 0))


@pytest.mark.parametrize("large", [pulse(9.0), pulse(1.0, -9.0), pulse(math.inf, 0.0, 1, 0, 1, 0)])
def test_too_large_takes_both_signs(large: Any):
    rule = WatchRule("too_large", value=8.5)
    assert list(judge(rule, pulse(8.5), large, pulse())) == [1]
    assert judge(rule, pulse(9.0))[0] == "its largest magnitude is 9, the limit is 8.5"


def test_jump_is_one_of_the_tensor_itself():
    usual = [pulse(squares=4.0 + at % 3) for at in range(20)]
    found = judge(WatchRule("jump"), *usual, pulse(squares=4e6), pulse(squares=5.0))
    assert found == {20: "its norm jumped to 2000"}
    assert not judge(WatchRule("jump"), *usual, pulse(squares=math.nan), pulse(squares=0.0))


def test_unchanged_counts_steps_with_one_pulse():
    same = [pulse(), pulse(), pulse(), pulse(), pulse(3.0), pulse(3.0)]
    assert list(judge(WatchRule("unchanged", steps=2), *same)) == [1, 5]
    assert judge(WatchRule("unchanged", steps=3), *same) == {
        2: "its pulse is unchanged in 3 steps in a row"
    }
    nothing = pulse(math.nan, math.nan, math.nan, 6, 0, 0)
    assert list(judge(WatchRule("unchanged", steps=2), nothing, nothing)) == [1]


def test_condition_must_be_met_in_steps_in_a_row():
    rule = WatchRule("zero", steps=3)
    steps = [ZERO, ZERO, pulse(), ZERO, ZERO, ZERO, ZERO]
    assert judge(rule, *steps) == {5: "all of its elements are zero in 3 steps in a row"}


def test_one_of_several_pulses_in_a_step_is_enough():
    rule = WatchRule("zero", steps=2)
    assert list(judge(rule, [ZERO, pulse()], [pulse(), ZERO, ZERO])) == [1]
    accumulated = [pulse(1.0), pulse(1.0)]
    assert not judge(WatchRule("unchanged", steps=2), accumulated, pulse(2.0))
    assert list(judge(WatchRule("unchanged", steps=2), accumulated, pulse(1.0))) == [1]


def test_steps_in_which_a_tensor_is_not_measured_do_not_count():
    watch = RuleWatch([WatchRule("zero", steps=2)])
    watch.add_tensor(0, kind_of())
    assert not watch.judge(0, 3, ZERO)
    assert [match.iteration for match in watch.judge(0, 20, ZERO)] == [20]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("Conv2d", True),
        ("Conv*", True),
        ("layer1.0", True),
        ("layer1.*", True),
        ("*/layer1-Sequential/*", True),
        (NAME, True),
        ("layer1", False),
        ("conv2d", False),
        ("Conv", False),
    ],
)
def test_operator_is_named_by_type_name_or_path(glob: str, expected: bool):
    assert names_operator(WatchRule("zero", ("nothing", glob)), "Conv2d", NAME) is expected


def test_gradients_are_named_by_their_own_name():
    rule = WatchRule("zero", ("Gradients/head.*",))
    assert names_operator(rule, "Parameter", "Gradients/head.weight")
    assert not names_operator(rule, "Parameter", "head.weight")


def test_rule_without_operators_names_none_and_holds_for_all():
    watch = RuleWatch([WatchRule("zero")])
    assert not watch.names_operator("Conv2d", NAME)
    watch.add_tensor(0, kind_of())
    assert watch.judge(0, 0, ZERO)
    assert not watch.judge(1, 0, ZERO)


def test_tensors_that_are_watched_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulse_decisions, "MAX_WATCHED_TENSORS", 2)
    watch = RuleWatch([WatchRule("zero")])
    for number in range(3):
        assert not watch.is_full
        watch.add_tensor(number, kind_of(f"a{number}"))
    assert watch.is_full
    assert len(watch.tensors) == 2

"""Watch rules of the black box: a condition on the pulses of operators, and what happens when it is
met. Pure: values; conditions are judged in `_recorder.rule_watch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

WatchCondition = Literal["non_finite", "jump", "zero", "unchanged", "too_large"]
WatchAction = Literal["note", "freeze", "dump"]
WATCH_CONDITIONS: tuple[WatchCondition, ...] = get_args(WatchCondition)
WATCH_ACTIONS: tuple[WatchAction, ...] = get_args(WatchAction)
MAX_RULES = 100
MAX_RULE_PATTERNS = 100
MAX_GLOB_CHARACTERS = 1000
MAX_RULE_STEPS = 4096
MIN_UNCHANGED_STEPS = 2


@dataclass(frozen=True, slots=True)
class WatchRule:
    """A rule of `rankdump.blackbox.watch`."""

    when: WatchCondition
    operators: tuple[str, ...] = ()
    """Globs over the type of an operator or its whole name, spelt in any way; these operators are
    measured in every step. Without any, the rule holds for every tensor in the steps in which it
    is measured."""
    value: float = 0.0
    """Of `too_large`: largest magnitude that is allowed."""
    steps: int = 1
    """Steps in a row in which the condition must be met, of those in which a tensor is measured;
    for `unchanged` the steps with one and the same pulse, two at least."""
    do: WatchAction = "note"
    iterations: int = 1
    """Of `dump`: iterations after the one in which the rule matches, of which tensors are kept."""


def describe_rule(rule: WatchRule, number: int) -> str:
    """Return the name of a rule: its place in the configuration and its condition."""
    return f"rankdump.blackbox.watch[{number}] ({rule.when})"


def check_rules(rules: tuple[WatchRule, ...]) -> None:
    """Raise ValueError for rules that no configuration has."""
    if len(rules) > MAX_RULES:
        raise ValueError(f"{len(rules)} watch rules, at most {MAX_RULES}")
    for rule in rules:
        if len(rule.operators) > MAX_RULE_PATTERNS or any(
            len(glob) > MAX_GLOB_CHARACTERS for glob in rule.operators
        ):
            raise ValueError("a watch rule has too many patterns of operators, or too long ones")
        if not math.isfinite(rule.value) or not 1 <= rule.steps <= MAX_RULE_STEPS:
            raise ValueError(f"a watch rule has the value {rule.value!r} and {rule.steps!r} steps")
        if not 1 <= rule.iterations <= MAX_RULE_STEPS:
            raise ValueError(f"a watch rule dumps {rule.iterations!r} iterations")

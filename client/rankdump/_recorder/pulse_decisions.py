"""Decisions of the black box on a rank: which part of the modules a step measures, what it may
spend on fingerprints and on copies of tensors in full, whether a norm has jumped, and which watch
rules a tensor matches. Pure: no clock, no disk, no network.

The rules of a tensor are found once for its kind, and a tensor without a rule costs one look-up.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from rankdump._core.black_box import is_far_above, pack_row
from rankdump._core.plan import (
    MAX_RULE_PATTERNS,
    MAX_RULES,
    MIN_UNCHANGED_STEPS,
    OperatorSelection,
    WatchRule,
    describe_rule,
)
from rankdump._core.record import TensorKind
from rankdump._core.recorder_protocol import TurnSpending
from rankdump._core.selection import list_spellings
from rankdump._kernels.kernel_functions import FoundMoments

MAX_STRIDE = 1024
MAX_STEPS_PER_TENSOR = 4
"""At least one of this many steps measures a tensor; with longer gaps, a fault would be found too
late.
"""
_ROOM_SHARE = 0.5
"""Fraction of the allowed share below which the stride is lowered."""
_TARGET_SHARE = 0.8

HISTORY_STEPS = 64
"""Maximum number of earlier norms that a new norm is compared with."""
MIN_HISTORY = 12
"""A norm is judged only after at least this many earlier norms."""


class StrideDecision(NamedTuple):
    """Stride of the next steps: the number of parts of the modules, of which each step measures
    one.
    """

    stride: int
    is_over_budget: bool = False
    """Whether measuring takes more than the allowed share although the stride cannot be raised."""


def choose_stride(
    stride: int, share: float, allowed: float, most: int = MAX_STRIDE
) -> StrideDecision:
    """Return the next stride, at most `most`, after steps in which measuring took `share` of the
    time.

    >>> choose_stride(1, 0.05, 0.01)
    StrideDecision(stride=7, is_over_budget=False)
    >>> choose_stride(7, 0.002, 0.01)
    StrideDecision(stride=2, is_over_budget=False)
    """
    wanted = ceil(stride * share / (allowed * _TARGET_SHARE)) if allowed > 0 else MAX_STRIDE
    if share > allowed:
        if stride >= most:
            return StrideDecision(stride, is_over_budget=True)
        return StrideDecision(min(max(wanted, stride + 1), most))
    if share < allowed * _ROOM_SHARE and stride > 1:
        return StrideDecision(min(max(wanted, 1), stride - 1))
    return StrideDecision(stride)


def choose_part(iteration: int, stride: int, tensors: int) -> int:
    """Return which part of a model with `tensors` tensors a step measures: the tensor with that
    number and every `stride`-th tensor after it. If there are more parts than tensors, the last
    part is empty, and some steps between those that measure a tensor measure none.

    >>> [choose_part(iteration, 4, 2) for iteration in range(6)]
    [0, 3, 1, 3, 0, 3]
    """
    steps_per_tensor = ceil(stride / tensors) if tensors else 1
    if steps_per_tensor == 1:
        return iteration % stride
    return stride - 1 if iteration % steps_per_tensor else iteration // steps_per_tensor % tensors


def has_jumped(earlier: Sequence[float], norm: float) -> bool:
    """Return whether a finite norm is far above the usual values of the earlier norms.

    >>> has_jumped([1.0, 1.1, 0.9] * 4, 50.0), has_jumped([1.0, 1.1, 0.9] * 4, 3.0)
    (True, False)
    """
    return is_far_above(earlier, norm, MIN_HISTORY)


_SAVED_STEPS = 4
"""Maximum number of steps whose unused share is saved: spending more at once would delay one step
too much.
"""
_FIRST_NS_PER_BYTE = 2.0
"""Assumed cost of a fingerprint, until the first one has been measured."""
_RATE_WEIGHT = 0.25
"""Weight of the latest measurement in the moving average of nanoseconds per byte."""
_MIN_RATED_BYTES = 1 << 12
"""Minimum size of a tensor whose time enters that average; for smaller tensors the fixed cost
dominates.
"""
_FIXED_NS = 10_000
"""Cost of one fingerprint or copy beside that of its bytes, however small the tensor is."""
_FIRST_COPY_NS_PER_BYTE = 0.5
"""Assumed cost of a copy, until the first one has been measured."""
_SEND_NS_PER_BYTE = 1.0
"""Cost of a copy in the sending thread, which runs beside the training thread."""


class TurnCredit:
    """Time that a rank may spend on fingerprints and copies now.

    The black box has a share of each step. Pulses are paid first; the rest of the share is saved
    for the fingerprints and copies of the tensors whose turn comes.
    """

    def __init__(self, allowed: float) -> None:
        """`allowed` is the share of a step that the black box may take."""
        self._allowed = allowed
        self._credit_ns = self._most_ns = 0.0
        self._ns_per_byte, self._copy_ns_per_byte = _FIRST_NS_PER_BYTE, _FIRST_COPY_NS_PER_BYTE

    def can_afford(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together may be made now."""
        return self._estimate_ns(spending) <= self._credit_ns

    def is_too_much(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together can never be afforded
        in one step.
        """
        return self._estimate_ns(spending) > self._most_ns

    def spend_fingerprint(self, byte_count: int, spent_ns: int) -> None:
        """Subtract the time of a fingerprint, and update the average time per byte."""
        self._credit_ns -= spent_ns
        if byte_count >= _MIN_RATED_BYTES:
            self._ns_per_byte += _RATE_WEIGHT * (spent_ns / byte_count - self._ns_per_byte)

    def spend_copy(self, byte_count: int, spent_ns: int) -> None:
        """Subtract the time of a copy and the time of sending it, and update the average time per
        byte.
        """
        self._credit_ns -= spent_ns + _SEND_NS_PER_BYTE * byte_count
        if byte_count >= _MIN_RATED_BYTES:
            self._copy_ns_per_byte += _RATE_WEIGHT * (
                spent_ns / byte_count - self._copy_ns_per_byte
            )

    def end_step(self, step_ns: int, pulses_ns: int) -> None:
        """Add the unused share of a step that took `step_ns` without the black box, and `pulses_ns`
        for pulses.
        """
        self._most_ns = _SAVED_STEPS * self._allowed * step_ns
        left_ns = self._credit_ns + self._allowed * step_ns - pulses_ns
        self._credit_ns = min(max(left_ns, -self._most_ns), self._most_ns)

    def _estimate_ns(self, spending: TurnSpending) -> float:
        byte_count, fingerprints, copied_bytes, copies = spending
        return (
            _FIXED_NS * (fingerprints + copies)
            + self._ns_per_byte * byte_count
            + (self._copy_ns_per_byte + _SEND_NS_PER_BYTE) * copied_bytes
        )


MAX_WATCHED_TENSORS = 1 << 14
"""Maximum number of tensors of a rank with watch rules: each of them keeps a history."""


class RuleMatch(NamedTuple):
    """A watch rule whose condition a tensor has met."""

    rule: WatchRule
    number: int
    """Number of the rule in the plan."""
    kind: TensorKind
    iteration: int
    text: str
    """Sentence about the match, without the tensor's name."""

    def describe(self) -> str:
        """Return the sentence about the match, with the tensor's name."""
        kind = self.kind
        return f"{self.text} ({kind.side.value} {kind.slot} of {kind.op_name})"


class WatchedTensor:
    """One watch rule applied to one tensor, with the history of earlier pulses."""

    def __init__(self, rule: WatchRule, number: int, kind: TensorKind) -> None:
        self._rule, self.number, self.kind = rule, number, kind
        self._condition = _CONDITIONS[rule.when](rule)
        least = MIN_UNCHANGED_STEPS if rule.when == "unchanged" else 1
        # Two equal pulses take two steps, so the condition `unchanged` is met first in the second
        # step.
        self._needed = max(rule.steps, least) - least + 1
        self._measured_in = self._measured_before = self._met_in = -1
        self._met_steps = 0

    def judge(self, iteration: int, moments: FoundMoments) -> RuleMatch | None:
        """Return the match if the condition has now been met in the number of consecutive steps
        that the rule requires. If a step has several pulses, one of them is enough.
        """
        is_first = iteration != self._measured_in
        if is_first:
            self._measured_in, self._measured_before = iteration, self._measured_in
        found = self._condition.find(moments, is_first=is_first)
        if not found or self._met_in == iteration:
            return None
        goes_on = self._met_in == self._measured_before and self._met_in >= 0
        self._met_steps = self._met_steps + 1 if goes_on else 1
        self._met_in = iteration
        if self._met_steps != self._needed:
            return None
        again = f" in {self._rule.steps} steps in a row" if self._rule.steps > 1 else ""
        text = f"{describe_rule(self._rule, self.number)}: {found}{again}"
        return RuleMatch(self._rule, self.number, self.kind, iteration, text)


class RuleWatch:
    """The watch rules of a plan, applied to all tensors of a rank."""

    def __init__(self, rules: Sequence[WatchRule]) -> None:
        self._rules = rules
        self.tensors: dict[int, list[WatchedTensor]] = {}
        """Watched tensors by the number of their kind; tensors without a rule are left out."""
        self._unmatched = dict(enumerate(rules))
        self.is_full = False
        """Whether some tensors with a rule are not watched because there are too many."""

    def add_tensor(self, number: int, kind: TensorKind) -> None:
        """Find the rules that match the tensors of this kind, and note them under its number."""
        found = [
            (place, rule)
            for place, rule in enumerate(self._rules)
            if not rule.operators or names_operator(rule, kind.op_type, kind.op_name)
        ]
        if found and len(self.tensors) >= MAX_WATCHED_TENSORS:
            self.is_full = True
            return
        if found:
            self.tensors[number] = [WatchedTensor(rule, place, kind) for place, rule in found]
        for place, _ in found:
            self._unmatched.pop(place, None)

    def names_operator(self, op_type: str, op_name: str) -> bool:
        """Return whether any rule names an operator, which is then measured in every step."""
        return any(names_operator(rule, op_type, op_name) for rule in self._rules)

    def judge(self, number: int, iteration: int, moments: FoundMoments) -> list[RuleMatch]:
        """Return the matches of a pulse whose kind has this number."""
        found = (each.judge(iteration, moments) for each in self.tensors.get(number, ()))
        return [match for match in found if match is not None]

    def select_operators(self, rule: int) -> OperatorSelection:
        """Return the operators that a rule names; all operators if it names none."""
        if not self._rules[rule].operators:
            return OperatorSelection()
        names = [
            each.kind.op_name
            for watched in self.tensors.values()
            for each in watched
            if each.number == rule
        ]
        return OperatorSelection(everything=False, names=tuple(dict.fromkeys(names)))

    def list_unmatched(self) -> list[str]:
        """Return a sentence for each rule that matches no tensor that was measured."""
        return [
            f"{describe_rule(rule, place)} matched nothing: the black box measured no tensor of "
            f"the operators {', '.join(rule.operators)}"
            for place, rule in self._unmatched.items()
        ]


def names_operator(rule: WatchRule, op_type: str, op_name: str) -> bool:
    """Return whether one of the globs of a rule matches an operator.

    >>> rule = WatchRule("zero", ("layer1.*",))
    >>> names_operator(rule, "Conv2d", "Default/network-Net/layer1-Sequential/0-Conv2d/Conv2d-op0")
    True
    """
    spellings = (op_type, *list_spellings(op_name))
    return any(_compile_glob(glob).match(each) for glob in rule.operators for each in spellings)


@lru_cache(maxsize=MAX_RULES * MAX_RULE_PATTERNS)
def _compile_glob(glob: str) -> re.Pattern[str]:
    return re.compile(translate(glob))


class _PulseCondition(ABC):
    """A condition on the pulses of one tensor."""

    def __init__(self, rule: WatchRule) -> None:
        self._rule = rule

    @abstractmethod
    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        """Return a description of the pulse if it meets the condition, else an empty text.

        `is_first` says that it is the tensor's first pulse in the step.
        """


class _NonfiniteCondition(_PulseCondition):
    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        if not any(moments[5:8]):
            return ""
        nans, above, below = moments[5:8]
        counts = (nans, "NaN"), (above, "+inf"), (below, "-inf")
        return "it has " + " and ".join(f"{count:,} {name}" for count, name in counts if count)


class _ZeroCondition(_PulseCondition):
    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        is_zero = moments[1] == moments[2] == 0 and not any(moments[5:8])
        return "all of its elements are zero" if is_zero else ""


class _SizeCondition(_PulseCondition):
    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        largest = max(abs(moments[1]), abs(moments[2]))
        if moments[6] or moments[7]:
            largest = math.inf
        if not largest > self._rule.value:
            return ""
        return f"its largest magnitude is {largest:g}, the limit is {self._rule.value:g}"


class _JumpCondition(_PulseCondition):
    def __init__(self, rule: WatchRule) -> None:
        super().__init__(rule)
        self._norms: deque[float] = deque(maxlen=HISTORY_STEPS)

    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        if not moments[4] > 0 or math.isinf(moments[4]):
            return ""
        norm = math.sqrt(moments[4])
        jumped = has_jumped(self._norms, norm)
        self._norms.append(norm)
        return f"its norm jumped to {norm:g}" if jumped else ""


class _SameCondition(_PulseCondition):
    def __init__(self, rule: WatchRule) -> None:
        super().__init__(rule)
        self._before = b""

    def find(self, moments: FoundMoments, *, is_first: bool) -> str:
        if not is_first:
            return ""
        before, self._before = self._before, pack_row(0, moments)
        return "its pulse is unchanged" if self._before == before else ""


_CONDITIONS: dict[str, Callable[[WatchRule], _PulseCondition]] = {
    "non_finite": _NonfiniteCondition,
    "jump": _JumpCondition,
    "zero": _ZeroCondition,
    "unchanged": _SameCondition,
    "too_large": _SizeCondition,
}

"""Values of the black box: what a rank measures of every step without being asked, why the ring of
the latest steps is frozen, and which ranks others wait for then. Pure.

All members of a group call its collectives in the same order, so a rank that has called fewer of
them than another one is where that one waits. A number is alarming when it is far above those that
are usual: earlier ones of a rank, or those of its peers.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite, log
from statistics import median
from typing import NamedTuple

import numpy as np

from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.record import TensorKind
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._kernels.kernel_functions import FoundMoments

MAX_GROUP_CALLS = 64
"""Groups that a step has, those that were used last."""
MIN_WAIT_US = 2_000_000
"""A call that is younger may just be on its way on the other members."""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """How far a rank has come in the collectives of one group."""

    group: str
    ranks: tuple[int, ...]
    """Members of the group; empty where they are not known."""
    count: int
    """Collectives that it has called since its process began."""
    kind: str
    """Kind of the last one, as `all_reduce`."""
    called_us: int
    """When it called that, in microseconds since the epoch on its clock."""


@dataclass(frozen=True, slots=True)
class RankCallCounts:
    """The calls of a rank at a time."""

    rank: int
    at_us: int
    """On the clock of the rank."""
    is_waiting: bool
    """Whether its step had not ended, so that it may wait in its last call."""
    calls: tuple[GroupCalls, ...]


@dataclass(frozen=True, slots=True)
class StandingCall:
    """The last collective that ranks called, and in which they may wait."""

    group: str
    kind: str
    number: int
    """Among the collectives of the group, from 0."""
    waiting: tuple[int, ...]
    waited_us: int
    """How long the first of them had waited."""
    missing: Mapping[int, int]
    """Members that have not called it, with the count of those that they have called."""
    unknown: tuple[int, ...] = ()
    """Members of which nothing is known."""

    def describe(self) -> str:
        """Return a sentence."""
        call = f"{self.kind} number {self.number} of group {self.group!r}"
        text = (
            f"{name_first_ranks(self.waiting)} called {call} {self.waited_us / 1e6:.0f} s before "
            "the freeze and none after it"
        )
        if self.missing:
            is_one = len(self.missing) == 1
            text += f"; {name_first_ranks(tuple(self.missing))} {'has' if is_one else 'have'} not "
            text += f"called it: {'it' if is_one else 'they'} called {self._describe_called()}"
        elif not self.unknown:
            text += "; all its members have called it"
        if self.unknown:
            text += f"; nothing is known of {name_first_ranks(self.unknown)}"
        return text

    def _describe_called(self) -> str:
        """Return how many of the calls before this one the missing members have called."""
        if not self.number:
            return "no collective of the group"
        before = "the one collective" if self.number == 1 else f"the {self.number} collectives"
        fewest, most = min(self.missing.values()), max(self.missing.values())
        if fewest == self.number:
            return f"{before} before it"
        called = f"{fewest} to {most}" if fewest != most else f"{fewest}" if fewest else "none"
        return f"{called} of {before} before it"


def find_standing_calls(ranks: Sequence[RankCallCounts]) -> list[StandingCall]:
    """Return the collectives in which ranks may wait: first those whose missing members wait in
    none themselves.

    A rank may wait in the last collective that it has called at all; what it has called in other
    groups before is over. One that all members have called explains nothing where another one has
    missing members: these called it last, and are somewhere else since.
    """
    found = list(_iterate_standing_calls(ranks))
    open_calls = [each for each in found if each.missing or each.unknown] or found
    held = {rank for each in open_calls for rank in each.waiting}
    return sorted(
        open_calls,
        key=lambda each: (not each.missing, len(held & each.missing.keys()), -each.waited_us),
    )


def _iterate_standing_calls(ranks: Sequence[RankCallCounts]) -> Iterator[StandingCall]:
    members: defaultdict[str, dict[int, GroupCalls]] = defaultdict(dict)
    waiting: defaultdict[tuple[str, int], list[RankCallCounts]] = defaultdict(list)
    for each in ranks:
        for calls in each.calls:
            members[calls.group][each.rank] = calls
        last = max(each.calls, key=lambda calls: calls.called_us, default=None)
        if last is not None and each.is_waiting and each.at_us - last.called_us >= MIN_WAIT_US:
            waiting[last.group, last.count].append(each)
    for (group, count), waits in waiting.items():
        known = members[group]
        own = known[waits[0].rank]
        yield StandingCall(
            group,
            own.kind,
            count - 1,
            tuple(sorted(each.rank for each in waits)),
            max(each.at_us - known[each.rank].called_us for each in waits),
            {rank: calls.count for rank, calls in sorted(known.items()) if calls.count < count},
            tuple(sorted(set(own.ranks) - known.keys())),
        )


PULSE_ROW = np.dtype(
    [
        ("kind", "<u4"),
        ("maximum", "<f8"),
        ("minimum", "<f8"),
        ("squares", "<f8"),
        ("nan", "<u4"),
        ("positive_inf", "<u4"),
        ("negative_inf", "<u4"),
    ]
)
"""Pulse of one tensor: the number of its kind, maximum, minimum and sum of squares as in tables of
statistics, and counts of elements that are not finite, which end at 2^32 - 1. Of a tensor on an
accelerator the counts are 0 or 1, for none and for any."""
MAX_STEP_ROWS = 1 << 16
"""Most pulses of one step."""
DETAIL_ROW = np.dtype(
    [
        ("row", "<u4"),
        ("total", "<f8"),
        ("positives", "<u8"),
        ("negatives", "<u8"),
        ("zeros", "<u8"),
        ("fingerprint", f"V{FINGERPRINT_BYTES}"),
    ]
)
"""What a step has of some of its tensors beside their pulse: the number of the row, the sum of
all elements, how many are above, below and equal to zero, and the fingerprint."""
MAX_STEP_DETAILS = 1 << 12
"""Most of them in one step."""
MAX_STEP_NOTES = 64
"""Most notes of one step."""
_TENSOR_BYTES = 4096
"""What a tensor in full takes besides its elements: memory, and about as much on the disk, so that
tiny ones do not become files without number."""
_PACK_ROW = struct.Struct("<IdddIII").pack
assert PULSE_ROW.itemsize == struct.calcsize("<IdddIII")
_MAX_COUNT = (1 << 32) - 1
_PACK_DETAIL = struct.Struct("<IdQQQ").pack
assert DETAIL_ROW.itemsize == struct.calcsize("<IdQQQ") + FINGERPRINT_BYTES


class FaultKind(str, Enum):
    """Why a ring is frozen."""

    NON_FINITE = "non_finite"
    JUMP = "jump"
    EXCEPTION = "exception"
    LOST_RANK = "lost_rank"
    NO_STEP = "no_step"
    WAIT = "wait"
    OUTLIER = "outlier"
    WATCH = "watch"
    """A watch rule matched."""
    REQUEST = "request"


def pack_row(number: int, moments: FoundMoments) -> bytes:
    """Return the bytes of a row of `PULSE_ROW`."""
    _, maximum, minimum, _, squares, nan, positive, negative, *_ = moments
    if nan or positive or negative:
        counts = [min(count, _MAX_COUNT) for count in (nan, positive, negative)]
        return _PACK_ROW(number, maximum, minimum, squares, *counts)
    return _PACK_ROW(number, maximum, minimum, squares, 0, 0, 0)


def pack_detail(row: int, moments: FoundMoments, fingerprint: bytes) -> bytes:
    """Return the bytes of a row of `DETAIL_ROW`."""
    return _PACK_DETAIL(row, moments[3], *moments[8:11]) + fingerprint


@dataclass(frozen=True, slots=True)
class StepCause:
    """What a step was computed from."""

    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss`, `learning_rate.0`, and what the script noted."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """`batch.0`, `random.cpu`: xxh3-64 in hexadecimal digits."""


class StepState(NamedTuple):
    """What the black box keeps of one step of a rank."""

    iteration: int
    started_us: int
    ended_us: int
    """Microseconds since the epoch on the rank's clock."""
    rows: bytes
    """Elements of `PULSE_ROW` in the order in which they were measured."""
    cause: StepCause = StepCause()
    skipped: int = 0
    """Tensors that were not measured, because of the budget."""
    unfinished: bool = False
    """Whether the step had not ended."""
    stacks: tuple[str, ...] = ()
    """Stacks of the threads of the process, innermost call first."""
    notes: tuple[str, ...] = ()
    """What watch rules noted, a sentence each."""
    details: bytes = b""
    """Elements of `DETAIL_ROW`; their rows rise."""
    calls: tuple[GroupCalls, ...] = ()
    """How far the rank has come in the collectives of its groups."""
    left_out: int = 0
    """Tensors that were to be kept in full, and for which the budgets had no room."""


class StepTensor(NamedTuple):
    """A tensor of a step in full."""

    iteration: int
    kind: TensorKind
    data: bytes | bytearray
    """The elements in C order, little endian; they do not change any more."""
    row: int | None = None
    """Number of its row in the step; None for one that was not measured, such as an input."""
    about_fault: bool = False
    """It is the first one of its step that is not finite, or an input of its operator."""


def compute_tensor_bytes(byte_count: int) -> int:
    """Return how much of `tensor_bytes` a tensor of that size takes."""
    return byte_count + _TENSOR_BYTES


@dataclass(frozen=True, slots=True)
class RankStep:
    """Numbers of one finished step of a rank, to be compared with those of its peers."""

    job_id: str
    rank: int
    attempt: int
    iteration: int
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class FaultNotice:
    """What a rank found wrong."""

    kind: FaultKind
    iteration: int
    text: str
    """A sentence."""
    tensor_kind: TensorKind | None = None
    """The tensor that it is about."""
    source: str = ""
    """`file:line` of the call in the script; empty when it is not known."""


@dataclass(frozen=True, slots=True)
class FreezeNotice:
    """Notice to a rank that its ring was frozen."""

    iteration: int
    text: str
    """A sentence for the rank's log."""
    wants_stacks: bool = False


_FAR_DEVIATIONS = 10.0
_FAR_FACTOR = 10.0
"""Numbers that hardly differ have a deviation near zero, so a number is ten times as large too."""
_DEVIATION_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def is_far_above(usual: Sequence[float], number: float, least: int) -> bool:
    """Return whether a finite number is far above the usual ones, of which there are `least`.

    They are compared by their logarithms: median and median absolute deviation, which a few
    outliers among the usual ones do not move. Only positive finite ones count.

    >>> is_far_above([1.0, 1.1, 0.9] * 4, 50.0, 12), is_far_above([1.0, 1.1, 0.9] * 4, 3.0, 12)
    (True, False)
    """
    # Cheap, and true of nearly all: the median is not below the smallest one.
    smallest = min(usual, default=0.0)
    if smallest > 0 and number <= _FAR_FACTOR * smallest:
        return False
    logs = [log(each) for each in usual if each > 0 and isfinite(each)]
    if len(logs) < least or not isfinite(number) or number <= 0:
        return False
    middle = median(logs)
    deviation = _DEVIATION_SCALE * median(abs(each - middle) for each in logs)
    above = log(number) - middle
    return above > log(_FAR_FACTOR) and above > _FAR_DEVIATIONS * deviation

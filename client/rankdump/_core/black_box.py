"""Values of the black box: the measurements that a rank makes in every step, the reasons for which
the ring of the latest steps is frozen, and the ranks that others wait for at that time. Pure.

All members of a group call its collectives in the same order. So if a rank waits in a collective,
members that have called fewer collectives of the group have not arrived there. A number is alarming
if it is far above the usual numbers: earlier ones of the rank, or those of its peers.
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
"""Maximum number of groups that a step reports: those that were used last."""
MIN_WAIT_US = 2_000_000
"""Microseconds that a call must have lasted before it counts as a wait: the other members may just
be about to make it.
"""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """Progress of a rank in the collectives of one group."""

    group: str
    ranks: tuple[int, ...]
    """Global ranks of the members of the group; empty if they are not known."""
    count: int
    """Number of the group's collectives that the rank has called since its process began."""
    kind: str
    """Kind of the last collective that it called, such as `all_reduce`."""
    called_us: int
    """Time of that call in microseconds since the epoch on the rank's clock."""


@dataclass(frozen=True, slots=True)
class RankCallCounts:
    """Progress of a rank in all of its groups at one time."""

    rank: int
    at_us: int
    """Time in microseconds since the epoch on the rank's clock."""
    is_waiting: bool
    """Whether the step of the rank had not ended, so that it may wait in its last call."""
    calls: tuple[GroupCalls, ...]


@dataclass(frozen=True, slots=True)
class StandingCall:
    """The last collective that some ranks have called, in which they may wait."""

    group: str
    kind: str
    number: int
    """Number of the collective in its group, from 0."""
    waiting: tuple[int, ...]
    waited_us: int
    """Microseconds for which the rank that called first has waited."""
    missing: Mapping[int, int]
    """Members that have not called it, each with the number of the group's collectives that it has
    called.
    """
    unknown: tuple[int, ...] = ()
    """Members whose progress is unknown."""

    def describe(self) -> str:
        """Return the call as a sentence: who waits, and for whom."""
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
        """Return how many of the earlier collectives the missing members have called."""
        if not self.number:
            return "no collective of the group"
        before = "the one collective" if self.number == 1 else f"the {self.number} collectives"
        fewest, most = min(self.missing.values()), max(self.missing.values())
        if fewest == self.number:
            return f"{before} before it"
        called = f"{fewest} to {most}" if fewest != most else f"{fewest}" if fewest else "none"
        return f"{called} of {before} before it"


def find_standing_calls(ranks: Sequence[RankCallCounts]) -> list[StandingCall]:
    """Return the collectives in which ranks may wait; those whose missing members wait nowhere
    themselves come first.

    A rank can only wait in the last collective that it has called in any group. A collective that
    all members have called explains nothing if another collective has missing members: the members
    called the complete one last and have gone on since.
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
"""Pulse of one tensor: the number of its kind; maximum, minimum and sum of squares as in tables of
statistics; and counts of NaN and infinities, which end at 2^32 - 1. For a tensor on an accelerator
a count is only 0 (none) or 1 (some).
"""
MAX_STEP_ROWS = 1 << 16
"""Maximum number of pulses in one step."""
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
"""Details of some tensors of a step, in addition to their pulses: the index of the pulse, the sum
of all elements, the counts of elements above, below and equal to zero, and the fingerprint.
"""
MAX_STEP_DETAILS = 1 << 12
"""Maximum number of such details in one step."""
MAX_STEP_NOTES = 64
"""Maximum number of notes of watch rules in one step."""
_TENSOR_BYTES = 4096
"""Bytes that a full tensor is charged in addition to its elements: its memory, and about as much on
the disk, so that very small tensors do not become an unlimited number of files.
"""
_PACK_ROW = struct.Struct("<IdddIII").pack
assert PULSE_ROW.itemsize == struct.calcsize("<IdddIII")
_MAX_COUNT = (1 << 32) - 1
_PACK_DETAIL = struct.Struct("<IdQQQ").pack
assert DETAIL_ROW.itemsize == struct.calcsize("<IdQQQ") + FINGERPRINT_BYTES


class FaultKind(str, Enum):
    """Reason why a ring is frozen."""

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
    """Inputs of a step, apart from the model's code: numbers and digests."""

    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name: `loss`, `learning_rate.0`, and those that the script noted."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests by name, such as `batch.0` or `random.cpu`: xxh3-64 in hexadecimal digits."""


class StepState(NamedTuple):
    """State of one step of a rank, as the black box keeps it."""

    iteration: int
    started_us: int
    ended_us: int
    """Time in microseconds since the epoch on the rank's clock."""
    rows: bytes
    """Rows of type `PULSE_ROW` in the order in which they were measured."""
    cause: StepCause = StepCause()
    skipped: int = 0
    """Number of tensors that were not measured because of the time budget."""
    unfinished: bool = False
    """Whether the step had not ended when the state was taken."""
    stacks: tuple[str, ...] = ()
    """Stacks of the threads of the process, innermost call first."""
    notes: tuple[str, ...] = ()
    """Notes of watch rules, one sentence each."""
    details: bytes = b""
    """Rows of type `DETAIL_ROW`, in ascending order of the pulses that they belong to."""
    calls: tuple[GroupCalls, ...] = ()
    """How far the rank has come in the collectives of its groups."""
    left_out: int = 0
    """Number of tensors that were to be kept in full but for which the budgets had no room."""


class StepTensor(NamedTuple):
    """All elements of one tensor of a step."""

    iteration: int
    kind: TensorKind
    data: bytes | bytearray
    """The elements in C order, little endian; they are not changed any more."""
    row: int | None = None
    """Index of the tensor's pulse in the step; None for a tensor without pulse, such as
    an input.
    """
    about_fault: bool = False
    """Whether it is the first tensor of its step that is not finite, or an input of that tensor's
    operator.
    """


def compute_tensor_bytes(byte_count: int) -> int:
    """Return how many bytes of the budget `tensor_bytes` a tensor of this size takes."""
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
    """Notice to a rank that its ring has been frozen."""

    iteration: int
    text: str
    """A sentence for the rank's log."""
    wants_stacks: bool = False


_FAR_DEVIATIONS = 10.0
_FAR_FACTOR = 10.0
"""Least ratio of a number to the median for it to be far above: numbers that hardly differ have a
deviation near zero, so the deviation alone is not enough.
"""
_DEVIATION_SCALE = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""


def is_far_above(usual: Sequence[float], number: float, least: int) -> bool:
    """Return whether a finite number is far above the usual numbers; False if these are fewer than
    `least`.

    The logarithms are compared with median and median absolute deviation, which a few outliers
    among the usual numbers do not move. Only positive finite numbers count as usual.

    >>> is_far_above([1.0, 1.1, 0.9] * 4, 50.0, 12), is_far_above([1.0, 1.1, 0.9] * 4, 3.0, 12)
    (True, False)
    """
    # This cheap test settles nearly all cases: the median is not below the smallest number.
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

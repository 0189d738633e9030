"""Values of the black box: what a rank measures of every step without being asked, and why the ring
of the latest steps is frozen. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from rankdump._core.collective_calls import GroupCalls
from rankdump._core.record import TensorKind
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._kernels.kernel_functions import FoundMoments

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

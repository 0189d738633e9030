"""Values of the black box: what a rank measures of every step without being asked, and why the ring
of the latest steps is frozen. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from rankdump._core.record import TensorKind

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


class FaultKind(str, Enum):
    """Why a ring is frozen."""

    NON_FINITE = "non_finite"
    JUMP = "jump"
    EXCEPTION = "exception"
    LOST_RANK = "lost_rank"
    NO_STEP = "no_step"
    WAIT = "wait"
    OUTLIER = "outlier"
    REQUEST = "request"


@dataclass(frozen=True, slots=True)
class StepCause:
    """What a step was computed from."""

    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss`, `learning_rate.0`, and what the script noted."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """`batch.0`, `random.cpu`: xxh3-64 in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What the black box keeps of one step of a rank."""

    iteration: int
    started_us: int
    ended_us: int
    """Microseconds since the epoch on the rank's clock."""
    rows: bytes
    """Elements of `PULSE_ROW` in the order in which they were measured."""
    cause: StepCause = field(default_factory=StepCause)
    skipped: int = 0
    """Tensors that were not measured, because of the budget."""
    unfinished: bool = False
    """Whether the step had not ended."""
    stacks: tuple[str, ...] = ()
    """Stacks of the threads of the process, innermost call first."""


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

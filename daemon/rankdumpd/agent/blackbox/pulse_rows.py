"""Pulses of a step, converted to rows of a table of statistics, and the summary of a step. Pure.

A pulse has the extremes and the sum of squares of finite elements only. A table has the statistics
of all elements, where a NaN or an infinity makes the result NaN or infinite, as `_core.statistics`
defines it. Columns that need details are empty for tensors without details.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from rankdump._core.black_box import DETAIL_ROW, PULSE_ROW, StepState
from rankdump._core.freeze_record import FrozenStep, NonfiniteTensor
from rankdump._core.record import TensorKind
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.statistics import make_statistics_form
from rankdump._kernels.element_moments import ElementMoments
from rankdump._layout.statistic_tables import StatisticRow
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_PULSE_STATISTICS = (
    "max",
    "min",
    "l2norm",
    "count",
    "nan count",
    "negative inf count",
    "positive inf count",
)
_DETAIL_STATISTICS = ("avg", "negative zero count", "positive zero count", "zero count")
FROZEN_STATISTICS = (*_PULSE_STATISTICS, *_DETAIL_STATISTICS)
"""Columns of the tables in a frozen tree."""
PulseRows: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
PulseTuple: TypeAlias = "tuple[int, float, float, float, int, int, int]"
"""The fields of `PULSE_ROW`, in their order."""


def read_pulses(state: StepState) -> PulseRows:
    """Return the pulses of a step as an array that shares their memory."""
    return np.frombuffer(state.rows, PULSE_ROW)


class TensorDetail(NamedTuple):
    """Values of a tensor beyond its pulse, which only some tensors of a step have: the fields of
    `DETAIL_ROW`.
    """

    total: float
    positives: int
    negatives: int
    zeros: int
    fingerprint: bytes


def read_details(state: StepState) -> dict[int, TensorDetail]:
    """Return the details of a step by row number, in rising order."""
    found = np.frombuffer(state.details, DETAIL_ROW).tolist()
    return {row: TensorDetail(*rest) for row, *rest in cast("list[tuple[Any, ...]]", found)}


def list_timestamps(state: StepState, after_us: int, more: int = 0) -> range:
    """Return a time stamp for each row of a step and for `more` tensors; time stamps increase, and
    all are above `after_us`.
    """
    first = max(after_us + 1, state.started_us)
    return range(first, first + len(state.rows) // PULSE_ROW.itemsize + more)


def iter_table_rows(
    state: StepState,
    details: Mapping[int, TensorDetail],
    kinds: Sequence[TensorKind],
    timestamps_us: Sequence[int],
) -> Iterator[StatisticRow]:
    """Yield the rows of a table with the columns of `FROZEN_STATISTICS`."""
    whole, short = map(make_statistics_form, (FROZEN_STATISTICS, _PULSE_STATISTICS))
    blanks = "," * len(_DETAIL_STATISTICS)
    pulses = _list_tuples(read_pulses(state))
    for row, (pulse, timestamp_us) in enumerate(zip(pulses, timestamps_us, strict=True)):
        kind, detail = kinds[pulse[0]], details.get(row)
        moments = _make_moments(pulse, math.prod(kind.shape))
        if detail is None:
            yield kind, timestamp_us, short.write(moments) + blanks
        else:
            yield kind, timestamp_us, whole.write(_add_detail(moments, detail))


def _make_moments(pulse: PulseTuple, size: int) -> ElementMoments:
    _, maximum, minimum, squares, nans, above, below = pulse
    if nans:
        maximum = minimum = squares = math.nan
    elif above or below:
        maximum = math.inf if above else -math.inf if math.isnan(maximum) else maximum
        minimum = -math.inf if below else math.inf if math.isnan(minimum) else minimum
        squares = math.inf
    return ElementMoments(
        size=size,
        maximum=maximum,
        minimum=minimum,
        squares=max(squares, 0.0),
        nans=nans,
        positive_infinities=above,
        negative_infinities=below,
    )


def _add_detail(moments: ElementMoments, detail: TensorDetail) -> ElementMoments:
    above, below = moments.positive_infinities, moments.negative_infinities
    total = detail.total
    if moments.nans or (above and below):
        total = math.nan
    elif above or below:
        total = math.inf if above else -math.inf
    return moments._replace(
        total=total,
        positives=detail.positives,
        negatives=detail.negatives,
        zeros=detail.zeros,
    )


def _list_tuples(pulses: PulseRows) -> list[PulseTuple]:
    return cast("list[PulseTuple]", pulses.tolist())


def summarize_step(
    state: StepState,
    kinds: Sequence[TensorKind],
    timestamps_us: Sequence[int],
    full_tensors: int = 0,
) -> FrozenStep:
    """Return the summary of a step for the record of a freeze; `full_tensors` is the number of the
    step's full tensors.
    """
    pulses = read_pulses(state)
    bad = _find_nonfinite(pulses)
    gradients = [_is_gradient(kinds[pulse[0]]) for pulse in _list_tuples(pulses)]
    return FrozenStep(
        iteration=state.iteration,
        started_us=state.started_us,
        ended_us=state.ended_us,
        tensors=len(pulses),
        fingerprints=len(state.details) // DETAIL_ROW.itemsize,
        nonfinite=len(bad),
        first_nonfinite=_describe_first(pulses, bad, kinds, timestamps_us),
        gradient_norm=_measure_norm(pulses[np.array(gradients, bool)]),
        largest=_find_largest(pulses),
        full_tensors=full_tensors,
        left_out=state.left_out,
        skipped=state.skipped,
        unfinished=state.unfinished,
        numbers={name: repr(number) for name, number in state.cause.numbers.items()},
        digests=state.cause.digests,
        stacks=state.stacks,
        notes=state.notes,
        calls=state.calls,
    )


def _find_nonfinite(pulses: PulseRows) -> list[int]:
    counts = pulses["nan"], pulses["positive_inf"], pulses["negative_inf"]
    places = np.flatnonzero((counts[0] > 0) | (counts[1] > 0) | (counts[2] > 0))
    return cast("list[int]", places.tolist())


def _describe_first(
    pulses: PulseRows,
    bad: Sequence[int],
    kinds: Sequence[TensorKind],
    timestamps_us: Sequence[int],
) -> NonfiniteTensor | None:
    if not bad:
        return None
    place = bad[0]
    number, _, _, _, nans, above, below = _list_tuples(pulses[place : place + 1])[0]
    kind = kinds[number]
    return NonfiniteTensor(
        kind.op_type,
        kind.op_name,
        kind.side.value,
        kind.slot,
        kind.argument,
        nans,
        above + below,
        timestamps_us[place],
        place,
    )


def _is_gradient(kind: TensorKind) -> bool:
    """Return whether a kind belongs to the gradient of a parameter."""
    return kind.op_type == PARAMETER_OP_TYPE and kind.op_name.startswith(GRADIENTS_PREFIX)


def _measure_norm(pulses: PulseRows) -> str:
    """Return the norm of several tensors together; empty if there are none."""
    if not len(pulses):
        return ""
    if pulses["nan"].any():
        return repr(math.nan)
    if pulses["positive_inf"].any() or pulses["negative_inf"].any():
        return repr(math.inf)
    return repr(math.sqrt(max(float(pulses["squares"].sum()), 0.0)))


def _find_largest(pulses: PulseRows) -> str:
    extremes = np.concatenate((pulses["maximum"], pulses["minimum"]))
    known = np.abs(extremes[~np.isnan(extremes)])
    return repr(float(known.max())) if len(known) else ""

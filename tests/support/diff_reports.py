"""Comparison reports, made by hand: nothing is read or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    ComparisonSettings,
    DifferenceMeasures,
    DivergenceOrigin,
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    SuspectCall,
    TensorPair,
    TensorVerdict,
)
from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide

LAYERS = tuple(f"Default/network-Net/layers-ModuleList/{n}-Linear/Linear-op0" for n in range(6))
"""Operators of the usual report, in execution order."""
SOURCE = (
    SourceLine("/job/train.py", 41, "<module>", "loss = net(batch)"),
    SourceLine("/job/net.py", 17, "forward", "x = layer(x)"),
)
NAN = math.nan


def measures(
    error: float = 0.0, *, count: int = 64, unequal: int | None = None
) -> DifferenceMeasures:
    """What two tensors of 64 elements come to that are that far apart."""
    return DifferenceMeasures(
        count=count,
        unequal=(count // 2 if error else 0) if unequal is None else unequal,
        max_absolute=error,
        max_relative=error * 2,
        mean_absolute=error / 3,
        mean_relative=error / 2,
        cosine=1 - error,
        rmse=error / 2.5,
        relative_euclidean=error / 1.5,
        kl_divergence=NAN,
        mean_absolute_unequal=error / 1.5,
        max_absolute_unequal=error,
        nonfinite_a=0,
        nonfinite_b=0,
        nonfinite_apart=0,
    )


def outcome(
    verdict: TensorVerdict = TensorVerdict.SAME, error: float = 0.0, *findings: str
) -> PairOutcome:
    """An outcome with what belongs to its verdict."""
    measured = verdict in (TensorVerdict.NORMAL, TensorVerdict.DIFFERENT, TensorVerdict.NAN)
    return PairOutcome(verdict, findings, measures(error) if measured else None)


def tensor(side: TensorSide, slot: int = 0, *, dtype: str = "float32") -> DumpedTensor:
    """A tensor of which only the description is known."""
    return DumpedTensor(side, slot, "", dtype, (8, 8), digest=f"{slot:032x}")


def row(
    position: int,
    place: str,
    result: PairOutcome,
    *,
    name: str = "",
    rank: int = 0,
    iteration: int = 0,
    backward: bool = False,
    only: str = "",
) -> ComparisonRow:
    """A row of the operator at that position; `only` says which side has no partner."""
    side, _, slot = place.partition(".")
    held = tensor(TensorSide(side), int(slot))
    called = name or LAYERS[position % len(LAYERS)]
    return ComparisonRow(
        rank,
        iteration,
        position,
        "" if only else "exact",
        called.rpartition("/")[2].rpartition("-")[0],
        "" if only == "b" else called,
        "" if only == "a" else called,
        backward,
        TensorPair(None if only == "b" else held, None if only == "a" else held),
        result,
    )


def suspect(at: int = 3, rank: int = 0, **changes) -> SuspectCall:
    """The operator at that position, with its stack."""
    reason = "input.0 agrees; 32 of 64 elements of output.0 do not: max abs 0.00123"
    name = LAYERS[at % len(LAYERS)]
    made = SuspectCall(rank, 0, at, "Linear", name, name, False, reason, SOURCE)
    return replace(made, **changes)


def origin(
    *suspects: SuspectCall, kind: Any = "difference", side: Any = "", why: str = ""
) -> DivergenceOrigin:
    """Where it starts; certain with one suspect."""
    return DivergenceOrigin(kind, side, len(suspects) == 1, suspects, why)


def layered(
    ranks: Sequence[int] = (0, 1), *, since: int = 3, error: float = 0.00123
) -> list[ComparisonRow]:
    """Rows of six layers on each rank, ranks side by side; those behind `since` differ."""
    found: list[ComparisonRow] = []
    for position in range(len(LAYERS)):
        for rank in ranks:
            begun, grown = position > since, error * (1 + position)
            wrong = outcome(TensorVerdict.DIFFERENT, grown)
            close = outcome(TensorVerdict.NORMAL, 1e-7)
            found.append(row(position, "input.0", wrong if begun else outcome(), rank=rank))
            after = wrong if position >= since else close
            found.append(row(position, "output.0", after, rank=rank))
    return found


def report(rows: Sequence[ComparisonRow] | None = None, **changes) -> ComparisonReport:
    """Two ranks that part at the fourth layer, or whatever is given."""
    made = ComparisonReport(
        "a",
        "b",
        ComparisonSettings(ElementTolerances(1e-4, 1e-4)),
        tuple(layered() if rows is None else rows),
        origins=(origin(suspect()),),
        rank_origins=(origin(suspect()), origin(suspect(rank=1))),
        seconds=1.25,
    )
    return replace(made, **changes)


def agreeing() -> ComparisonReport:
    """A report in which nothing differs."""
    return report(layered(since=len(LAYERS)), origins=(), rank_origins=())

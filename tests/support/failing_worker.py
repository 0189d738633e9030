"""Comparison worker that raises."""

from __future__ import annotations

from rankdump._analysis.compare import compare_pool, pair_comparison
from rankdump._analysis.compare.report import ComparisonSettings, PairOutcome, TensorPair


def _faulty(pair: TensorPair, settings: ComparisonSettings) -> PairOutcome:
    raise ZeroDivisionError(f"{pair}, {settings}")


def serve(descriptor: int) -> None:
    """Compare nothing."""
    pair_comparison.compare_pair = _faulty
    compare_pool.serve(descriptor)

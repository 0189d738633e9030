"""Comparison worker that is killed at a file of a certain name."""

from __future__ import annotations

import os
import signal

from rankdump._analysis.compare import compare_pool, pair_comparison
from rankdump._analysis.compare.pair_comparison import compare_pair
from rankdump._analysis.compare.report import ComparisonSettings, PairOutcome, TensorPair

NAME = "killer.npy"


def _killed(pair: TensorPair, settings: ComparisonSettings) -> PairOutcome:
    if pair.a is not None and pair.a.entry is not None and pair.a.entry.path.name == NAME:
        os.kill(os.getpid(), signal.SIGKILL)
    return compare_pair(pair, settings)


def serve(descriptor: int) -> None:
    """Compare as a worker does, up to that file."""
    pair_comparison.compare_pair = _killed
    compare_pool.serve(descriptor)

"""A worker of a comparison that is killed when it meets a file of a certain name."""

from __future__ import annotations

import os
import signal

from rankdump.diff import groups, worker
from rankdump.diff.outcomes import outcome_of
from rankdump.diff.values import Outcome, Settings, TensorPair

NAME = "killer.npy"


def _killed(pair: TensorPair, settings: Settings) -> Outcome:
    if pair.a is not None and pair.a.entry is not None and pair.a.entry.path.name == NAME:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome_of(pair, settings)


def serve(descriptor: int) -> None:
    """Compare as a worker does, up to that file."""
    groups.outcome_of = _killed
    worker.serve(descriptor)

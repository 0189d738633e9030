"""Names of the gradient buckets that DistributedDataParallel reduces from C++.

The reducer of DistributedDataParallel, with or without a built-in communication hook, calls the
operator of the all-reduce itself, so nothing is registered with it and the traceback of a failing
reduction has no frame of ours. It reduces the buckets of a backward in the order of their numbers.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

_ENGINE_MODULES = ("torch.autograd", "torch.autograd.graph")
"""Modules of the Python functions that run autograd's engine."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class BucketCounter:
    """Counts the buckets that a backward reduces in each process group."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        """By group: the number of the backward, and of its buckets so far."""

    def make_scope(self, group: str, caller: FrameType | None, dtype: str) -> str:
        """Return the part of an all-reduce's name that tells its bucket; empty if it has none.

        `caller` is the innermost Python frame; None in a thread of the engine.
        """
        task = find_backward(caller)
        if task is None:
            return ""
        if dtype == "int32":
            # The map of the parameters that the ranks used; gradients have no integers.
            return "used-parameters/"
        before, count = self._counts.get(group, (task, 0))
        number = count if before == task else 0
        self._counts[group] = task, number + 1
        return f"bucket-{number}/"


def find_backward(caller: FrameType | None) -> int | None:
    """Return the number of the backward whose engine called an operator without Python between."""
    if caller is not None and caller.f_globals.get("__name__") not in _ENGINE_MODULES:
        return None
    find_task = getattr(_C, "_current_graph_task_id", None)
    task = -1 if find_task is None else find_task()
    return None if task == -1 else task

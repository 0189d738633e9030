"""Chunk of a pipeline schedule that this thread runs: methods of torch.distributed.pipelining that
run one chunk are patched while a model is recorded.

A schedule splits a batch into chunks, which are its micro-batches, and passes the number of each to
the stage. Nothing is patched before the script has imported the package, which takes a second.
Arguments, results and errors are passed through unchanged.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any


@dataclass(frozen=True, slots=True)
class ChunkMethod:
    """Private method of torch that runs code of the job for one chunk."""

    module: str
    class_name: str
    name: str
    parameter: str
    """Parameter that has the number of the chunk."""


CHUNK_METHODS = (
    ChunkMethod(
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase",
        "forward_one_chunk",
        "fwd_chunk_id",
    ),
    # The loss function may be a module that is attached too.
    ChunkMethod(
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule",
        "_maybe_compute_loss",
        "mb_index",
    ),
)
"""Methods of torch 2.13; one that another version lacks gives no numbers. A backward needs none:
gradients have the number of their forward."""


class _RunningChunk(threading.local):
    """Chunk of this thread."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class _ReplacedMethod:
    owner: type
    name: str
    original: object
    ours: object


class PipelineStagePatch:
    """Patch of the methods, in place while it has users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = _RunningChunk()
        self._replaced: dict[ChunkMethod, _ReplacedMethod] = {}
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def running_chunk(self) -> int | None:
        """Number of the chunk that a schedule runs in this thread; None outside of schedules."""
        return self._running.number

    def add_user(self, user: object) -> None:
        """Patch the methods, now or when the script has imported them, until `remove_user`."""
        self._users.add(user)
        self.install_methods()

    def remove_user(self, user: object) -> None:
        """Restore the methods if this was the last user."""
        self._users.discard(user)
        if not self._users and self._replaced:
            with self._lock:
                self._restore()

    def install_methods(self) -> None:
        """Replace the methods that can be replaced by now."""
        if len(self._replaced) == len(CHUNK_METHODS) or CHUNK_METHODS[0].module not in sys.modules:
            return
        with self._lock:
            for method in CHUNK_METHODS:
                owner = getattr(sys.modules.get(method.module), method.class_name, None)
                original = vars(owner).get(method.name) if isinstance(owner, type) else None
                if owner is not None and callable(original) and method not in self._replaced:
                    ours = self._wrap_method(original, method.parameter)
                    self._replaced[method] = _ReplacedMethod(owner, method.name, original, ours)
                    setattr(owner, method.name, ours)

    def _restore(self) -> None:
        for replaced in self._replaced.values():
            # Code that replaced ours keeps calling it, which sets a number that nobody reads.
            if vars(replaced.owner).get(replaced.name) is replaced.ours:
                setattr(replaced.owner, replaced.name, replaced.original)
        self._replaced.clear()

    def _wrap_method(self, original: Callable[..., Any], parameter: str) -> Callable[..., Any]:
        names = list(signature(original).parameters)
        index = names.index(parameter) if parameter in names else len(names)
        running = self._running

        @wraps(original)
        def numbered(*args: Any, **kwargs: Any) -> Any:
            chunk = args[index] if index < len(args) else kwargs.get(parameter)
            before = running.number
            running.number = chunk if isinstance(chunk, int) else None
            try:
                return original(*args, **kwargs)
            finally:
                running.number = before

        return numbered


pipeline_stage_patch = PipelineStagePatch()
"""Patch of this process."""

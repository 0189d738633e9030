"""Forward pass that a call of an attached model belongs to: number of its micro-batch, and its
phase.

Both are determined when an outermost call begins; calls inside it inherit them. The number of a
micro-batch is the number that the script declared, else the chunk of a pipeline schedule, else the
number of the training pass in an iteration that accumulates gradients without communication. It is
never guessed from several passes in one iteration, because a GAN has several passes too (decision
111).
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

from torch.nn import Module

from rankdump._core.recorder_protocol import UNDIVIDED_PASS, ForwardPass, Recorder
from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.operator_names import OperatorScope
from rankdump._frameworks.torch.internals import (
    find_running_ddp,
    has_deferred_sync,
    is_inside_function,
    is_syncing_module,
)
from rankdump._frameworks.torch.module_tree import ModuleOperator, ModuleTree, unwrap_module


def choose_microbatch(
    *, declared: int | None, chunk: int | None, accumulated: int | None
) -> int | None:
    """Return the number of the micro-batch that begins: that of the script, else that of a
    schedule, else that of the accumulation.
    """
    known = (number for number in (declared, chunk, accumulated) if number is not None)
    return next(known, None)


def find_phase(*, is_eval: bool, has_grad: bool) -> str:
    """Return the phase of an outermost call, given whether its module is in eval mode."""
    if is_eval:
        return "eval"
    # The forward of an autograd function runs without gradients, because the function computes its
    # gradient itself; this is no `no_grad` phase.
    return "" if has_grad or is_inside_function() else "no_grad"


def continue_pass(around: ForwardPass, *, has_grad: bool) -> ForwardPass:
    """Return the pass of a call inside another call that has another gradient mode."""
    phase = find_phase(is_eval=around.phase == "eval", has_grad=has_grad)
    return around if phase == around.phase else around._replace(phase=phase)


class AccumulationCounter:
    """Counts training passes of the attached model in one iteration; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass_count = 0
        self._accumulates = False

    def restart(self) -> None:
        """Count from 0, because an iteration begins."""
        with self._lock:
            self._pass_count = 0
            self._accumulates = False

    def count_pass(self, *, deferred: bool) -> int | None:
        """Count a pass; return its number if this pass or an earlier one deferred communication."""
        with self._lock:
            number = self._pass_count
            self._pass_count += 1
            self._accumulates = self._accumulates or deferred
            return number if self._accumulates else None


class ForwardPassFinder:
    """Finds the forward pass of outermost calls of one attached model."""

    def __init__(self) -> None:
        self._counter = AccumulationCounter()
        self._root: OperatorScope | None = None
        self._syncing: list[Module] = []

    def restart(self) -> None:
        """Forget the passes, because an iteration begins."""
        self._counter.restart()

    def start(self, model: Module, tree: ModuleTree) -> None:
        """Determine the passes of this model from now on."""
        self._root = tree.operators[0].scope if tree.operators else None
        self._syncing = [module for module in model.modules() if is_syncing_module(module)]

    def watch_stages(self) -> None:
        """Number the chunks of pipeline schedules until `stop`."""
        pipeline_stage_patch.add_user(self)

    def stop(self) -> None:
        """Restore the methods of pipeline stages, and forget the model's modules."""
        pipeline_stage_patch.remove_user(self)
        self._syncing = []

    def begin_pass(
        self, operator: ModuleOperator, recorder: Recorder, *, has_grad: bool
    ) -> ForwardPass:
        """Return the pass of an outermost call."""
        is_eval = not unwrap_module(operator.module).training
        phase = find_phase(is_eval=is_eval, has_grad=has_grad)
        # The script may have imported torch's pipelines after the iteration began.
        pipeline_stage_patch.install_methods()
        chunk = pipeline_stage_patch.running_chunk
        number = choose_microbatch(
            declared=recorder.declared_pass.microbatch,
            chunk=chunk,
            accumulated=self._count_pass(operator) if chunk is None and not phase else None,
        )
        if number is None and not phase:
            return UNDIVIDED_PASS
        return ForwardPass(number, phase)

    def _count_pass(self, operator: ModuleOperator) -> int | None:
        """Count a pass of the model itself; return its number if gradients are accumulated."""
        if operator.scope != self._root:
            return None
        outer = find_running_ddp()
        syncing = self._syncing if outer is None else (outer, *self._syncing)
        return self._counter.count_pass(deferred=any(map(has_deferred_sync, syncing)))


@dataclass(frozen=True, slots=True)
class ChunkMethod:
    """Private method of torch that runs code of the job for one chunk."""

    module: str
    class_name: str
    name: str
    parameter: str
    """Name of the parameter with the number of the chunk."""


CHUNK_METHODS = (
    ChunkMethod(
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase",
        "forward_one_chunk",
        "fwd_chunk_id",
    ),
    # The loss function may be an attached module too.
    ChunkMethod(
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule",
        "_maybe_compute_loss",
        "mb_index",
    ),
)
"""Methods that run a chunk in torch 2.13; if another version lacks one, its chunks have no numbers.
A backward needs none, because gradients have the number of their forward.
"""


class _RunningChunk(threading.local):
    """Chunk that a thread is running."""

    number: int | None = None
    is_received: bool = False
    """Whether the stage receives its input from another stage."""


class PipelineStagePatch:
    """Patch of the methods of torch's pipelines that run one chunk; it is in place while it has
    users.

    A schedule splits a batch into chunks, which are its micro-batches, and passes the number of
    each to the stage. Nothing is patched before the script has imported the package
    (torch.distributed.pipelining), which takes a second. Arguments, results and errors are passed
    through unchanged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = _RunningChunk()
        self._replaced: dict[ChunkMethod, AttributePatch] = {}
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def running_chunk(self) -> int | None:
        """Number of the chunk that a schedule runs in this thread; None outside of schedules."""
        return self._running.number

    @property
    def is_received(self) -> bool:
        """Whether this thread runs a stage of a pipeline that is not the first one."""
        return self._running.is_received

    def add_user(self, user: object) -> None:
        """Patch the methods, now or once the script has imported them, until `remove_user`."""
        self._users.add(user)
        self.install_methods()

    def remove_user(self, user: object) -> None:
        """Restore the methods if this was the last user."""
        self._users.discard(user)
        if not self._users and self._replaced:
            with self._lock:
                self._restore()

    def install_methods(self) -> None:
        """Replace those methods whose modules are imported by now."""
        if len(self._replaced) == len(CHUNK_METHODS) or CHUNK_METHODS[0].module not in sys.modules:
            return
        with self._lock:
            for method in CHUNK_METHODS:
                owner = getattr(sys.modules.get(method.module), method.class_name, None)
                original = vars(owner).get(method.name) if isinstance(owner, type) else None
                if owner is not None and callable(original) and method not in self._replaced:
                    ours = self._wrap_method(original, method.parameter)
                    self._replaced[method] = AttributePatch(owner, method.name, ours)
                    self._replaced[method].install()

    def _restore(self) -> None:
        # Code that replaced our method still calls it; it then sets a number that nobody reads.
        for replaced in self._replaced.values():
            replaced.remove()
        self._replaced.clear()

    def _wrap_method(self, original: Callable[..., Any], parameter: str) -> Callable[..., Any]:
        names = list(signature(original).parameters)
        index = names.index(parameter) if parameter in names else len(names)
        running = self._running

        @wraps(original)
        def numbered(*args: Any, **kwargs: Any) -> Any:
            chunk = args[index] if index < len(args) else kwargs.get(parameter)
            before = running.number, running.is_received
            running.number = chunk if isinstance(chunk, int) else None
            running.is_received = not getattr(args[0] if args else None, "is_first", True)
            try:
                return original(*args, **kwargs)
            finally:
                running.number, running.is_received = before

        return numbered


pipeline_stage_patch = PipelineStagePatch()
"""The patch of this process."""

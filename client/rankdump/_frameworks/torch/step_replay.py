"""Parts of the replay of a step that need torch: the digests of what attached models compute in one
run, and the agreement of all ranks on a second run, whose collectives need all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from rankdump._core.run_card import RANDOM_PREFIX
from rankdump._frameworks.digest_recorder import DigestRecorder, digest_source
from rankdump._frameworks.model_observer import find_script_line, format_type
from rankdump._frameworks.operator_names import list_result_leaves
from rankdump._frameworks.torch.card_observer import read_device_generators
from rankdump._frameworks.torch.communication import collective_recorder
from rankdump._frameworks.torch.graph_description import FOREIGN_FILES
from rankdump._frameworks.torch.job_state import JobState
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook
from rankdump._frameworks.torch.step_causes import digest_elements
from rankdump._frameworks.torch.tensors import make_torch_source

# torch's stubs leave the functions of torch.distributed partly untyped.
# pyright: reportUnknownMemberType=false

_RESULT, _GENERATOR = "Result", "Generator"
_DEVICES = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
"""Device of the tensors that a backend takes; others take those in host memory."""


class RunObserver:
    """Observes one run of a step of attached models."""

    def __init__(self, models: Sequence[Module], iteration: int) -> None:
        self.recorder = DigestRecorder(lambda: find_script_line(besides=FOREIGN_FILES))
        self._iteration = iteration
        self._models = [
            TorchModelHook(model, self.recorder, graph, collectives=False)
            for graph, model in enumerate(models)
        ]
        self._optimizers = TorchOptimizerHook(self.recorder, lambda: self._models)

    def begin(self) -> None:
        """Observe from now on."""
        self._optimizers.find_optimizers()
        for hook in self._models:
            hook.iteration_begins(self._iteration, True)

    def end(self, result: object, states: Mapping[str, str]) -> None:
        """Add what the step left behind: its result, the state of the job, and generators.

        `states` are digests of generators that are not torch's.
        """
        self._add_result(result)
        for hook in (*self._models, self._optimizers):
            hook.iteration_ends(self._iteration, True)
        own = [(f"{RANDOM_PREFIX}cpu", torch.get_rng_state()), *read_device_generators()]
        found = {name: digest_elements(state, on_device=False) for name, state in own}
        for name, digest in {**found, **states}.items():
            self.recorder.add_digest(_GENERATOR, name, 0, digest)

    def detach(self) -> None:
        """Restore the models."""
        for hook in (self._optimizers, *reversed(self._models)):
            hook.detach()

    def find_unsaved(self, state: JobState) -> str:
        """Return which optimizer stepped whose state was not copied, a clause; empty for none."""
        for optimizer in self._optimizers.found:
            if all(each is not optimizer for each in state.optimizers):
                kind = format_type(optimizer)
                return f"an optimizer of type {kind} was not there, or not found, before the step"
        return ""

    def _add_result(self, result: object) -> None:
        for slot, _, value in list_result_leaves(result):
            if isinstance(value, Tensor):
                source = make_torch_source(value)
                if source is not None and not isinstance(source, str):
                    self.recorder.add_digest(_RESULT, "result", slot, digest_source(source))
            elif isinstance(value, (bool, int, float, complex, str)):
                self.recorder.add_value(_RESULT, "result", slot, value)


class TorchStepReplay:
    """Replays a step of attached models."""

    def __init__(self, models: Sequence[Module], others: Iterable[object]) -> None:
        self._models, self._others = models, tuple(others)

    def observe(self, iteration: int) -> RunObserver:
        """Return the observer of a run."""
        return RunObserver(self._models, iteration)

    def copy_state(self, known: JobState | None = None) -> JobState:
        """Return a copy of the state of the job; equal parts are shared with an earlier copy."""
        return JobState(self._models, self._others, known)

    @staticmethod
    def agree(ready: bool) -> bool:
        """Return whether all ranks of the job are ready; called by all of them."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ready
        device = _DEVICES.get(str(dist.get_backend()), "cpu")
        flag = torch.tensor([int(ready)], device=device)
        with TorchStepReplay.hide_collectives():
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    @staticmethod
    @contextmanager
    def hide_collectives() -> Generator[None]:
        """Leave the collectives of the block out of the order, and of all counts."""
        before, collective_recorder.is_hidden = collective_recorder.is_hidden, True
        try:
            yield
        finally:
            collective_recorder.is_hidden = before

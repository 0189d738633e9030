"""Part of the run card about one attached torch model, in iterations that are dumped: the causes of
the step, a summary of the parameters, their digests before the step, states of generators, and
torch's seeds and flags. All of it is read when the model is first called in a step, because a
script may load weights and seed generators after it attached the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from rankdump._core.recorder_protocol import CardRecorder
from rankdump._core.run_card import RANDOM_PREFIX, ModelSummary, ParameterDigest
from rankdump._frameworks.card_digests import (
    LogicalParameter,
    digest_head,
    is_parameter_due,
    summarize_parameters,
)
from rankdump._frameworks.model_observer import ModelObserver
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.layouts import strip_distribution
from rankdump._frameworks.torch.parameters import PlacedParameter, TorchParameterObserver
from rankdump._frameworks.torch.step_causes import StepCauseObserver, digest_elements
from rankdump._frameworks.torch.tensors import find_dtype_name, make_torch_source

# torch's stubs leave states of generators partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


class TorchCardObserver:
    """Reports the facts of one attached model to the run card."""

    def __init__(
        self, card: CardRecorder, observer: ModelObserver, parameters: TorchParameterObserver
    ) -> None:
        self._card, self._observer, self._parameters = card, observer, parameters
        # If there is a black box, its hooks report the causes in every step.
        self.causes = None if card.has_black_box else StepCauseObserver(card)
        """Observer of batch, generator and learning rates; None if the black box observes them."""
        self._iteration = -1
        self._is_called = self._has_digested = False
        """Whether the model was called in this step, and whether parameters were digested in any
        step.
        """
        self._known_walks = 0
        self._placed: list[PlacedParameter] = []
        self._summary = ModelSummary("", 0, 0, "")
        """Summary of the parameters with their logical names and layouts, as of the last walk
        through the model.
        """

    def begin_step(self, iteration: int) -> None:
        """Begin a step."""
        self._iteration, self._is_called = iteration, False
        if self.causes is not None:
            self.causes.begin_step(iteration)

    def observe_call(self, leaves: Sequence[CallLeaf]) -> None:
        """Report the facts that are known when the model is called."""
        if not self._is_called:
            self._is_called = True
            self._card.use_settings(read_torch_settings())
            self._card.add_random_states()
            for name, state in read_device_generators():
                self._card.add_digest(name, digest_elements(state, on_device=False))
            self._add_parameters()
        if self.causes is not None:
            self.causes.observe_call(leaves, on_device=True)

    def _add_parameters(self) -> None:
        is_first = not self._has_digested
        if self._parameters.walks != self._known_walks:
            # The result is kept, because looking at all parameters in each iteration would take
            # longer than digesting those that are due.
            self._known_walks = self._parameters.walks
            parameters = list(self._parameters.iterate_placed())
            made = [each for each in parameters if not is_lazy(each.tensor)]
            if len(made) < len(parameters):
                self._known_walks = 0
            self._placed = list(map(self._place, made))
            self._summary = summarize_parameters(map(_describe, self._placed))
        self._card.add_model(self._observer.graph, self._summary)
        found: dict[str, ParameterDigest] = {}
        for name, tensor, layout in self._placed:
            if is_first or is_parameter_due(name, self._iteration):
                source = make_torch_source(tensor)
                if source is None or isinstance(source, str):
                    continue
                digest = digest_head(source, layout)
                if digest is not None:
                    found[name] = digest
        # While a CUDA graph is captured, no parameter can be read, so the digests are taken later.
        self._has_digested = self._has_digested or bool(found)
        self._card.add_parameters(self._observer.graph, found)

    def _place(self, parameter: PlacedParameter) -> PlacedParameter:
        """Return a parameter with the layout that the script declared, and its logical name."""
        name, tensor, layout = parameter
        layout = self._card.find_layout(name, tuple(strip_distribution(tensor).shape)) or layout
        logical = layout.logical_name if layout is not None else ""
        return PlacedParameter(logical or name, tensor, layout)


def _describe(parameter: PlacedParameter) -> LogicalParameter:
    local, layout = strip_distribution(parameter.tensor), parameter.layout
    shape = tuple(local.shape) if layout is None else layout.global_shape
    return LogicalParameter(parameter.name, shape, find_dtype_name(local))


def read_device_generators() -> list[tuple[str, Tensor]]:
    """Return the state of the random generator of the current CUDA device, in host memory.

    This waits for nothing. The result is empty if CUDA is not in use, and while a graph is
    captured.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return []
    return [(f"{RANDOM_PREFIX}cuda", torch.cuda.get_rng_state())]


def read_torch_settings() -> dict[str, str]:
    """Return the seeds and flags that decide whether torch's results can be reproduced."""
    settings = {
        "torch.initial_seed": str(torch.initial_seed()),
        "torch.deterministic_algorithms": _find_determinism(),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "torch.num_threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_initialized():
        cudnn = torch.backends.cudnn
        settings |= {
            "torch.cuda.initial_seed": str(torch.cuda.initial_seed()),
            "torch.cuda.device": torch.cuda.get_device_name(),
            "torch.cudnn.deterministic": str(cudnn.deterministic).lower(),
            "torch.cudnn.benchmark": str(cudnn.benchmark).lower(),
        }
    return settings


def _find_determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "false"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "true"

"""What the dump of a model's calls of an API needs of the framework the model is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rankdump.adapters.api_calls import ApiOptions, StepListener
from rankdump.session.frameworks import is_mindspore_cell, is_torch_module
from rankdump.values import IterationHook, Recorder

KNOWN = "torch.nn.Module, mindspore.nn.Cell"
"""Models whose calls can be dumped."""


class ApiHook(IterationHook, Protocol):
    """Counts the calls of an API from when it was made, and hands over what they read and wrote."""

    def record_with(self, recorder: Recorder, options: ApiOptions) -> None:
        """Hand over to this recorder from now on, as these options say; numbers go on."""
        ...


class StepWatch(Protocol):
    """Tells a listener, until it is removed."""

    def optimized(self) -> bool:
        """Return whether there is an optimizer whose steps can be waited for."""
        ...

    def remove(self) -> None:
        """Leave model and framework as they were."""
        ...


class ApiFramework(Protocol):
    """One framework: a module `migrating` of its adapter."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a module has it as a constant
        """What files are named by: `torch`, `mindspore`."""
        ...

    def api_hook(
        self, model: Any, recorder: Recorder, *, graph: int, options: ApiOptions
    ) -> ApiHook:
        """Return what observes the calls of a model's program, and counts them from now on."""
        ...

    def without_dropout(self, model: Any) -> int:
        """Let no dropout of the model drop anything; return how many there are."""
        ...

    def save_state(self, model: Any, folder: Path) -> None:
        """Write the model's state into a file of the framework's own kind."""
        ...

    def watch_steps(self, model: Any, listener: StepListener) -> StepWatch:
        """Tell a listener of the model's calls and of its optimizers."""
        ...


def apis_of(model: Any) -> ApiFramework | None:
    """Return what belongs to the framework of a model; None for one of no known framework."""
    if is_torch_module(model):
        from rankdump.adapters.torch import migrating as torch_side

        return torch_side
    if is_mindspore_cell(model):
        from rankdump.adapters.mindspore import migrating as mindspore_side

        return mindspore_side
    return None

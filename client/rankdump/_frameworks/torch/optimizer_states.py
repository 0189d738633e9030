"""States that an optimizer keeps for its parameters, recorded at the end of an iteration with the
values of the parameters: after the last step of the optimizer.

A state is named after its parameter in an attached model. An optimizer that steps copies of the
weights has parameters of no model: those are recorded as well, under the number of their group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._frameworks.torch.layouts import LayoutFinder
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.tensors import TorchObserver

# torch's stubs leave an optimizer's groups and states untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

STATE_TYPE = "OptimizerState"
"""Operator type of states, by which a plan can select them."""
_SCOPE = "Optimizer/"
_COUNTER = "step"
"""State with the number of steps, the same for all parameters of a group."""


class _ParameterPlace(NamedTuple):
    """Name of a parameter in an attached model."""

    graph: int
    name: str
    find_layout: LayoutFinder | None


class TorchOptimizerHook:
    """Records the states of one optimizer in armed iterations."""

    def __init__(
        self,
        optimizer: Any,
        recorder: Recorder,
        list_models: Callable[[], Iterable[TensorNameFinder]],
    ) -> None:
        self._optimizer = optimizer
        self._recorder = recorder
        self._list_models = list_models

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Do nothing: states are read at the end."""

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record the states."""
        if armed:
            observer = TorchObserver(self._recorder, 0)
            run_shielded(self._record_states, observer.report_failure)

    def detach(self) -> None:
        """Do nothing: the optimizer was not changed."""

    def _record_states(self) -> None:
        places = self._find_places()
        observers: dict[int, TorchObserver] = {}
        for number, parameter in self._iterate_parameters():
            place = places.get(id(parameter))
            states = dict(self._optimizer.state.get(parameter, {}))
            if place is None:
                place = _ParameterPlace(0, number, None)
                states["master"] = parameter
            observer = observers.setdefault(place.graph, TorchObserver(self._recorder, place.graph))
            for key, value in states.items():
                if isinstance(value, Tensor) and key != _COUNTER:
                    name = f"{_SCOPE}{place.name}.{key}"
                    _record_state(observer, name, str(key), value, parameter, place.find_layout)

    def _find_places(self) -> dict[int, _ParameterPlace]:
        return {
            id(tensor): _ParameterPlace(model.graph, name, model.find_layout(tensor))
            for model in self._list_models()
            for name, tensor in model.iterate_named()
        }

    def _iterate_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for group, each in enumerate(self._optimizer.param_groups):
            for number, parameter in enumerate(each["params"]):
                yield f"group-{group}.{number}", parameter


def _record_state(
    observer: TorchObserver,
    name: str,
    key: str,
    value: Tensor,
    parameter: Tensor,
    find_layout: LayoutFinder | None,
) -> None:
    # Some states are smaller than their parameter, such as the rows of a factored moment.
    if value.shape != parameter.shape:
        find_layout = None
    if observer.is_selected(name, TensorSide.OUTPUT):
        observer.record_value(STATE_TYPE, name, key, value, find_layout)


def is_optimizer(value: object) -> bool:
    """Return whether a value has what every optimizer of torch has, also wrapped by a library."""
    groups = getattr(value, "param_groups", None)
    return isinstance(groups, list) and hasattr(getattr(value, "state", None), "get")

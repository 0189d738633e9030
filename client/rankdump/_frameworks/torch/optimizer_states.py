"""States that optimizers keep for their parameters. They are recorded at the end of an iteration
together with the values of the parameters, which is after the last step of the optimizers. The
script names an optimizer, or the plan asks for the optimizers of torch that step.

A state is named after its parameter in an attached model. An optimizer that steps copies of the
weights has parameters that belong to no model: their states are recorded too, under the number of
their group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._core.selection import OPTIMIZER_PREFIX
from rankdump._frameworks.torch.internals import is_tracing
from rankdump._frameworks.torch.layouts import LayoutFinder
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation, run_shielded
from rankdump._frameworks.torch.tensors import TorchObserver

# torch's stubs leave an optimizer's groups and states untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_COUNTER = "step"
"""Key of the state with the number of steps, which is equal for all parameters of a group."""


class _ParameterPlace(NamedTuple):
    """Name of a parameter in an attached model."""

    graph: int
    name: str
    find_layout: LayoutFinder | None


class TorchOptimizerHook:
    """Records the states of optimizers in armed iterations."""

    def __init__(
        self, recorder: Recorder, list_models: Callable[[], Iterable[TensorNameFinder]]
    ) -> None:
        self._recorder = recorder
        self._list_models = list_models
        self._declared: list[Any] = []
        self._found: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        """Optimizers that have stepped, in the order of their first steps."""
        self._is_armed = False
        self._held: list[Optimizer] = []
        """Found optimizers that are kept alive until an armed iteration ends. The last iteration
        ends only when the interpreter does, after the return of the function that an optimizer may
        be local to.
        """
        self._handle: RemovableHandle | None = None

    def add_optimizer(self, optimizer: object) -> bool:
        """Record the states of an optimizer from now on; return whether the object is
        an optimizer.
        """
        if not _is_optimizer(optimizer):
            return False
        self._declared.append(optimizer)
        return True

    def find_optimizers(self) -> None:
        """Also record the states of those optimizers of torch that step from now on."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._after_step)

    @property
    def found(self) -> tuple[Optimizer, ...]:
        """Optimizers that stepped since `find_optimizers`, in the order of their first steps."""
        return tuple(self._found)

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Keep optimizers alive until their states are read at the end of the iteration."""
        self._is_armed = armed
        self._held = [*self._found] if armed else []

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Record the states of all optimizers."""
        if armed:
            observer = TorchObserver(self._recorder, 0)
            run_shielded(self._record_states, observer.report_failure)
        self._release_optimizers()

    def detach(self) -> None:
        """Stop observing steps; the optimizers were not changed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._release_optimizers()

    def _release_optimizers(self) -> None:
        self._is_armed, self._held = False, []

    @exclude_from_compilation
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._found and not is_tracing():
            self._found[optimizer] = None
            if self._is_armed:
                self._held.append(optimizer)

    def _record_states(self) -> None:
        places = self._find_places()
        recorded: set[tuple[int, str]] = set()
        unnamed = 0
        for optimizer in self._list_optimizers(places):
            prefix = f"optimizer-{unnamed}." if unnamed else ""
            is_unnamed = False
            for number, parameter in _iterate_parameters(optimizer):
                place = places.get(id(parameter))
                states = _list_states(optimizer, parameter, with_master=place is None)
                # An optimizer may wrap another one that steps the same parameters.
                states = {k: v for k, v in states.items() if (id(parameter), k) not in recorded}
                recorded.update((id(parameter), key) for key in states)
                is_unnamed = is_unnamed or (place is None and bool(states))
                place = place or _ParameterPlace(0, prefix + number, None)
                self._record_parameter(place, parameter, states)
            unnamed += is_unnamed

    def _record_parameter(
        self, place: _ParameterPlace, parameter: Tensor, states: dict[str, Tensor]
    ) -> None:
        observer = TorchObserver(self._recorder, place.graph)
        for key, value in states.items():
            name = f"{OPTIMIZER_PREFIX}{place.name}.{key}"
            # Some states are smaller than their parameter, such as the rows of a factored moment.
            find_layout = place.find_layout if value.shape == parameter.shape else None
            if observer.is_selected(name, TensorSide.OUTPUT):
                observer.record_optimizer_state(name, key, value, find_layout)

    def _find_places(self) -> dict[int, _ParameterPlace]:
        return {
            id(tensor): _ParameterPlace(model.graph, name, model.find_layout(tensor))
            for model in self._list_models()
            for name, tensor in model.iterate_named()
        }

    def _list_optimizers(self, places: dict[int, _ParameterPlace]) -> list[Any]:
        """Return the optimizers that the script declared, then those that were found.

        An optimizer without a parameter of an attached model steps either copies of the weights or
        the weights of another model. The first is assumed while attached models have trainable
        parameters that no optimizer steps.
        """
        found = [each for each in self._found if all(each is not d for d in self._declared)]
        stepped = {
            id(parameter)
            for optimizer in (*self._declared, *found)
            for _, parameter in _iterate_parameters(optimizer)
        }
        if not self._has_trainable_besides(stepped):
            found = [each for each in found if _has_parameter_of(each, places)]
        return [*self._declared, *found]

    def _has_trainable_besides(self, stepped: set[int]) -> bool:
        return any(
            isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in stepped
            for model in self._list_models()
            for _, tensor in model.iterate_named()
        )


def _iterate_parameters(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for group, each in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(each["params"]):
            yield f"group-{group}.{number}", parameter


def _has_parameter_of(optimizer: Any, places: dict[int, _ParameterPlace]) -> bool:
    return any(id(parameter) in places for _, parameter in _iterate_parameters(optimizer))


def _list_states(optimizer: Any, parameter: Tensor, *, with_master: bool) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps for a parameter, by their keys."""
    states = {
        str(key): value
        for key, value in dict(optimizer.state.get(parameter, {})).items()
        if isinstance(value, Tensor) and key != _COUNTER
    }
    return states | {"master": parameter} if with_master else states


def _is_optimizer(value: object) -> bool:
    """Return whether a value has the attributes of every optimizer of torch, also if a library
    wraps it.
    """
    groups = getattr(value, "param_groups", None)
    return isinstance(groups, list) and hasattr(getattr(value, "state", None), "get")

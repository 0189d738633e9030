"""Gradients of tensors and parameters, parameters after the step, and the forward calls that a
recomputation repeats.

`Tensor.register_hook` reports every gradient inside `value_and_grad`, of results of functions,
methods and cells alike (observed with MindSpore 2.7.0), so the backward hooks of cells are not
needed. A hook returns its gradient, so the numbers of the job stay unchanged. A compiled backward
runs no hooks: its gradients are taken from its result, or from the call of an optimizer outside of
it. A recomputation repeats the calls of its region in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from rankdump._frameworks.mindspore.framework import Parameter, is_recording_gradients
from rankdump._frameworks.mindspore.interception import (
    CALL_INTERCEPTION,
    GRADIENT_HOOKS,
    GradientHook,
)
from rankdump._frameworks.mindspore.tensors import (
    MindSporeObserver,
    is_tensor,
    make_mindspore_source,
)
from rankdump._frameworks.operator_names import make_gradient_name


class MindSporeGradientObserver:
    """Gradient hooks on the tensors of one model."""

    def __init__(self) -> None:
        self._hooks: list[GradientHook] = []

    def watch_gradient(self, tensor: Any, take: Callable[[Any], object]) -> None:
        """Call `take`, which must not raise, with the gradient of a tensor when it arrives.

        Parameters are skipped: their gradients belong to the whole step, not to a call.
        """
        if isinstance(tensor, Parameter) or not is_recording_gradients():
            return
        # A tensor that has no gradient raises; there is no way to check that before.
        with suppress(RuntimeError):
            self._hooks.append(hook_tensor(tensor, take))

    def remove_hooks(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            GRADIENT_HOOKS.remove(hook)


def hook_tensor(tensor: Any, take: Callable[[Any], object]) -> GradientHook:
    """Call `take` with each gradient of a tensor until the hook is removed."""

    # MindSpore accepts only a function, no other callable.
    def arrived(gradient: Any) -> Any:
        with CALL_INTERCEPTION.suppress_calls():
            take(gradient)
        return gradient

    GRADIENT_HOOKS.add(tensor, arrived)
    return arrived


class MindSporeParameterObserver:
    """Observer of one model's parameters, under MindSpore's own names."""

    def __init__(self, model: Any, observer: MindSporeObserver) -> None:
        self._model = model
        self._observer = observer
        self._hooks: list[GradientHook] = []
        self._names: dict[int, str] = {}
        self._recorded: set[str] = set()

    def restart(self) -> None:
        """Forget which gradients were recorded; called when an iteration begins."""
        self._recorded.clear()

    def start(self) -> None:
        """Add gradient hooks to the parameters."""
        self.stop()
        for parameter in self._model.trainable_params():
            name = self._names[id(parameter)] = make_gradient_name(parameter.name)
            take = partial(self._observer.run_shielded, self._record_gradient, name)
            self._hooks.append(hook_tensor(parameter, take))

    def stop(self) -> None:
        """Remove the gradient hooks from the parameters."""
        hooks, self._hooks = self._hooks, []
        self._names = {}
        for hook in hooks:
            GRADIENT_HOOKS.remove(hook)

    def record_returned_gradients(self, gradients: Iterable[tuple[Any, Any]]) -> None:
        """Record the gradients of parameters, except those that were recorded in this iteration."""
        for parameter, gradient in gradients:
            name = self._names.get(id(parameter))
            if name is not None and name not in self._recorded and is_tensor(gradient):
                self._record_gradient(name, gradient)

    def record_all(self) -> None:
        """Record all parameters as they are now."""
        for parameter in self._model.get_parameters():
            self._observer.record_parameter(
                parameter.name, "parameter", make_mindspore_source, parameter, state=True
            )

    def _record_gradient(self, name: str, gradient: Any) -> None:
        if self._observer.armed:
            self._recorded.add(name)
            self._observer.record_parameter(name, "grad", make_mindspore_source, gradient)


_CallT = TypeVar("_CallT")


class _RegionState(threading.local, Generic[_CallT]):
    def __init__(self) -> None:
        self.open: list[list[_CallT]] = []
        """Forward calls of each running region; the outermost region comes first."""
        self.repeats: list[deque[_CallT]] = []
        """For each region that runs again: the forward calls that it has yet to repeat."""


class RecomputedRegions(Generic[_CallT]):
    """Recomputed regions of one model."""

    def __init__(self) -> None:
        self._ended: dict[int, list[list[_CallT]]] = {}
        self._thread: _RegionState[_CallT] = _RegionState()

    def begin_region(self, region: int, *, again: bool) -> Callable[[], object]:
        """Begin a region or its repetition; the returned function ends it on the same thread."""
        thread = self._thread
        if again:
            # The runs of one region are repeated in reverse order.
            ended = self._ended.get(region)
            thread.repeats.append(deque(ended.pop() if ended else ()))
            return thread.repeats.pop
        calls: list[_CallT] = []
        self._ended.setdefault(region, []).append(calls)
        thread.open.append(calls)
        return thread.open.pop

    @property
    def is_recomputing(self) -> bool:
        """Whether the calling thread runs the repetition of a region."""
        return bool(self._thread.repeats)

    def add_call(self, call: _CallT) -> None:
        """Add a forward call that may be repeated later."""
        for calls in self._thread.open:
            calls.append(call)

    def take_repeated_call(self, same: Callable[[_CallT], bool]) -> _CallT | None:
        """Return and remove the next forward call of the region if `same` is true for it, else
        None.
        """
        if not self._thread.repeats:
            return None
        calls = self._thread.repeats[-1]
        return calls.popleft() if calls and same(calls[0]) else None

    def clear(self) -> None:
        """Forget the regions whose backward never ran."""
        self._ended.clear()

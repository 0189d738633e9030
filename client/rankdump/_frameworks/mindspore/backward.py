"""Gradients of tensors and parameters, the parameters after the step, and the forward calls that a
recomputation repeats.

`Tensor.register_hook` brings every gradient inside `value_and_grad`, of results of functions,
methods and cells alike (observed with MindSpore 2.7.0): the cells' own backward hooks are not
needed. A hook returns the gradient it was given, so the numbers of the job stay unchanged. A
compiled backward brings nothing: its gradients are taken from its result, or as an optimizer
outside of it was given them. A recomputation repeats the calls of its region in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    """The hooks on the tensors of one model."""

    def __init__(self) -> None:
        self._hooks: list[GradientHook] = []

    def watch_gradient(self, tensor: Any, take: Callable[[Any], None]) -> None:
        """Have `take`, which must not raise, given the gradient of a tensor when it arrives.

        Those of parameters arrive for the whole step: they are nobody's result.
        """
        if isinstance(tensor, Parameter) or not is_recording_gradients():
            return
        # One that no gradient comes to refuses; there is nothing to ask it beforehand.
        with suppress(RuntimeError):
            self._hooks.append(hook_tensor(tensor, take))

    def remove_hooks(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            GRADIENT_HOOKS.remove(hook)


def hook_tensor(tensor: Any, take: Callable[[Any], None]) -> GradientHook:
    """Have `take` given the gradients of a tensor until the hook is removed."""

    # MindSpore takes a function and nothing else that can be called.
    def arrived(gradient: Any) -> Any:
        with CALL_INTERCEPTION.suppress_calls():
            take(gradient)
        return gradient

    GRADIENT_HOOKS.add(tensor, arrived)
    return arrived


class MindSporeParameterObserver:
    """The parameters of one attached model, by the names MindSpore gives them."""

    def __init__(self, model: Any, observer: MindSporeObserver) -> None:
        self._model = model
        self._observer = observer
        self._hooks: list[GradientHook] = []
        self._names: dict[int, str] = {}
        self._recorded: set[str] = set()

    def restart(self) -> None:
        """Forget which gradients were handed over: an iteration begins."""
        self._recorded.clear()

    def start(self) -> None:
        """Wait for gradients from now on."""
        self.stop()
        for parameter in self._model.trainable_params():
            name = self._names[id(parameter)] = make_gradient_name(parameter.name)
            self._hooks.append(hook_tensor(parameter, self._make_gradient_callback(name)))

    def stop(self) -> None:
        """Wait for gradients no more."""
        hooks, self._hooks = self._hooks, []
        self._names = {}
        for hook in hooks:
            GRADIENT_HOOKS.remove(hook)

    def record_returned_gradients(self, gradients: Iterable[tuple[Any, Any]]) -> None:
        """Take pairs of a parameter and its gradient, except what the iteration has already."""
        for parameter, gradient in gradients:
            name = self._names.get(id(parameter))
            if name is not None and name not in self._recorded and is_tensor(gradient):
                self._record_gradient(name, gradient)

    def record_all(self) -> None:
        """Hand over all parameters as they stand."""
        for parameter in self._model.get_parameters():
            self._observer.record_parameter(
                parameter.name, "parameter", make_mindspore_source, parameter, state=True
            )

    def _make_gradient_callback(self, name: str) -> Callable[[Any], None]:
        def take(gradient: Any) -> None:
            self._observer.run_shielded(self._record_gradient, name, gradient)

        return take

    def _record_gradient(self, name: str, gradient: Any) -> None:
        if self._observer.armed:
            self._recorded.add(name)
            self._observer.record_parameter(name, "grad", make_mindspore_source, gradient)


_CallT = TypeVar("_CallT")


class _RegionState(threading.local, Generic[_CallT]):
    def __init__(self) -> None:
        self.open: list[list[_CallT]] = []
        """Calls of the regions that run now, outermost first."""
        self.repeats: list[deque[_CallT]] = []
        """Calls still to be repeated, of the regions that run again."""


class RecomputedRegions(Generic[_CallT]):
    """The recomputed regions of one model."""

    def __init__(self) -> None:
        self._ended: dict[int, list[list[_CallT]]] = {}
        self._thread: _RegionState[_CallT] = _RegionState()

    def begin_region(self, region: int, *, again: bool) -> Callable[[], object]:
        """Begin a region, or its repetition; what is returned ends it on the same thread."""
        thread = self._thread
        if again:
            # One that ran several times is repeated in reverse.
            ended = self._ended.get(region)
            thread.repeats.append(deque(ended.pop() if ended else ()))
            return thread.repeats.pop
        calls: list[_CallT] = []
        self._ended.setdefault(region, []).append(calls)
        thread.open.append(calls)
        return thread.open.pop

    @property
    def is_recomputing(self) -> bool:
        """Whether what runs on this thread is a repetition."""
        return bool(self._thread.repeats)

    def add_call(self, call: _CallT) -> None:
        """Take a forward call, which may be repeated later."""
        for calls in self._thread.open:
            calls.append(call)

    def take_repeated_call(self, same: Callable[[_CallT], bool]) -> _CallT | None:
        """Return the forward call that is repeated now, if the next one of the region is alike."""
        if not self._thread.repeats:
            return None
        calls = self._thread.repeats[-1]
        return calls.popleft() if calls and same(calls[0]) else None

    def clear(self) -> None:
        """Forget regions whose backward never came."""
        self._ended.clear()

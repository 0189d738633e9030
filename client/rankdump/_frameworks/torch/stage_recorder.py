"""Records of what data parallelism computes with between its collectives: whole parameters, after
they were gathered, and gradients before they are reduced.

They are inputs of the parameter and of its gradient, whose outputs are the value after the step
and the reduced gradient.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder, TensorNameFinder
from rankdump._frameworks.operator_names import PARAMETER_TYPE, make_gradient_name
from rankdump._frameworks.torch.tensors import TorchObserver, make_torch_source

_SIDE = TensorSide.INPUT


class StageRecorder:
    """Records the tensors of parameters of attached models, by the identity of the parameter."""

    def __init__(
        self, recorder: Recorder, list_models: Callable[[], Iterable[TensorNameFinder]]
    ) -> None:
        self._recorder = recorder
        self._list_models = list_models
        self._names: dict[int, tuple[int, str]] = {}
        self._recorded: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Forget what was recorded, because an iteration begins."""
        self._recorded.clear()

    def read_names(self) -> None:
        """Read the names of the parameters of attached models."""
        self._names = {
            id(tensor): (model.graph, name)
            for model in self._list_models()
            for name, tensor in model.iterate_named()
        }

    def forget_names(self) -> None:
        """Forget the names, and with them the identities of tensors that may be freed."""
        self._names = {}

    def record_gathered(self, parameter: Tensor, tensor: Tensor) -> None:
        """Record a parameter as the forward reads it, the first time in an iteration."""
        place = self._names.get(id(parameter))
        if place is not None and self._count(place) == 0:
            self._record(*place, 0, "unsharded", tensor)

    def is_gradient_wanted(self, parameter: Tensor) -> bool:
        """Return whether the gradient before reduction is kept in this iteration."""
        place = self._names.get(id(parameter))
        return place is not None and self._recorder.is_wanted(
            place[0], make_gradient_name(place[1]), _SIDE
        )

    def record_unreduced(self, parameter: Tensor, gradient: Tensor) -> None:
        """Record a gradient that is about to be reduced.

        Its slot is the number of the reduction in the iteration.
        """
        if self.is_gradient_wanted(parameter):
            graph, name = self._names[id(parameter)]
            name = make_gradient_name(name)
            self._record(graph, name, self._count((graph, name)), "unreduced", gradient)

    def warn_once(self, message: str) -> None:
        """Log a warning the first time."""
        self._recorder.warn_once(message)

    def report_failure(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        TorchObserver(self._recorder, 0).report_failure(error)

    def _count(self, place: tuple[int, str]) -> int:
        """Return how often a tensor was recorded before in this iteration, and count it."""
        with self._lock:  # gradients arrive in a thread of each device
            before = self._recorded[place]
            self._recorded[place] = before + 1
            return before

    def _record(self, graph: int, name: str, slot: int, argument: str, tensor: Tensor) -> None:
        observer = TorchObserver(self._recorder, graph)
        if observer.is_selected(name, _SIDE):
            observer.record_tensor(
                PARAMETER_TYPE, name, _SIDE, slot, argument, make_torch_source, tensor, state=True
            )
            observer.end_call(name)

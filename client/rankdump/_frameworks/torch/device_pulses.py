"""Pulses of tensors on an accelerator: computed there, and read back once, after the next step.

The job never waits: numbers of a step are copied to pinned memory while the next step runs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankdump._core.record import TensorKind
from rankdump._frameworks.torch.layouts import strip_distribution
from rankdump._kernels.kernel_functions import FoundMoments

# torch's stubs leave streams and events untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

_NUMBERS = 3
"""Numbers of a tensor: maximum, minimum and norm."""


class PulsePlace(NamedTuple):
    """What is known of a tensor when it is measured."""

    number: int
    """Of its kind."""
    kind: TensorKind
    source: str = ""
    """`file:line` of the call in the script."""
    gradient: TensorKind | None = None
    """The kind again, of the gradient of a parameter; else None."""


class LateStep(NamedTuple):
    """Pulses of an earlier step, in the order in which they were measured."""

    iteration: int
    pulses: tuple[tuple[PulsePlace, FoundMoments], ...]


class _PendingReadback(NamedTuple):
    iteration: int
    places: list[PulsePlace]
    numbers: list[tuple[Tensor, Any]]
    """For each device the numbers in host memory and the event after which they are there."""
    order: list[tuple[int, int]]
    """For each place its device and its index there."""


class DevicePulses:
    """Pulses of one model on accelerators; used on the training thread."""

    def __init__(self) -> None:
        self._values: dict[torch.device, list[Tensor]] = {}
        self._places: list[PulsePlace] = []
        self._order: list[tuple[torch.device, int]] = []
        self._pending: _PendingReadback | None = None

    def add(self, tensor: Tensor, place: PulsePlace) -> None:
        """Compute the numbers of a tensor for which `is_measurable` is true."""
        elements = strip_distribution(tensor).detach()
        values = self._values.setdefault(elements.device, [])
        minimum, maximum = torch.aminmax(elements)
        norm = torch.linalg.vector_norm(elements, dtype=torch.float32)
        self._order.append((elements.device, len(values) // _NUMBERS))
        values += (maximum.float(), minimum.float(), norm)
        self._places.append(place)

    def end_step(self, iteration: int) -> LateStep | None:
        """Begin to read the numbers of a step; return those of the step before."""
        earlier = self.finish()
        if self._places:
            devices = {device: number for number, device in enumerate(self._values)}
            numbers = [_begin_copy(torch.stack(values)) for values in self._values.values()]
            order = [(devices[device], index) for device, index in self._order]
            self._pending = _PendingReadback(iteration, self._places, numbers, order)
            self._values, self._places, self._order = {}, [], []
        return earlier

    def finish(self) -> LateStep | None:
        """Return the numbers that are being read, if any; wait for them."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        rows = [_wait_for_copy(*each) for each in pending.numbers]
        moments = [_make_moments(*rows[device][index]) for device, index in pending.order]
        return LateStep(pending.iteration, tuple(zip(pending.places, moments, strict=True)))


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point numbers in the memory of an accelerator."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    local = strip_distribution(tensor)
    if local.is_cpu or local.is_meta or local.layout is not torch.strided or not local.numel():
        return False
    # What is captured into a graph cannot be read back.
    return not (local.is_cuda and torch.cuda.is_current_stream_capturing())


def _begin_copy(numbers: Tensor) -> tuple[Tensor, Any]:
    if not numbers.is_cuda:
        return numbers, None
    target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    target.copy_(numbers, non_blocking=True)
    event: Any = torch.cuda.Event()
    event.record(torch.cuda.current_stream(numbers.device))
    return target, event


def _wait_for_copy(numbers: Tensor, event: Any) -> list[list[float]]:
    """Return the numbers of each tensor."""
    if event is not None:
        event.synchronize()
    return numbers.cpu().reshape(-1, _NUMBERS).tolist()


def _make_moments(maximum: float, minimum: float, norm: float) -> FoundMoments:
    """Return moments; of elements that are not finite they count one of each sort."""
    nan = int(math.isnan(maximum) or math.isnan(minimum))
    infinite = int(maximum == math.inf), int(minimum == -math.inf)
    return (0, maximum, minimum, math.nan, norm * norm, nan, *infinite, 0, 0, 0)

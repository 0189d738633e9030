"""Tensors of an accelerator: copies of CUDA tensors into pinned host memory, statistics that are
computed on the device, and pulses for the black box.

A CUDA tensor is first copied on the device, in the order of the job's own stream and at the speed
of device memory. Later writes by the job do not affect the copy, and the job's stream never waits
for the slow transfer to the host, which has its own stream. If the copies that wait for their
transfer exceed a limit, the job's own stream makes the whole copy instead. Source: PyTorch, CUDA
semantics, streams and pinned memory.

Statistics accept tensors on any device, so that results of the host can be compared with those of
an accelerator. Nothing waits for the accelerator before `read`, which reads many tensors back at
once. Numbers of pulses are copied to pinned memory while the next step runs.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import TensorKind
from rankdump._core.recorder_protocol import DeferredStatistics
from rankdump._core.statistics import DEVICE_STATISTICS, format_statistic_number
from rankdump._frameworks.torch.internals import disable_observation
from rankdump._frameworks.torch.layouts import strip_distribution
from rankdump._kernels.kernel_functions import FoundMoments
from rankdump.errors import ProtocolError

MAX_IN_FLIGHT_BYTES = 256 << 20
"""Maximum bytes of copies on all devices that wait for their transfer to the host."""
# This is cudaHostRegisterPortable: the memory is pinned for every device of the process.
_REGISTER_PORTABLE = 1


class CudaEvent(Protocol):
    """Event in a CUDA stream."""

    def query(self) -> bool:
        """Return whether all earlier work is done; raise if the device failed."""
        ...


class TorchCudaRuntime:
    """The functions of CUDA that are used, as torch offers them."""

    def __init__(self) -> None:
        self._side_streams: dict[int, Any] = {}

    def register(self, address: int, byte_count: int) -> bool:
        """Pin host memory; return whether that worked."""
        return int(_load_cudart().cudaHostRegister(address, byte_count, _REGISTER_PORTABLE)) == 0

    def unregister(self, address: int) -> None:
        """Release pinned host memory."""
        _load_cudart().cudaHostUnregister(address)

    def copy(self, tensor: Tensor, target: Tensor) -> CudaEvent:
        """Begin a copy in the order of the job's stream; return the event at its end."""
        target.copy_(tensor, non_blocking=True)
        return self._record_event(torch.cuda.current_stream(tensor.device))

    def copy_aside(self, tensor: Tensor, target: Tensor) -> CudaEvent:
        """Begin a copy of the tensor as it is now, in a stream beside the job's; return the event
        at its end.
        """
        now = tensor.clone(memory_format=torch.contiguous_format)
        side = self._get_side_stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            target.copy_(now, non_blocking=True)
        # The allocator must not reuse the memory before the side stream has finished with it.
        now.record_stream(side)
        return self._record_event(side)

    def _get_side_stream(self, device: torch.device) -> Any:
        index = device.index or 0
        if index not in self._side_streams:
            self._side_streams[index] = torch.cuda.Stream(device)
        return self._side_streams[index]

    def _record_event(self, stream: Any) -> CudaEvent:
        event = torch.cuda.Event()
        event.record(stream)
        return cast("CudaEvent", event)


class CudaCopier:
    """Starts the copies of one process, and counts the bytes of unfinished ones."""

    def __init__(self, runtime: TorchCudaRuntime, max_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self._runtime, self._max_bytes = runtime, max_bytes
        self._lock = threading.Lock()
        self._in_flight_bytes = 0

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Pin host memory; return a function that unpins it, or None if the memory cannot be
        pinned.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not self._runtime.register(address, memory.nbytes):
            return None
        return lambda: self._runtime.unregister(address)

    def begin(self, tensor: Tensor, target: memoryview) -> CudaTransfer:
        """Begin to copy the tensor's elements as they are now."""
        size = target.nbytes
        with self._lock:
            aside = self._in_flight_bytes + size <= self._max_bytes
            held = size if aside else 0
            self._in_flight_bytes += held
        copy = self._runtime.copy_aside if aside else self._runtime.copy
        try:
            with disable_observation():
                flat = torch.frombuffer(target, dtype=torch.uint8)
                event = copy(tensor.detach(), flat.view(tensor.dtype).view(tensor.shape))
        except BaseException:
            self._release(held)
            raise
        return CudaTransfer(event, lambda: self._release(held))

    def _release(self, byte_count: int) -> None:
        with self._lock:
            self._in_flight_bytes -= byte_count


class CudaTransfer:
    """A running copy; used by one thread at a time."""

    def __init__(self, event: CudaEvent, ended: Callable[[], None]) -> None:
        self._event = event
        self._release: Callable[[], None] | None = ended

    def is_done(self) -> bool:
        """Return whether the elements have arrived; raise if they never will."""
        over = True
        try:
            over = self._event.query()
            return over
        finally:
            if over and self._release is not None:
                self._release()
                self._release = None


class CudaTensor:
    """Copier of one tensor of a CUDA device."""

    __slots__ = ("_copier", "_tensor")

    def __init__(self, tensor: Tensor, copier: CudaCopier) -> None:
        self._tensor, self._copier = tensor, copier

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Pin host memory for asynchronous copies; return a function that unpins it, or None if
        pinning failed.
        """
        return self._copier.pin(memory)

    def copy_into(self, target: memoryview) -> CudaTransfer:
        """Begin to copy the elements, in C order and little endian, into a part of
        pinned memory.
        """
        return self._copier.begin(self._tensor, target)


def find_accelerator(tensor: Tensor) -> CudaTensor | None:
    """Return the asynchronous copier of a tensor; None if it is not on a CUDA device."""
    return CudaTensor(tensor, _COPIER) if tensor.is_cuda else None


def _load_cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_COPIER = CudaCopier(TorchCudaRuntime())


# torch's stubs do not know its linear algebra.
# pyright: reportUnknownVariableType=false


StatisticKind = Literal["number", "truth", "null"]

NULL_STATISTIC = "null"
"""Value of a statistic that cannot be computed (MindSpore 2.3 Dump guide, statistic.csv)."""

_BLOCK_ELEMENTS = 1 << 24
"""Number of integers that are converted at a time for their norm, to limit the memory used on the
accelerator.
"""
_COMPARABLE_DTYPES = {
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStatistics:
    """Statistics of one tensor that are still on its device."""

    row: Tensor
    """One number for each item that is not null."""
    kinds: tuple[StatisticKind, ...]
    """Rules that format the number of each item as text."""
    stream: Any
    """Stream that computes the row; None if the device has no streams."""

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        """Return the texts of `others`, with one copy to the host per device."""
        texts: dict[int, tuple[str, ...]] = {}
        by_device: dict[torch.device, list[tuple[int, DeviceStatistics]]] = {}
        for index, other in enumerate(others):
            if not isinstance(other, DeviceStatistics):
                kind = type(other).__name__
                raise ProtocolError(f"statistics {index} are a {kind}, not DeviceStatistics")
            by_device.setdefault(other.row.device, []).append((index, other))
        for device, found in by_device.items():
            numbers = iter(_fetch_numbers(device, [statistics for _, statistics in found]))
            for index, statistics in found:
                texts[index] = tuple(_format_item(kind, numbers) for kind in statistics.kinds)
        return [texts[index] for index in range(len(others))]


def start_statistics(
    tensor: Tensor, items: Sequence[str], precision: StatisticPrecision
) -> DeviceStatistics:
    """Start computing the statistics of a tensor that has elements.

    `high` computes mean and norm in float32 at least, `low` in the tensor's own type, both in
    float64 for integers. Maximum and minimum keep the tensor's type.
    """
    with disable_observation():
        wide = _select_widest_dtype(tensor.device)
        kinds: list[StatisticKind] = []
        numbers: list[Tensor] = []
        computations = _list_computations(tensor, precision)
        for item in items:
            try:
                found = computations[item]()
            except (KeyError, NotImplementedError):
                # The item is not available, or the device has no such function for the element
                # type.
                kinds.append(NULL_STATISTIC)
                continue
            kinds.append("truth" if found.dtype is torch.bool else "number")
            numbers.append(found.to(wide))
        row = torch.stack(numbers) if numbers else torch.empty(0, dtype=wide, device=tensor.device)
    return DeviceStatistics(row, tuple(kinds), _find_current_stream(tensor.device))


def convert_to_comparable(tensor: Tensor) -> Tensor:
    """Return the elements in a type that torch can compare; for complex elements, both of their
    parts.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith("float8"):
        # bfloat16 holds every value of these types exactly.
        return tensor.to(torch.bfloat16)
    kind = _COMPARABLE_DTYPES.get(name)
    return tensor if kind is None else tensor.to(kind)


def _list_computations(
    tensor: Tensor, precision: StatisticPrecision
) -> dict[str, Callable[[], Tensor]]:
    """Return for each item a function that computes it as a scalar; a complex tensor
    has no items.
    """
    if tensor.is_complex():
        return {}
    elements = convert_to_comparable(tensor)
    accumulator = _select_accumulator(elements, precision)
    # Maximum and minimum are computed in one pass.
    find_extremes = cache(lambda: torch.aminmax(elements))
    computations = (
        lambda: find_extremes()[1],
        lambda: find_extremes()[0],
        lambda: torch.mean(elements, dtype=accumulator),
        lambda: _compute_norm(elements, accumulator),
    )
    return dict(zip(DEVICE_STATISTICS, computations, strict=True))


def _compute_norm(elements: Tensor, dtype: torch.dtype) -> Tensor:
    norm = torch.linalg.vector_norm
    if elements.is_floating_point():
        return norm(elements, dtype=dtype)
    blocks = elements.reshape(-1).split(_BLOCK_ELEMENTS)
    return norm(torch.stack([norm(block.to(dtype), dtype=dtype) for block in blocks]), dtype=dtype)


def _select_accumulator(elements: Tensor, precision: StatisticPrecision) -> torch.dtype:
    if not elements.is_floating_point():
        return _select_widest_dtype(elements.device)
    if precision == "low":
        return elements.dtype
    return torch.promote_types(elements.dtype, torch.float32)


def _select_widest_dtype(device: torch.device) -> torch.dtype:
    # Apple's devices have no float64.
    return torch.float32 if device.type == "mps" else torch.float64


def _format_item(kind: StatisticKind, numbers: Iterator[float]) -> str:
    if kind == NULL_STATISTIC:
        return NULL_STATISTIC
    value = next(numbers)
    return str(bool(value)) if kind == "truth" else format_statistic_number(value)


def _fetch_numbers(device: torch.device, statistics: Sequence[DeviceStatistics]) -> list[float]:
    """Return all numbers of statistics on one device."""
    with disable_observation():
        now = _find_current_stream(device)
        for stream in {each.stream for each in statistics} - {now, None}:
            now.wait_stream(stream)
        joined = torch.cat([each.row for each in statistics]).cpu()
    return cast("list[float]", joined.tolist())


def _find_current_stream(device: torch.device) -> Any:
    """Return this thread's current stream on the device; None if it has no streams."""
    current = getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if current is None or device.type == "cpu" else current(device)


# torch's stubs leave streams and events untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

_NUMBERS = 3
"""Number of values that are computed for a tensor: maximum, minimum and norm."""


class PulsePlace(NamedTuple):
    """Facts about a tensor that are known when it is measured."""

    number: int
    """Number of the tensor's kind."""
    kind: TensorKind
    source: str = ""
    """`file:line` of the call in the script."""
    gradient: TensorKind | None = None
    """Kind of the gradient of a parameter; None for any other tensor."""


class LateStep(NamedTuple):
    """Pulses of an earlier step, in the order in which they were measured."""

    iteration: int
    pulses: tuple[tuple[PulsePlace, FoundMoments], ...]


class _PendingReadback(NamedTuple):
    iteration: int
    places: list[PulsePlace]
    numbers: list[tuple[Tensor, Any]]
    """For each device: the numbers in host memory, and the event after which they are complete."""
    order: list[tuple[int, int]]
    """For each place: the index of its device, and its index among that device's tensors."""


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
        """Begin to read the numbers of a step back; return the pulses of the step before."""
        earlier = self.finish()
        if self._places:
            devices = {device: number for number, device in enumerate(self._values)}
            numbers = [_begin_copy(torch.stack(values)) for values in self._values.values()]
            order = [(devices[device], index) for device, index in self._order]
            self._pending = _PendingReadback(iteration, self._places, numbers, order)
            self._values, self._places, self._order = {}, [], []
        return earlier

    def finish(self) -> LateStep | None:
        """Wait for the numbers that are being read back, if any; return their pulses."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        rows = [_wait_for_copy(*each) for each in pending.numbers]
        moments = [_make_moments(*rows[device][index]) for device, index in pending.order]
        return LateStep(pending.iteration, tuple(zip(pending.places, moments, strict=True)))


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point elements in the memory of an accelerator."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    local = strip_distribution(tensor)
    if local.is_cpu or local.is_meta or local.layout is not torch.strided or not local.numel():
        return False
    # Results that are captured into a CUDA graph cannot be read back.
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
    """Return the numbers of each tensor, after waiting for the copy."""
    if event is not None:
        event.synchronize()
    return numbers.cpu().reshape(-1, _NUMBERS).tolist()


def _make_moments(maximum: float, minimum: float, norm: float) -> FoundMoments:
    """Return moments made from three numbers; counts of elements that are not finite are 0 or 1 for
    each sort.
    """
    nan = int(math.isnan(maximum) or math.isnan(minimum))
    infinite = int(maximum == math.inf), int(minimum == -math.inf)
    return (0, maximum, minimum, math.nan, norm * norm, nan, *infinite, 0, 0, 0)

"""Copies tensors of a CUDA device into pinned host memory, on a stream of their own.

The tensor is first copied on the device, in the order of the job's own stream and at the speed of
device memory; so what the job does to it next does not show, and the job's stream never waits for
the slow way to the host. While too much of that is under way, the job's own stream makes the
whole copy instead. Source: torch's notes on CUDA semantics, streams and pinned memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rankdump.adapters.torch.internals import unobserved

MOST_UNDER_WAY_BYTES = 256 << 20
"""Copies on the device that wait for their way to the host, of all devices together."""
# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


class Event(Protocol):
    """A mark in a stream."""

    def query(self) -> bool:
        """Return whether everything before it is done; raise when the device failed."""
        ...


class Runtime(Protocol):
    """What is asked of CUDA."""

    def register(self, address: int, byte_count: int) -> bool:
        """Pin host memory; return whether that worked."""
        ...

    def unregister(self, address: int) -> None:
        """Let pinned memory go."""
        ...

    def copy(self, tensor: Tensor, target: Tensor) -> Event:
        """Begin to copy in the order of the job's stream; return what marks the end."""
        ...

    def copy_aside(self, tensor: Tensor, target: Tensor) -> Event:
        """Begin to copy the tensor as it is now, beside the job's stream."""
        ...


class TorchRuntime:
    """CUDA as torch offers it."""

    def __init__(self) -> None:
        self._sides: dict[int, Any] = {}

    def register(self, address: int, byte_count: int) -> bool:
        """Pin host memory; return whether that worked."""
        return int(_cudart().cudaHostRegister(address, byte_count, _PORTABLE)) == 0

    def unregister(self, address: int) -> None:
        """Let pinned memory go."""
        _cudart().cudaHostUnregister(address)

    def copy(self, tensor: Tensor, target: Tensor) -> Event:
        """Begin to copy in the order of the job's stream; return what marks the end."""
        target.copy_(tensor, non_blocking=True)
        return self._mark(torch.cuda.current_stream(tensor.device))

    def copy_aside(self, tensor: Tensor, target: Tensor) -> Event:
        """Begin to copy the tensor as it is now, beside the job's stream."""
        now = tensor.clone(memory_format=torch.contiguous_format)
        side = self._side(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            target.copy_(now, non_blocking=True)
        # The allocator may lend the memory out again only when the side stream is done with it.
        now.record_stream(side)
        return self._mark(side)

    def _side(self, device: torch.device) -> Any:
        index = device.index or 0
        if index not in self._sides:
            self._sides[index] = torch.cuda.Stream(device)
        return self._sides[index]

    def _mark(self, stream: Any) -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return cast("Event", event)


class Copier:
    """Begins copies of one process, and knows how much of it is under way."""

    def __init__(self, runtime: Runtime, most_bytes: int = MOST_UNDER_WAY_BYTES) -> None:
        self._runtime, self._most_bytes = runtime, most_bytes
        self._lock = threading.Lock()
        self._under_way_bytes = 0

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Pin host memory; None when it cannot be, else what lets it go."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not self._runtime.register(address, memory.nbytes):
            return None
        return lambda: self._runtime.unregister(address)

    def begin(self, tensor: Tensor, target: memoryview) -> CudaTransfer:
        """Begin to write the tensor's elements as they are now."""
        size = target.nbytes
        with self._lock:
            aside = self._under_way_bytes + size <= self._most_bytes
            held = size if aside else 0
            self._under_way_bytes += held
        copy = self._runtime.copy_aside if aside else self._runtime.copy
        try:
            with unobserved():
                flat = torch.frombuffer(target, dtype=torch.uint8)
                event = copy(tensor.detach(), flat.view(tensor.dtype).view(tensor.shape))
        except BaseException:
            self._ended(held)
            raise
        return CudaTransfer(event, lambda: self._ended(held))

    def _ended(self, byte_count: int) -> None:
        with self._lock:
            self._under_way_bytes -= byte_count


class CudaTransfer:
    """A copy under way; asked by one thread at a time."""

    def __init__(self, event: Event, ended: Callable[[], None]) -> None:
        self._event = event
        self._ended: Callable[[], None] | None = ended

    def done(self) -> bool:
        """Return whether the elements are there; raise when they never will be."""
        over = True
        try:
            over = self._event.query()
            return over
        finally:
            if over and self._ended is not None:
                self._ended()
                self._ended = None


class CudaTensor:
    """One tensor of a CUDA device, as what copies it."""

    __slots__ = ("_copier", "_tensor")

    def __init__(self, tensor: Tensor, copier: Copier) -> None:
        self._tensor, self._copier = tensor, copier

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Make host memory fit for copies on their own; None when it cannot be."""
        return self._copier.pin(memory)

    def copy_into(self, target: memoryview) -> CudaTransfer:
        """Begin to write the elements, C order, little endian, into a part of pinned memory."""
        return self._copier.begin(self._tensor, target)


def accelerator_of(tensor: Tensor) -> CudaTensor | None:
    """Return what copies a tensor on its own; None when it is on no CUDA device."""
    return CudaTensor(tensor, _COPIER) if tensor.is_cuda else None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_COPIER = Copier(TorchRuntime())

"""Reads a torch tensor as a `TensorSource`, or says why it cannot be read.

Never changes the tensor, the random state, the autograd graph or what a user's dispatch mode
sees.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from rankdump.adapters.torch import cuda, device_figures
from rankdump.adapters.torch.internals import (
    has_own_elements,
    outside_modes,
    unobserved,
    unwrapped,
    version_of,
    viewed,
)
from rankdump.adapters.torch.laying import SMALL_BYTES, dense, gathered, packed, shrunk
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import ProtocolError
from rankdump.contract.plan import Precision
from rankdump.values import Accelerator, Deferred, Standing


class TorchTensor:
    """A tensor with its own elements, strided, on any device."""

    __slots__ = ("byte_count", "dtype", "shape", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        self.tensor = tensor
        self.version = version
        """How often it had been changed in place; None when it does not count that."""
        self.dtype = dtype_name(tensor)
        """Common name of the element type."""
        self.shape = tuple(tensor.shape)
        """Extents, outermost first."""
        self.byte_count: int = tensor.nbytes
        """Bytes of the elements, packed."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements into `byte_count` writable bytes, C order, little endian."""
        with outside_modes():
            size = self.byte_count
            if target.nbytes != size or target.readonly:
                raise ProtocolError(f"tensor of {size} bytes into a target of {target.nbytes}")
            if not size:
                return
            if size <= SMALL_BYTES and packed(self.tensor):
                address = ctypes.addressof(ctypes.c_char.from_buffer(target))
                ctypes.memmove(address, self.tensor.data_ptr(), size)
                return
            data = gathered(self.tensor)
            if data is not None:
                target[:] = data
                return
            with unobserved():
                elements = torch.frombuffer(target, dtype=torch.uint8).view(self.tensor.dtype)
                elements.view(self.tensor.shape).copy_(self.tensor.detach())

    def accelerator(self) -> Accelerator | None:
        """Return what copies the elements on its own: a CUDA device."""
        return cuda.accelerator_of(self.tensor)

    def elements(self) -> memoryview | None:
        """Return the elements where they lie; None on a device, or if they are not packed."""
        with outside_modes():
            return self._memory() if packed(self.tensor) else None

    def unordered(self) -> memoryview | None:
        """Return the elements where they lie, in any order; None on a device, or with gaps."""
        with outside_modes():
            return self._memory() if dense(self.tensor) else None

    def standing(self) -> Standing | None:
        """Return the tensor itself, and how often it was changed in place."""
        if self.version is None:
            return None
        with outside_modes():
            base = viewed(self.tensor)
        # A view and its base count their changes together.
        owner = self.tensor if base is None else base
        return Standing(self.tensor, self.version, owner)

    def copied(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        with outside_modes():
            if packed(self.tensor):
                return ctypes.string_at(self.tensor.data_ptr(), self.byte_count)
            data = gathered(self.tensor)
        if data is not None:
            return data
        room = bytearray(self.byte_count)
        self.copy_into(memoryview(room))
        return bytes(room)

    def head(self, count: int) -> TorchTensor:
        """Return the first elements in C order, as a tensor of one dimension.

        It is a view where the elements lie in that order, else a copy of little more than them.
        """
        with unobserved():
            first = _first_rows(self.tensor.detach(), count).reshape(-1)[:count]
        shared = first.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        if shared or self.version is None:
            return TorchTensor(first, self.version)
        # What has changed before is not brought back by a copy.
        return TorchTensor(first, -1 if self.changed() else version_of(first))

    def finite(self) -> bool:
        """Return whether no element is NaN or infinite; one number is read back."""
        tensor = self.tensor
        if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        with unobserved():
            # Extremes are NaN when an element is. A sum would do, too, but could overflow itself.
            low, high = torch.aminmax(device_figures.comparable(tensor))
            return bool((low.isfinite() & high.isfinite()).item())

    def changed(self) -> bool:
        """Return whether the elements are known to have changed since this source was made.

        Writes past autograd, through `.data` or another library, are not known.
        """
        return self.version is not None and version_of(self.tensor) != self.version

    def memory(self) -> TorchTensor:
        """Return a source of the same memory that keeps no graph of gradients alive."""
        with unobserved():
            return TorchTensor(self.tensor.detach(), self.version)

    def again(self) -> TorchTensor | str:
        """Return the tensor as it is by now; the job may have taken its memory away."""
        with outside_modes():
            if shrunk(self.tensor):
                return "storage_freed"
            return source_of(self.tensor)

    def figures(self, items: tuple[str, ...], precision: Precision) -> Deferred | None:
        """Start computing statistics on the accelerator; None when the tensor is in host memory."""
        if self.tensor.device.type == "cpu":
            return None
        return device_figures.start(self.tensor, items, precision)

    def _memory(self) -> memoryview:
        room = (ctypes.c_char * self.byte_count).from_address(self.tensor.data_ptr())
        return memoryview(room).cast("B")


def source_of(tensor: Tensor) -> TorchTensor | str:
    """Return the tensor as a source, or the reason why its elements cannot be read."""
    tensor = unwrapped(tensor)
    reason = _unreadable(tensor)
    return reason if reason else TorchTensor(tensor, _version(tensor))


def dtype_name(tensor: Tensor) -> str:
    """Return the element type as in `contract.dtypes`."""
    return _READABLE.get(tensor.dtype) or _type_name(tensor.dtype)


@cache
def _type_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_EAGER = (Tensor, Parameter)
# Looked at for every tensor of a step: a plain dictionary answers fastest.
_READABLE = {getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)}


def _first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return a view of no more leading rows than hold that many elements."""
    while tensor.dim() > 1 and tensor.numel():
        inner = tensor.numel() // tensor.shape[0]
        if count > inner:
            return tensor.narrow(0, 0, min(-(-count // inner), tensor.shape[0]))
        tensor = tensor.select(0, 0)
    return tensor


def _version(tensor: Tensor) -> int | None:
    try:
        return version_of(tensor)
    except RuntimeError:  # a tensor of inference mode counts no changes
        return None


def _unreadable(tensor: Tensor) -> str:
    """Return the reason, empty when there is none; the cheap questions come first."""
    if (
        # What nearly all tensors are, of the processor.
        type(tensor) in _EAGER
        and tensor.is_cpu
        and tensor.dtype in _READABLE
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.untyped_storage().nbytes()
    ):
        return ""
    if not has_own_elements(tensor):
        # Fake, distributed and jagged tensors among them.
        return "unsupported_tensor_class"
    if tensor.layout is not torch.strided:
        return "unsupported_sparse"
    if tensor.is_nested or tensor.is_quantized:
        return "unsupported_nested" if tensor.is_nested else "unsupported_quantized"
    if tensor.is_meta or (type(tensor) not in _EAGER and torch.nn.parameter.is_lazy(tensor)):
        return "no_data"
    if tensor.dtype not in _READABLE:
        return "unsupported_dtype"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "storage_freed"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # A copy to the host would invalidate the capture.
        return "graph_capture"
    return ""

"""Reads a torch tensor as a `TensorSource`, or says why it cannot be read.

Never changes the tensor, the random state, the autograd graph or what a user's dispatch mode
sees.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rankdump.adapters.torch.internals import has_own_elements, outside_modes, unobserved, unwrapped
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import ProtocolError

_SMALL_BYTES = 1 << 16
"""Below this a plain copy takes less time than asking torch for one, which may use threads."""


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor with its own elements, strided, on any device."""

    tensor: Tensor

    @property
    def dtype(self) -> str:
        """Common name of the element type."""
        return dtype_name(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost first."""
        return tuple(self.tensor.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of the elements, packed."""
        return self.tensor.numel() * self.tensor.element_size()

    def copy_into(self, target: memoryview) -> None:
        """Write the elements into `byte_count` writable bytes, C order, little endian."""
        with outside_modes():
            size = self.byte_count
            if target.nbytes != size or target.readonly:
                raise ProtocolError(f"tensor of {size} bytes into a target of {target.nbytes}")
            if not size:
                return
            if size <= _SMALL_BYTES and self._packed():
                address = ctypes.addressof(ctypes.c_char.from_buffer(target))
                ctypes.memmove(address, self.tensor.data_ptr(), size)
                return
            with unobserved():
                packed = torch.frombuffer(target, dtype=torch.uint8).view(self.tensor.dtype)
                packed.view(self.tensor.shape).copy_(self.tensor.detach())

    def _packed(self) -> bool:
        """Return whether the elements lie in host memory just as they are to be written."""
        tensor = self.tensor
        return (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )


def source_of(tensor: Tensor) -> TorchTensor | str:
    """Return the tensor as a source, or the reason why its elements cannot be read."""
    tensor = unwrapped(tensor)
    reason = _unreadable(tensor)
    return reason if reason else TorchTensor(tensor)


def dtype_name(tensor: Tensor) -> str:
    """Return the element type as in `contract.dtypes`."""
    return str(tensor.dtype).removeprefix("torch.")


def _unreadable(tensor: Tensor) -> str:
    """Return the reason, empty when there is none; the cheap questions come first."""
    if not has_own_elements(tensor):
        # Fake, distributed and jagged tensors among them.
        return "unsupported_tensor_class"
    if tensor.layout is not torch.strided:
        return "unsupported_sparse"
    if tensor.is_nested or tensor.is_quantized:
        return "unsupported_nested" if tensor.is_nested else "unsupported_quantized"
    if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
        return "no_data"
    if dtype_name(tensor) not in ELEMENT_TYPES:
        return "unsupported_dtype"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "storage_freed"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # A copy to the host would invalidate the capture.
        return "graph_capture"
    return ""

"""Source of the elements of a torch tensor, or the reason why they cannot be read, their layout in
host memory, and the observer that passes tensors and events of one model to the recorder. It never
changes the tensor, the random state, the autograd graph, or what a user's dispatch mode sees.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    DeferredStatistics,
    DeviceCopier,
    ForwardPass,
    TensorVersion,
)
from rankdump._core.selection import OPTIMIZER_STATE_TYPE
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks.model_observer import ModelObserver
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch import device_tensors
from rankdump._frameworks.torch.internals import (
    disable_function_modes,
    disable_observation,
    find_base,
    has_own_elements,
    is_wrapped,
    read_version,
    unwrap_tensor,
)
from rankdump._frameworks.torch.layouts import LayoutFinder, find_local_shard
from rankdump._frameworks.torch.parameter_layouts import select_partition
from rankdump._kernels.array_kernels import MIN_STREAMED_BYTES, stream_memory
from rankdump._kernels.kernel_functions import KERNELS
from rankdump.errors import ProtocolError

MAX_SMALL_BYTES = 1 << 16
"""Size in bytes up to which a plain copy is faster than torch's, which may start threads."""
_MAX_STREAMED_THREADS = 2
"""If torch may use more threads than this, its copy is faster than a copy past the caches by a
single thread.
"""
_read_memory = KERNELS.functions.read_memory
_read_strided = KERNELS.functions.read_strided
_MAX_KERNEL_DIMENSIONS = 32


def is_packed(tensor: Tensor) -> bool:
    """Return whether the elements are in host memory, in C order without gaps."""
    return tensor.is_cpu and tensor.is_contiguous() and _has_plain_memory(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements are in host memory without gaps, in any order."""
    if not tensor.is_cpu:
        return False
    if tensor.is_contiguous():
        return _has_plain_memory(tensor)
    due = 1
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if step != due:
                return False
            due *= extent
    return _has_plain_memory(tensor)


def is_shrunk(tensor: Tensor) -> bool:
    """Return whether a tensor reaches beyond the end of its storage, which may have been made
    smaller.
    """
    if not tensor.numel() or tensor.layout is not torch.strided:
        return False
    reach = tensor.storage_offset() + _compute_reach(tensor.shape, tensor.stride()) + 1
    return reach * tensor.element_size() > tensor.untyped_storage().nbytes()


def _has_plain_memory(tensor: Tensor) -> bool:
    """Return whether the memory holds the elements themselves; this is the most expensive check."""
    return not (tensor.is_neg() or tensor.is_conj())


def _compute_reach(extents: Sequence[int], steps: Sequence[int]) -> int:
    """Return the distance from the first element to the last, in elements."""
    return sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))


class TorchTensor:
    """Source of a tensor with its own elements, strided, on any device."""

    __slots__ = ("byte_count", "dtype", "layout", "shape", "tensor", "version")

    def __init__(
        self, tensor: Tensor, version: int | None = None, layout: TensorLayout | None = None
    ) -> None:
        self.tensor = tensor
        self.version = version
        """Number of changes in place so far; None if the tensor does not count them."""
        self.dtype = _DTYPE_NAMES.get(tensor.dtype) or find_dtype_name(tensor)
        """Common name of the element type."""
        self.shape: tuple[int, ...] = tensor.shape
        """Extents of the dimensions, outermost first; torch's own subclass of tuple."""
        self.byte_count: int = tensor.nbytes
        """Bytes of the elements without gaps."""
        self.layout = layout
        """Part of a logical tensor that this tensor is; None for a whole tensor."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements in C order, little endian, into `byte_count` writable bytes."""
        with disable_function_modes():
            size = self.byte_count
            if target.nbytes != size or target.readonly:
                target_kind = "read-only" if target.readonly else "writable"
                raise ProtocolError(
                    f"cannot copy a tensor of {size} bytes into a target of {target.nbytes} "
                    f"{target_kind} bytes"
                )
            if not size:
                return
            data = self._copy_small()
            if data is not None:
                # A second copy of data in the cache costs less than finding the address of the
                # target.
                target[:] = data
                return
            if self._is_streamed():
                stream_memory(target, self.tensor.data_ptr())
                return
            with disable_observation():
                elements = torch.frombuffer(target, dtype=torch.uint8).view(self.tensor.dtype)
                elements.view(self.tensor.shape).copy_(self.tensor.detach())

    def accelerator(self) -> DeviceCopier | None:
        """Return the asynchronous copier of a CUDA tensor; None for any other."""
        tensor = self.tensor
        return None if tensor.is_cpu else device_tensors.find_accelerator(tensor)

    def elements(self) -> memoryview | None:
        """Return the elements in place; None on a device, or if they are not packed."""
        with disable_function_modes():
            return self._memory() if is_packed(self.tensor) else None

    def unordered(self) -> memoryview | None:
        """Return the elements in place, in any order; None on a device, or with gaps."""
        with disable_function_modes():
            return self._memory() if is_dense(self.tensor) else None

    def get_version(self) -> TensorVersion | None:
        """Return the tensor, its count of changes in place, and the tensor that counts them."""
        if self.version is None:
            return None
        with disable_function_modes():
            base = find_base(self.tensor)
        # A view and its base count their changes together.
        owner = self.tensor if base is None else base
        return TensorVersion(self.tensor, self.version, owner)

    def copy_elements(self) -> bytes:
        """Return a copy of the elements in C order, little endian."""
        with disable_function_modes():
            data = self._copy_small()
        if data is not None:
            return data
        buffer = bytearray(self.byte_count)
        self.copy_into(memoryview(buffer))
        return bytes(buffer)

    def locate_elements(self) -> int | bytes:
        """Return the address of the elements in host memory, or a copy if they are not packed."""
        tensor = self.tensor
        with disable_function_modes():
            # This equals `is_packed` with fewer calls; only complex numbers can be conjugated
            # lazily.
            if (
                self.dtype not in _COMPLEX_TYPES
                and tensor.is_cpu
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                return tensor.data_ptr()
        return self.copy_elements()

    def make_head_source(self, count: int) -> TorchTensor:
        """Return the first elements in C order, as a tensor of one dimension.

        The result is a view if the elements are in that order, else a copy of little more than
        these elements.
        """
        with disable_observation():
            first = _select_first_rows(self.tensor.detach(), count).reshape(-1)[:count]
        shared = first.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        if shared or self.version is None:
            return TorchTensor(first, self.version)
        # A copy of a tensor that has changed counts as changed too.
        return TorchTensor(first, -1 if self.has_changed() else read_version(first))

    def is_finite(self) -> bool:
        """Return whether no element is NaN or infinite; only one number is read back
        from a device.
        """
        tensor = self.tensor
        if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
            return True
        with disable_observation():
            # The extremes are NaN if an element is. A sum would be too, but it could overflow by
            # itself.
            low, high = torch.aminmax(device_tensors.convert_to_comparable(tensor))
            return bool((low.isfinite() & high.isfinite()).item())

    def has_changed(self) -> bool:
        """Return whether the elements are known to have changed since this source was made.

        Writes that bypass autograd, through `.data` or another library, are not detected.
        """
        return self.version is not None and read_version(self.tensor) != self.version

    def make_memory_source(self) -> TorchTensor:
        """Return a source of the same memory that keeps no graph of gradients alive."""
        with disable_observation():
            return TorchTensor(self.tensor.detach(), self.version, self.layout)

    def read_again(self) -> TorchTensor | str:
        """Return the tensor as it is now, or a reason, because the job may have freed
        its memory.
        """
        with disable_function_modes():
            if is_shrunk(self.tensor):
                return "storage_freed"
            return _read_elements(self.tensor, self.layout)

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> DeferredStatistics | None:
        """Start computing statistics on the accelerator; None if the tensor is in host memory."""
        if self.tensor.is_cpu:
            return None
        return device_tensors.start_statistics(self.tensor, items, precision)

    def _copy_small(self) -> bytes | None:
        """Return a copy of a few elements in C order; None if torch should make it."""
        tensor, size = self.tensor, self.byte_count
        if (
            size > MAX_SMALL_BYTES
            or not tensor.is_cpu
            # This equals `_has_plain_memory`; only complex numbers can be conjugated lazily.
            or tensor.is_neg()
            or (self.dtype in _COMPLEX_TYPES and tensor.is_conj())
        ):
            return None
        if tensor.is_contiguous():
            return _read_memory(tensor.data_ptr(), size)
        extents = tensor.shape
        if len(extents) > _MAX_KERNEL_DIMENSIONS:
            return None
        # For so few elements the overhead of a call of torch or numpy would take most of the time.
        return _read_strided(tensor.data_ptr(), tensor.element_size(), extents, tensor.stride())

    def _is_streamed(self) -> bool:
        """Return whether this thread alone copies past the caches; torch would copy with all of its
        threads.
        """
        is_large = self.byte_count >= MIN_STREAMED_BYTES
        return (
            is_large and torch.get_num_threads() <= _MAX_STREAMED_THREADS and is_packed(self.tensor)
        )

    def _memory(self) -> memoryview:
        buffer = (ctypes.c_char * self.byte_count).from_address(self.tensor.data_ptr())
        return memoryview(buffer).cast("B")


class CompiledTensor(TorchTensor):
    """Source of a tensor in compiled code, which reuses memory without counting changes."""

    __slots__ = ()

    def has_changed(self) -> bool:
        """Return True: the elements are certain only at the moment of the observation."""
        return True

    def make_memory_source(self) -> TorchTensor:
        """Return a source of a copy, which does not change any more."""
        with disable_observation():
            return TorchTensor(self.tensor.detach().clone(), None, self.layout)


UNREADABLE_TENSOR = torch.empty(0, device="meta")
"""Stands for a tensor that compiled code could not pass on because of its class."""


def make_compiled_source(tensor: Tensor) -> TorchTensor | str | None:
    """Return a tensor in compiled code as a source, or the reason why it cannot be read."""
    if tensor is UNREADABLE_TENSOR:
        return _UNSUPPORTED_CLASS
    source = make_torch_source(tensor)
    if isinstance(source, TorchTensor):
        return CompiledTensor(source.tensor, None, source.layout)
    return source


def make_torch_source(tensor: Tensor) -> TorchTensor | str | None:
    """Return the tensor as a source, or the reason why its elements cannot be read.

    For a distributed tensor the source is the local part; the result is None on a rank that has no
    part.
    """
    if is_wrapped(tensor):
        tensor = unwrap_tensor(tensor)
    if (
        # Nearly all tensors in host memory pass this check.
        type(tensor) in _EAGER_TYPES
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.dtype in _DTYPE_NAMES
        and not tensor.is_nested
        and tensor.untyped_storage().nbytes()
    ):
        return TorchTensor(tensor, _read_version(tensor))
    reason = _explain_unreadable(tensor)
    if not reason:
        return TorchTensor(tensor, _read_version(tensor))
    shard = find_local_shard(tensor) if reason == _UNSUPPORTED_CLASS else None
    if shard is None:
        return reason
    return None if shard.is_outside else _read_elements(shard.tensor, shard.layout)


def _read_elements(tensor: Tensor, layout: TensorLayout | None) -> TorchTensor | str:
    reason = _explain_unreadable(tensor)
    return reason if reason else TorchTensor(tensor, _read_version(tensor), layout)


def find_dtype_name(tensor: Tensor) -> str:
    """Return the name of the element type as in `_core/element_types.py`."""
    return _DTYPE_NAMES.get(tensor.dtype) or _format_dtype(tensor.dtype)


@cache
def _format_dtype(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_EAGER_TYPES = (Tensor, Parameter)
_STRIDED = torch.strided
_COMPLEX_TYPES = frozenset(name for name in ELEMENT_TYPES if name.startswith("complex"))
_UNSUPPORTED_CLASS = "unsupported_tensor_class"
# The name is looked up for every tensor of a step, and a plain dictionary is fastest.
_DTYPE_NAMES = {getattr(torch, name): name for name in ELEMENT_TYPES if hasattr(torch, name)}


def _select_first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return a view of the first rows, as few as contain `count` elements."""
    while tensor.dim() > 1 and tensor.numel():
        inner = tensor.numel() // tensor.shape[0]
        if count > inner:
            return tensor.narrow(0, 0, min(-(-count // inner), tensor.shape[0]))
        tensor = tensor.select(0, 0)
    return tensor


def _read_version(tensor: Tensor) -> int | None:
    try:
        return read_version(tensor)
    except RuntimeError:  # a tensor of inference mode counts no changes
        return None


def _explain_unreadable(tensor: Tensor) -> str:
    """Return why a tensor cannot be read; empty if it can."""
    if not has_own_elements(tensor):
        # This includes fake and jagged tensors.
        return _UNSUPPORTED_CLASS
    if tensor.layout is not torch.strided:
        return "unsupported_sparse"
    if tensor.is_nested or tensor.is_quantized:
        return "unsupported_nested" if tensor.is_nested else "unsupported_quantized"
    if tensor.is_meta or (type(tensor) not in _EAGER_TYPES and torch.nn.parameter.is_lazy(tensor)):
        return "no_data"
    if tensor.dtype not in _DTYPE_NAMES:
        return "unsupported_dtype"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "storage_freed"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        # A copy to the host would invalidate the capture of the graph.
        return "graph_capture"
    return ""


class TorchObserver(ModelObserver):
    """Observer of one attached torch model."""

    def record_tensors(
        self,
        op_type: str,
        op_name: str,
        side: TensorSide,
        leaves: Iterable[CallLeaf],
        forward_pass: ForwardPass = UNDIVIDED_PASS,
        read: Callable[[Tensor], TorchTensor | str | None] | None = None,
    ) -> None:
        """Record the tensors among the leaves of one side of an operator.

        `read` makes the sources of the tensors; by default they are tensors outside of compiled
        code.
        """
        if not self.recorder.is_wanted(self.graph, op_name, side):
            return
        for slot, argument, value in leaves:
            if isinstance(value, Tensor):
                self.record_tensor(
                    op_type,
                    op_name,
                    side,
                    slot,
                    argument,
                    read or make_torch_source,
                    value,
                    forward_pass=forward_pass,
                )

    def record_state(
        self,
        name: str,
        argument: str,
        tensor: Tensor,
        *,
        constant: bool = False,
        find_layout: LayoutFinder | None = None,
    ) -> None:
        """Record a parameter or buffer with its current value."""
        read = _choose_reader(find_layout)
        self.record_parameter(name, argument, read, tensor, state=True, constant=constant)

    def record_optimizer_state(
        self, name: str, argument: str, tensor: Tensor, find_layout: LayoutFinder | None
    ) -> None:
        """Record a selected state of an optimizer as the output of an operator with its
        own name.
        """
        read, side, kind = _choose_reader(find_layout), TensorSide.OUTPUT, OPTIMIZER_STATE_TYPE
        self.record_tensor(kind, name, side, 0, argument, read, tensor, state=True)
        self.end_call(name)

    def record_gradient(
        self, name: str, tensor: Tensor, find_layout: LayoutFinder | None = None
    ) -> None:
        """Record the gradient of a parameter as the output of its own operator."""
        self.record_parameter(name, "grad", _choose_reader(find_layout), tensor)


def _choose_reader(
    find_layout: LayoutFinder | None,
) -> Callable[[Tensor], TorchTensor | str | None]:
    return make_torch_source if find_layout is None else partial(_read_part, find_layout)


def _read_part(find_layout: LayoutFinder, tensor: Tensor) -> TorchTensor | str | None:
    """Return a tensor as a source, with the layout of a plain tensor that is only a part of
    another.
    """
    source = make_torch_source(select_partition(tensor))
    if isinstance(source, TorchTensor) and source.layout is None:
        source.layout = find_layout(source.shape)
    return source

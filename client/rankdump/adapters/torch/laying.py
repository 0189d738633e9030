"""How the elements of a torch tensor lie in host memory. Reads no element but to copy it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SMALL_BYTES = 1 << 16
"""Below this a plain copy takes less time than asking torch for one, which may use threads."""
_NUMBERS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""By the bytes of an element: what numpy copies bit by bit."""


def packed(tensor: Tensor) -> bool:
    """Return whether the elements lie in host memory just as they are to be written."""
    return tensor.is_cpu and tensor.is_contiguous() and _as_it_lies(tensor)


def dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of host memory, in whatever order."""
    if not tensor.is_cpu:
        return False
    if tensor.is_contiguous():
        return _as_it_lies(tensor)
    due = 1
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if step != due:
                return False
            due *= extent
    return _as_it_lies(tensor)


def gathered(tensor: Tensor) -> bytes | None:
    """Return a copy of a few elements, in C order; None where torch is to make it.

    Most of the time that torch takes for so few is for being asked.
    """
    size = tensor.element_size()
    if size not in _NUMBERS or not tensor.is_cpu or not tensor.numel() or not _as_it_lies(tensor):
        return None
    shape, strides = tuple(tensor.shape), [step * size for step in tensor.stride()]
    reach = _reach(shape, strides) + size
    if reach > SMALL_BYTES:
        return None
    stretch = ctypes.string_at(tensor.data_ptr(), reach)
    return np.ndarray(shape, _NUMBERS[size], stretch, strides=strides).tobytes()


def shrunk(tensor: Tensor) -> bool:
    """Return whether the elements reach beyond the memory that is left of their storage."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return False
    reach = tensor.storage_offset() + _reach(tensor.shape, tensor.stride()) + 1
    return reach * tensor.element_size() > tensor.untyped_storage().nbytes()


def _as_it_lies(tensor: Tensor) -> bool:
    """Return whether memory holds the very elements. Asked last: it costs more than the rest."""
    return not (tensor.is_neg() or tensor.is_conj())


def _reach(extents: Sequence[int], steps: Sequence[int]) -> int:
    """Return how far the last element of some is behind the first."""
    return sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))

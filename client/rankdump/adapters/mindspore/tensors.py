"""Reads a MindSpore tensor as a `TensorSource`, or says why it cannot be read."""

from __future__ import annotations

from typing import Any

from rankdump.adapters.arrays import ArraySource
from rankdump.adapters.mindspore.framework import Tensor
from rankdump.contract.errors import UnsupportedError


def is_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor: a parameter among them, sparse ones not."""
    return isinstance(value, Tensor)


def is_data(tensor: Any) -> bool:
    """Return whether it is of floating point with a shape and elements: neither mask nor loss."""
    return bool(tensor.is_floating_point() and tensor.ndim and tensor.size)


def source_of(tensor: Any) -> ArraySource | str:
    """Return the tensor's elements in host memory, or the reason why they cannot be read.

    On the processor they are a view, on a device a copy. Types numpy has no name for, such as
    bfloat16, are those of MindSpore's own extension of it.
    """
    if tensor.has_init:
        # Reading would make the elements, which the job leaves to later.
        return "no_data"
    try:
        return ArraySource(tensor.asnumpy())
    except (UnsupportedError, TypeError):
        return "unsupported_dtype"


def dtype_name(tensor: Any) -> str:
    """Return the element type as in `contract.dtypes`, as near as its spelling tells."""
    return str(tensor.dtype).lower()

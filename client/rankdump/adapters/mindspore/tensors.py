"""Reads a MindSpore tensor as a `TensorSource`, or says why it cannot be read.

Operators run behind the program. One that fails does so for whoever asks for its result, each time
anew: the job learns of it from its own question, whether or not we asked before.
"""

from __future__ import annotations

from typing import Any

from rankdump.adapters.arrays import ArraySource
from rankdump.adapters.mindspore.framework import Tensor
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.graph import TensorType

OPERATOR_FAILED = "operator_failed"
"""Reason of a tensor that was never made."""
_FAILURES = (RuntimeError, TypeError, ValueError)
"""What a failed operator raises."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor: a parameter among them, sparse ones not."""
    return isinstance(value, Tensor)


def is_data(tensor: Any) -> bool:
    """Return whether it is of floating point with a shape and elements: neither mask nor loss.

    So is what a failed operator should have made, that it may be counted as lost.
    """
    try:
        return bool(tensor.is_floating_point() and tensor.ndim and tensor.size)
    except _FAILURES:
        return True


def type_of(tensor: Any) -> TensorType:
    """Return element type and extents; of what a failed operator should have made, nothing."""
    try:
        return TensorType(str(tensor.dtype).lower(), tuple(tensor.shape))
    except _FAILURES:
        return TensorType("", ())


def source_of(tensor: Any) -> ArraySource | str:
    """Return the tensor's elements in host memory, or the reason why they cannot be read.

    On the processor they are a view, on a device a copy. Types numpy has no name for, such as
    bfloat16, are those of MindSpore's own extension of it.
    """
    try:
        if tensor.has_init:
            # Reading would make the elements, which the job leaves to later.
            return "no_data"
        array = tensor.asnumpy()
    except _FAILURES:
        return OPERATOR_FAILED
    try:
        return ArraySource(array)
    except UnsupportedError:
        return "unsupported_dtype"

"""Source of the elements of a MindSpore tensor, or the reason why they cannot be read; and the
observer that passes tensors and events of one model to the recorder and counts failures.

Operators run asynchronously. A failed operator raises at each read of its result, so the job still
gets the error at its own read, whether or not rankdump has read the result before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.graph import TensorType
from rankdump._core.hook_meter import HOOK_METER
from rankdump._core.plan import StatisticPrecision
from rankdump._core.tensor_layout import TensorLayout
from rankdump._frameworks.arrays import ArraySource
from rankdump._frameworks.mindspore.framework import Tensor, read_dtype
from rankdump._frameworks.model_observer import ModelObserver

OPERATOR_FAILED = "operator_failed"
"""Drop reason of a tensor that was never computed."""
_OPERATOR_ERRORS = (RuntimeError, TypeError, ValueError)
"""Errors that reading the result of a failed operator raises."""


class MindSporeTensor:
    """Source that waits for the elements of a tensor only when they are read.

    For a small tensor this wait takes longer than all other work.
    """

    def __init__(self, tensor: Any, kind: TensorType) -> None:
        self._tensor = tensor
        self.dtype = kind.dtype
        """Common name of the element type."""
        self.shape = kind.shape
        """Extents of the dimensions, outermost first."""
        self.byte_count = math.prod(kind.shape) * ELEMENT_TYPES[kind.dtype].item_bytes
        """Bytes of the elements without gaps."""
        self.layout: TensorLayout | None = None
        """Layout that a script declared for the tensor; MindSpore itself describes none."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements in C order, little endian, into `target`."""
        self._array.copy_into(target)

    def accelerator(self) -> None:
        """Return None: MindSpore itself copies the elements into host memory."""
        return

    def elements(self) -> memoryview | None:
        """Return the elements in place; None if they are not packed."""
        return self._array.elements()

    def unordered(self) -> memoryview | None:
        """Return the elements in place, in any order; None if even that needs a copy."""
        return self._array.unordered()

    def get_version(self) -> None:
        """Return None: MindSpore keeps no record of changes."""
        return

    def copy_elements(self) -> bytes:
        """Return a copy of the elements in C order, little endian."""
        return self._array.copy_elements()

    def locate_elements(self) -> int | bytes:
        """Return the address of the elements in host memory, or a copy if they are not packed."""
        return self._array.locate_elements()

    def make_head_source(self, count: int) -> ArraySource:
        """Return a copy of the first elements in C order, as an array of one dimension."""
        return self._array.make_head_source(count)

    def is_finite(self) -> bool:
        """Return whether no element is NaN or infinite."""
        return self._array.is_finite()

    def has_changed(self) -> bool:
        """Return False: MindSpore keeps no record of changes."""
        return False

    def make_memory_source(self) -> ArraySource:
        """Return a source of the elements without the tensor's graph of gradients."""
        return self._array

    def read_again(self) -> MindSporeTensor | str:
        """Return the tensor as it is now, or the reason why it can no longer be read."""
        return make_mindspore_source(self._tensor)

    def start_statistics(self, items: tuple[str, ...], precision: StatisticPrecision) -> None:
        """Return None: statistics are computed in host memory."""
        return

    @cached_property
    def _array(self) -> ArraySource:
        # In host memory this is a view, on a device a copy. Of the types that numpy lacks, bfloat16
        # is MindSpore's own numpy type, and float8 is raw bytes.
        array = self._tensor.asnumpy()
        return ArraySource(array.view(np.uint8) if array.dtype.kind == "V" else array, self.dtype)


def is_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor, or a parameter."""
    return isinstance(value, Tensor)


def is_float_data(tensor: Any) -> bool:
    """Return whether a tensor has a floating-point type, dimensions and elements, so that it is
    neither a mask nor a loss.

    The result is True for the output of a failed operator, so that it is counted as lost.
    """
    try:
        return bool(tensor.is_floating_point() and tensor.ndim and tensor.size)
    except _OPERATOR_ERRORS:
        return True


def read_tensor_type(tensor: Any) -> TensorType:
    """Return element type and shape of a tensor; both are empty for the output of a failed
    operator.
    """
    try:
        return TensorType(read_dtype(tensor), tuple(tensor.shape))
    except _OPERATOR_ERRORS:
        return TensorType("", ())


def make_mindspore_source(tensor: Any) -> MindSporeTensor | str:
    """Return the tensor as a source, or the reason why its elements cannot be read."""
    if tensor.has_init:
        # Reading the tensor would create its elements, which the job creates later.
        return "no_data"
    kind = read_tensor_type(tensor)
    if not kind.dtype:
        return OPERATOR_FAILED
    return MindSporeTensor(tensor, kind) if kind.dtype in ELEMENT_TYPES else "unsupported_dtype"


_ResultT = TypeVar("_ResultT")


class MindSporeObserver(ModelObserver):
    """Observer of one attached MindSpore model, which reports errors of its hooks."""

    def run_shielded(self, body: Callable[..., _ResultT], *args: Any) -> _ResultT | None:
        """Run the body of a hook; return None after an error, which is reported. Interrupts pass
        through.
        """
        is_measured = HOOK_METER.is_on and HOOK_METER.begin()
        try:
            return body(*args)
        except Exception as error:
            self.report_failure(error)
            return None
        finally:
            if is_measured:
                HOOK_METER.end()

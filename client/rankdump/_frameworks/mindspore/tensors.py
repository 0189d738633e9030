"""Source of a MindSpore tensor's elements, or the reason why they cannot be read, and the observer
that hands tensors and events of one model to the recorder and counts failures.

Operators run behind the program. An operator that fails does so for whoever asks for its result,
each time anew: the job learns of it from its own request, whether or not we asked before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.graph import TensorType
from rankdump._core.plan import StatisticPrecision
from rankdump._frameworks.arrays import ArraySource
from rankdump._frameworks.mindspore.framework import Tensor, read_dtype
from rankdump._frameworks.model_observer import ModelObserver

OPERATOR_FAILED = "operator_failed"
"""Reason of a tensor that was never made."""
_OPERATOR_ERRORS = (RuntimeError, TypeError, ValueError)
"""What a failed operator raises."""


class MindSporeTensor:
    """A tensor whose elements are waited for when somebody asks for them, and not before.

    That wait takes longer than all else that is done about a small tensor.
    """

    def __init__(self, tensor: Any, kind: TensorType) -> None:
        self._tensor = tensor
        self.dtype = kind.dtype
        """Common name of the element type."""
        self.shape = kind.shape
        """Extents, outermost first."""
        self.byte_count = math.prod(kind.shape) * ELEMENT_TYPES[kind.dtype].item_bytes
        """Bytes of the elements, packed."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements, C order, little endian."""
        self._array.copy_into(target)

    def accelerator(self) -> None:
        """Return None: MindSpore brings the elements into host memory itself."""
        return

    def elements(self) -> memoryview | None:
        """Return the elements where they lie; None if they lie in another way than packed."""
        return self._array.elements()

    def unordered(self) -> memoryview | None:
        """Return the elements where they lie, in any order; None where even that needs a copy."""
        return self._array.unordered()

    def get_version(self) -> None:
        """Return None: MindSpore keeps no record of changes."""
        return

    def copy_elements(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        return self._array.copy_elements()

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
        """Return the elements alone, without the tensor's graph of gradients."""
        return self._array

    def read_again(self) -> MindSporeTensor | str:
        """Return the tensor as it is by now, or the reason why it cannot be read any more."""
        return make_mindspore_source(self._tensor)

    def start_statistics(self, items: tuple[str, ...], precision: StatisticPrecision) -> None:
        """Return None: statistics are computed in host memory."""
        return

    @cached_property
    def _array(self) -> ArraySource:
        # On the processor a view, on a device a copy. Of the types numpy lacks bfloat16 is one of
        # MindSpore's own, and float8 bytes without a meaning.
        array = self._tensor.asnumpy()
        return ArraySource(array.view(np.uint8) if array.dtype.kind == "V" else array, self.dtype)


def is_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor: a parameter among them, sparse ones not."""
    return isinstance(value, Tensor)


def is_float_data(tensor: Any) -> bool:
    """Return whether it is of floating point with a shape and elements: neither mask nor loss.

    So is what a failed operator should have made, that it may be counted as lost.
    """
    try:
        return bool(tensor.is_floating_point() and tensor.ndim and tensor.size)
    except _OPERATOR_ERRORS:
        return True


def read_tensor_type(tensor: Any) -> TensorType:
    """Return element type and extents; of what a failed operator should have made, nothing."""
    try:
        return TensorType(read_dtype(tensor), tuple(tensor.shape))
    except _OPERATOR_ERRORS:
        return TensorType("", ())


def make_mindspore_source(tensor: Any) -> MindSporeTensor | str:
    """Return the tensor as a source, or the reason why its elements cannot be read."""
    if tensor.has_init:
        # Reading would make the elements, which the job leaves to later.
        return "no_data"
    kind = read_tensor_type(tensor)
    if not kind.dtype:
        return OPERATOR_FAILED
    return MindSporeTensor(tensor, kind) if kind.dtype in ELEMENT_TYPES else "unsupported_dtype"


_ResultT = TypeVar("_ResultT")


class MindSporeObserver(ModelObserver):
    """Observer of one attached MindSpore model, which reports errors of its hooks."""

    def run_shielded(self, body: Callable[..., _ResultT], *args: Any) -> _ResultT | None:
        """Run a hook's body; None after an error, which is reported. Interrupts pass through."""
        try:
            return body(*args)
        except Exception as error:
            self.report_failure(error)
            return None

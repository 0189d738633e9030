"""Arrays and the addresses of their elements. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


class _MemoryDescription:
    """Memory as numpy takes it from other libraries."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.__array_interface__ = description


def view_memory(
    address: int,
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> npt.NDArray[Any]:
    """Return an array over memory, which the caller keeps alive; strides in bytes."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    description: dict[str, Any] = {
        "version": 3,
        "data": (address, False),
        "typestr": np.dtype(dtype).str,
        "shape": shape,
        "strides": strides,
    }
    return np.asarray(_MemoryDescription(description))


def find_address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first element; faster than `array.ctypes`."""
    return array.__array_interface__["data"][0]

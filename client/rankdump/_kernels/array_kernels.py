"""Kernels for arrays: moments of any array, and copies between arrays of the same shape. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._kernels.element_moments import (
    ALL_PARTS,
    ELEMENT_CODES,
    ElementMoments,
    find_address,
    merge_moments,
)
from rankdump._kernels.kernel_functions import KERNELS

MIN_STREAMED_BYTES = 1 << 16
"""Size in bytes from which a copy that bypasses the caches is faster if its target is shared
memory.
"""
_BLOCK_ELEMENTS = 1 << 16
"""Number of elements that are copied at a time if they are not contiguous or of another type."""


def measure_array(flat: npt.NDArray[Any], parts: int = ALL_PARTS) -> ElementMoments:
    """Return the moments of a flat array of real elements of any type and order."""
    code = ELEMENT_CODES.get(str(flat.dtype))
    if code is not None and flat.flags.c_contiguous:
        found = KERNELS.functions.measure_elements(find_address(flat), flat.size, code, parts)
        return ElementMoments(*found)
    with np.errstate(all="ignore"):
        return merge_moments(
            [
                measure_array(_copy_block(flat[at : at + _BLOCK_ELEMENTS]), parts)
                for at in range(0, flat.size, _BLOCK_ELEMENTS)
            ]
        )


def _copy_block(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a block that kernels can read; types without a kernel code
    become float64.
    """
    name = str(block.dtype)
    return np.array(block, name if name in ELEMENT_CODES else "float64", order="C")


def copy_array(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy the elements of an array, bit by bit, into another array that does not overlap it.

    ValueError if shapes or item sizes differ, or if the target is read-only.
    """
    if target.shape != source.shape or target.itemsize != source.itemsize:
        raise ValueError(
            f"{source.dtype}{source.shape} cannot be copied to {target.dtype}{target.shape}"
        )
    if not target.flags.writeable:
        raise ValueError("the target is read-only")
    KERNELS.functions.copy_strided(
        find_address(target),
        find_address(source),
        target.itemsize,
        target.shape or (1,),
        target.strides or (0,),
        source.strides or (0,),
    )


def stream_memory(target: memoryview, address: int) -> None:
    """Fill `target` with bytes from an address, by stores that bypass the CPU caches. So the
    processor does not read the memory that it overwrites, and the data of the job stays in the
    caches. ValueError for a read-only target.
    """
    if target.readonly:
        raise ValueError("the target is read-only")
    placed = find_address(np.frombuffer(target, np.uint8))
    KERNELS.functions.stream_memory(placed, address, target.nbytes)

"""Plain arrays as tensors: numpy, and whatever numpy can view."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.dtypes import element_type
from rankdump.contract.errors import UnsupportedError


class ArraySource:
    """A numpy array, or anything `numpy.asarray` takes without copying."""

    def __init__(self, array: npt.ArrayLike) -> None:
        self._array: npt.NDArray[Any] = np.asarray(array)
        kind: np.dtype[Any] = self._array.dtype
        if kind.hasobject:
            raise UnsupportedError(f"array of Python objects ({kind})")
        # Types of extension packages, such as bfloat16, carry their common name.
        self._type = element_type(f"{kind.name}")
        self._little: np.dtype[np.generic] = kind.newbyteorder("<")

    @property
    def dtype(self) -> str:
        """Common name of the element type."""
        return self._type.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost first."""
        return self._array.shape

    @property
    def byte_count(self) -> int:
        """Bytes of the elements, packed."""
        return self._array.size * self._type.item_bytes

    def copy_into(self, target: memoryview) -> None:
        """Write the elements, C order, little endian."""
        if not self.byte_count:
            return
        np.copyto(np.frombuffer(target, self._little).reshape(self.shape), self._array)

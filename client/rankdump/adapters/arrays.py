"""Plain arrays as tensors: numpy, and whatever numpy can view."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rankdump.contract.dtypes import ElementType, as_stored, element_type
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.plan import Precision
from rankdump.values import Accelerator, Deferred, Standing


class ArraySource:
    """A numpy array, or anything `numpy.asarray` takes without copying.

    It is a view, not a copy: its elements are those at the time of reading. Strings, objects and
    times raise UnsupportedError: no npy file holds them without code that runs on loading.
    """

    def __init__(self, array: npt.ArrayLike, dtype: str = "") -> None:
        """`dtype` names the elements where the array's own type does not: float8 as `uint8`."""
        self._array: npt.NDArray[Any] = np.asarray(array)
        self._type, self._little = _types(self._array.dtype, dtype)

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

    def accelerator(self) -> Accelerator | None:
        """Return None: an array lies in host memory."""
        return None

    def elements(self) -> memoryview | None:
        """Return the elements where they lie; None if they lie in another way than packed."""
        packed = self._array.flags.c_contiguous and self._array.dtype == self._little
        return self._array.reshape(-1).view(np.uint8).data if packed else None

    def unordered(self) -> memoryview | None:
        """Return the elements where they lie, C order or Fortran's; None for any other."""
        flags = self._array.flags
        if self._array.dtype != self._little or not (flags.c_contiguous or flags.f_contiguous):
            return None
        return self._array.ravel(order="K").view(np.uint8).data

    def standing(self) -> Standing | None:
        """Return None: an array keeps no record of changes."""
        return None

    def copied(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        return self._array.astype(self._little, copy=False).tobytes()

    def head(self, count: int) -> ArraySource:
        """Return a copy of the first elements in C order, as an array of one dimension."""
        return ArraySource(cast("npt.NDArray[Any]", self._array.flat[:count]), self.dtype)

    def finite(self) -> bool:
        """Return whether no element is NaN or infinite."""
        if not self._type.widened:
            integers = self._array.dtype.kind in "biu"
            return integers or bool(np.isfinite(self._array).all())
        data = memoryview(bytearray(self.byte_count))
        self.copy_into(data)
        wide = np.frombuffer(as_stored(self.dtype, data), self._type.descr)
        return bool(np.isfinite(wide).all())

    def changed(self) -> bool:
        """Return False: an array keeps no record of changes."""
        return False

    def memory(self) -> ArraySource:
        """Return the source itself: it is a view of memory and no more."""
        return self

    def again(self) -> ArraySource | str:
        """Return the source itself: an array keeps its memory as long as it is viewed."""
        return self

    def figures(self, items: tuple[str, ...], precision: Precision) -> Deferred | None:
        """Return None: an array lies in host memory."""
        return None


# Few types occur in a job, but anything may be one.
@lru_cache(maxsize=256)
def _types(kind: np.dtype[Any], name: str) -> tuple[ElementType, np.dtype[np.generic]]:
    """Return an array's element type, and how it lies in a file."""
    if kind.hasobject:
        raise UnsupportedError(f"array of Python objects ({kind})")
    # Types of extension packages, such as bfloat16, carry their common name.
    little = cast("np.dtype[np.generic]", kind.newbyteorder("<"))
    return element_type(name or f"{kind.name}"), little

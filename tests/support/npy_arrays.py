"""Arrays of npy files."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from rankdump._core.npy_format import parse_npy_header, view_array_behind_header


def view_npy_array(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array of a whole npy file as a read-only view of its bytes."""
    return view_array_behind_header(parse_npy_header(data), data)

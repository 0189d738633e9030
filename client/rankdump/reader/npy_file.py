"""The array of an npy file, in whichever form it was written. Pure; never unpickles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract import npy
from rankdump.contract.dtypes import as_stored
from rankdump.contract.npy_forms import form_of


def read(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array, read-only, bfloat16 as float32; DamagedError when it is none."""
    form = form_of(data)
    array = npy.array_behind(form.header, data[: form.end])
    if not form.bfloat16:
        return array
    wide = np.frombuffer(as_stored("bfloat16", _bytes_of(array)), dtype="<f4").reshape(array.shape)
    wide.flags.writeable = False
    return wide


def _bytes_of(raw: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1).data

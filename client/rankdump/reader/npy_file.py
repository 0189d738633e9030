"""The array of an npy file as MindSpore itself may have written it. Pure; never unpickles.

Two forms that numpy refuses are read here and nowhere else: raw bfloat16 under a type string that
numpy does not know (mindspore-dump.md 4), and an empty tensor with stray bytes of one element
behind it (mindspore-observed.md 2.6).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract import npy
from rankdump.contract.dtypes import as_stored

_STRAY_BYTES = 8
"""Most that stands behind an empty tensor: one element."""
_HEADER_BYTES = 4096
_BFLOAT16 = re.compile(rb"('descr': *')<[ETh]2'")
"""`<h2` in 2.2, `<T2` in 2.3, `<E2` in 2.6 and later."""


def read(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array, read-only, bfloat16 as float32; DamagedError when it is none."""
    plain, was_bfloat16 = _renamed(data)
    if was_bfloat16:
        raw = npy.array(plain)
        wide = np.frombuffer(as_stored("bfloat16", _bytes_of(raw)), dtype="<f4").reshape(raw.shape)
        wide.flags.writeable = False
        return wide
    head = npy.parse_header(data)
    if head.data_bytes == 0 and 0 < len(data) - head.data_offset <= _STRAY_BYTES:
        return npy.array(data[: head.data_offset])
    return npy.array(data)


def _renamed(data: bytes | memoryview) -> tuple[bytes | memoryview, bool]:
    """Return the file with the type string of two-byte words in the place of MindSpore's own."""
    start = bytes(data[:_HEADER_BYTES])
    header_end = 10 + int.from_bytes(start[8:10], "little")
    head, changes = _BFLOAT16.subn(rb"\1<u2'", start[:header_end], count=1)
    if not changes:
        return data, False
    return head + bytes(data[len(head) :]), True


def _bytes_of(raw: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1).data

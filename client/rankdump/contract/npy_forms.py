"""npy files as MindSpore itself may have written them. Pure.

Two forms that numpy refuses are told here and nowhere else: raw bfloat16 under a type string that
numpy does not know (mindspore-dump.md 4), and an empty tensor with stray bytes of one element
behind it (mindspore-observed.md 2.6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankdump.contract import npy

_STRAY_BYTES = 8
"""Most that stands behind an empty tensor: one element."""
_BFLOAT16 = re.compile(rb"('descr': *')<[ETh]2'")
"""`<h2` in 2.2, `<T2` in 2.3, `<E2` in 2.6 and later."""


@dataclass(frozen=True, slots=True)
class NpyForm:
    """What an npy file holds, and where."""

    header: npy.NpyHeader
    """With two-byte words in the place of bfloat16."""
    bfloat16: bool
    end: int
    """Where the elements end; only stray bytes stand behind."""

    @property
    def dtype(self) -> str:
        """Name of the elements' type."""
        return "bfloat16" if self.bfloat16 else str(np.dtype(self.header.descr))


def form_of(data: bytes | memoryview, file_bytes: int | None = None) -> NpyForm:
    """Return the form of a file from its bytes, or from its start and its size.

    DamagedError when its size is not what its header says.
    """
    _, end = npy.header_text(data)
    words, renamed = _BFLOAT16.subn(rb"\1<u2'", bytes(data[:end]), count=1)
    header = npy.parse_header(words)
    size = len(data) if file_bytes is None else file_bytes
    stray = size - header.data_offset if header.data_bytes == 0 else 0
    if 0 < stray <= _STRAY_BYTES:
        size = header.data_offset
    npy.check_size(header, size)
    return NpyForm(header, renamed > 0, size)

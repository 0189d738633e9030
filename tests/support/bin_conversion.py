"""Bin files to convert, and the expected results."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpBuffer, OpInput, OpOutput, Shape, Workspace
from rankdump._core.cann_types import DATA_TYPE_NUMBERS, FORMAT_NUMBERS

NAME = "Conv2D.Default_conv1-op3.7.12.1719000000123456"


def tensor(side, array, layout="ND", original=None, **changes):
    """A part of a header, and its payload."""
    kind = OpInput if side == "input" else OpOutput
    part: dict[str, Any] = {
        "data_type": DATA_TYPE_NUMBERS.get(array.dtype.name, 0),
        "format": FORMAT_NUMBERS[layout],
        "shape": Shape(array.shape),
        "original_shape": Shape(tuple(original)) if original else None,
        "size": array.nbytes,
        **changes,
    }
    return kind(**part), array.tobytes()


def bin_file(*tensors, buffers=(), spaces=()) -> bytes:
    """A plain file of these tensors, buffers and workspaces."""
    held = [(part, data) for part, data in tensors if isinstance(part, OpInput)]
    gone = [(part, data) for part, data in tensors if isinstance(part, OpOutput)]
    header = DumpData(
        input=tuple(part for part, _ in held),
        output=tuple(part for part, _ in gone),
        buffer=tuple(OpBuffer(0, size=len(data)) for data in buffers),
        space=tuple(Workspace(0, size=len(data)) for data in spaces),
        op_name="Default/../../conv1-op3",
    )
    payloads = b"".join(data for _, data in (*held, *gone))
    return serialize_bin_head(header) + payloads + b"".join((*buffers, *spaces))


def numbered(shape, dtype="float16"):
    """Elements that differ."""
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


def blocks(array, c0=16):
    """NCHW as NC1HWC0; the padding is 7."""
    n, c, h, w = array.shape
    c1 = -(-c // c0)
    padded = np.full((n, c1 * c0, h, w), 7, array.dtype)
    padded[:, :c] = array
    return padded.reshape(n, c1, c0, h, w).transpose(0, 1, 3, 4, 2).copy()


def files_of(folder: Path) -> list[str]:
    """All names below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def killed(job, request):
    """Stands for a conversion whose process the kernel ends for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)

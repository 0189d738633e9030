"""Overflow records in CANN's layouts, byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from rankdump._binfile.bin_file import serialize_bin_head
from rankdump._binfile.header_parts import DumpData, OpOutput, OriginalOp, Shape

ZEROS = (0, 0, 0, 0, 0, 0)
CORE = (1, 7, 12, 0, 0x12340000, 0x56780000)
"""model_id, stream_id, task_id, task_type, pc_start, para_base."""


def old(
    *,
    dha: Sequence[int] = ZEROS,
    l2: Sequence[int] = ZEROS,
    core: Sequence[int] = ZEROS,
    status: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """The older layout: three tasks, then their states, each in a block of its own."""
    block = bytearray(2048)
    for at, task in ((0, dha), (128, l2), (256, core)):
        struct.pack_into("<6Q", block, at, *task)
    struct.pack_into("<Q", block, 512, status[0])
    struct.pack_into("<Q", block, 768, status[1])
    struct.pack_into("<3Q", block, 1024, 0xABC if status[2] else 0, 3, status[2])
    return bytes(block)


def new(kind: int, *words: int, version: int = 0, size: int = 2048) -> bytes:
    """The newer layout: six words of 32 bits, then words of 64."""
    made = struct.pack("<6I", 0x5A5A5A5A, version, 1, kind, 0, 8 * len(words))
    return (made + struct.pack(f"<{len(words)}Q", *words)).ljust(size, b"\0")


def debug_file(*payloads: bytes) -> bytes:
    """A bin file with such records."""
    output = tuple(
        OpOutput(4, 2, Shape((len(p),)), OriginalOp("Node_OpDebug"), size=len(p)) for p in payloads
    )
    return serialize_bin_head(DumpData(output=output, op_name="Node_OpDebug")) + b"".join(payloads)

"""A slab: shared memory in which a rank leaves frames for its agent, as a ring. Pure: any buffer.

       0  magic, version, bytes of the ring
      64  `written`: bytes ever published, by the rank
     128  `released`: bytes ever given back, by the agent
    4096  the ring: entries, each a head, a frame and the frame's data, at multiples of 64

Positions only rise; an entry at position p stands at p modulo the ring's length and never wraps.
What the rank committed is readable whoever dies. One process writes, one reads. The other one
may look at any moment, so each number is stored at one blow: through an element of a memoryview,
because `struct.pack_into` fills the place with zeros first.

An entry is sealed before it is announced: its head then holds checksums of itself and of its
frame, and the digest of its data. One that a killed rank left unsealed is taken as it is.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

from rankdump.contract.errors import DamagedError

ALIGN = 64
RING_OFFSET = 4096
MIN_RING_BYTES = 1 << 16
VERSION = 2
WRITTEN_AT, RELEASED_AT = 64, 128
HEAD = struct.Struct("<IIQIIQQII16s")
ENTRY_MAGIC = 0x31454452
CHECKED = slice(8, 44)
"""What of a head its checksum is over: all but what changes after the reservation."""
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"RDSLAB\0\1"
HEADER_BYTES = _HEADER.size


class State(IntEnum):
    """How far an entry is."""

    RESERVED = 1
    COMMITTED = 2
    ABANDONED = 3
    """Its frame counts, its data never came."""
    FILLER = 4
    """Room at the end of the ring that was too small."""
    SEALED = 5
    """Committed, with checksums."""


class Store(Protocol):
    """Where a slab stands, as its reader sees it."""

    @property
    def length(self) -> int:
        """Bytes of the whole slab."""
        ...

    def read(self, offset: int, length: int) -> memoryview:
        """Return some of it; DamagedError when it is not there."""
        ...

    def number(self, offset: int) -> int:
        """Return a number that the other side may be changing."""
        ...

    def put_number(self, offset: int, value: int) -> None:
        """Change a number at one blow."""
        ...


class Memory:
    """A slab in a buffer; what is read is no copy."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.length = len(memory)
        """Bytes of the whole slab."""
        self._numbers = memory[: len(memory) // 8 * 8].cast("Q")

    def read(self, offset: int, length: int) -> memoryview:
        """Return some of it, for reading."""
        return self._memory[offset : offset + length].toreadonly()

    def number(self, offset: int) -> int:
        """Return a number, loaded at one blow."""
        return self._numbers[offset // 8]

    def put_number(self, offset: int, value: int) -> None:
        """Store a number at one blow."""
        self._numbers[offset // 8] = value


def slab_bytes(ring_bytes: int) -> int:
    """Return the length of a slab with a ring of that many bytes, rounded up to whole entries."""
    return RING_OFFSET + aligned(max(ring_bytes, MIN_RING_BYTES))


def slab_header(length: int) -> bytes:
    """Return what an empty slab of `slab_bytes` length begins with; the rest is zeros."""
    ring_bytes = length - RING_OFFSET
    if ring_bytes < MIN_RING_BYTES or ring_bytes % ALIGN:
        raise ValueError(f"a slab of {length} bytes: see slab_bytes")
    return _HEADER.pack(_MAGIC, VERSION, ring_bytes)


def format_slab(memory: memoryview) -> None:
    """Make an empty slab of a buffer of `slab_bytes` length."""
    header = slab_header(len(memory))
    memory[:RING_OFFSET] = header + bytes(RING_OFFSET - len(header))


def ring_of(header: memoryview, length: int) -> tuple[int, int]:
    """Return version and ring bytes of a slab, given how it begins; DamagedError for no slab."""
    if length < RING_OFFSET + MIN_RING_BYTES or len(header) < HEADER_BYTES:
        raise DamagedError(f"damaged slab of {length} bytes: that is too short for any")
    magic, version, ring_bytes = _HEADER.unpack_from(header)
    if magic != _MAGIC or ring_bytes != length - RING_OFFSET:
        raise DamagedError(f"damaged slab of {length} bytes with header {bytes(header[:24])!r}")
    if version not in (1, VERSION):
        raise DamagedError(f"slab of version {version}: this side knows 1 and {VERSION}")
    return version, ring_bytes


def aligned(length: int) -> int:
    """Return a length rounded up to whole lines."""
    return -(-length // ALIGN) * ALIGN

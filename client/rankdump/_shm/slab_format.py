"""Format of a slab: shared memory with a ring of frames from a rank to its agent. Pure: any buffer.

       0  magic, version, bytes of the ring
      64  `written`: bytes ever published, by the rank
     128  `released`: bytes ever released, by the agent
    4096  the ring: entries, each a head, a frame and the frame's data, at multiples of 64
          version 3: the journal of events (`event_journal`), JOURNAL_BYTES

Positions only rise; an entry at position p is at p modulo the ring's length and never wraps around.
Committed entries stay readable even if either process dies. At any moment only one process writes
and one reads, so each number is stored atomically: through an element of a memoryview, because
`struct.pack_into` first fills the place with zeros.

An entry is sealed before it is announced: its head then has checksums of itself and of its frame,
and the digest of its data. An entry that a killed rank left unsealed is accepted without checks.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

from rankdump.errors import CorruptedError

ENTRY_ALIGNMENT = 64
RING_OFFSET = 4096
MIN_RING_BYTES = 1 << 16
SLAB_VERSION = 2
"""Version of a slab without a journal."""
JOURNAL_SLAB_VERSION = 3
JOURNAL_SLOTS = 8192
"""Number of events that a journal holds: twice as many as a rank gathers before it sends them."""
JOURNAL_TEXT_BYTES = 1 << 20
JOURNAL_BYTES = 64 + 64 * JOURNAL_SLOTS + JOURNAL_TEXT_BYTES
WRITTEN_OFFSET, RELEASED_OFFSET = 64, 128
ENTRY_HEAD = struct.Struct("<IIQIIQQII16s")
ENTRY_MAGIC = 0x31454452
CHECKED_HEAD = struct.Struct("<QIIQQI")
"""Part of an entry's head that its checksum covers: all fields that do not change after the
reservation.
"""
CHECKED_HEAD_BYTES = slice(8, 8 + CHECKED_HEAD.size)
SEAL_TAIL = struct.Struct("<I16s")
"""Rest of the head of a sealed entry: the checksum of the first part, and the digest of
the data.
"""
_SLAB_HEADER = struct.Struct("<8sQQ")
_SLAB_MAGIC = b"RDSLAB\0\1"
SLAB_HEADER_BYTES = _SLAB_HEADER.size
_READABLE_VERSIONS = (1, SLAB_VERSION, JOURNAL_SLAB_VERSION)


class EntryState(IntEnum):
    """State of an entry."""

    RESERVED = 1
    COMMITTED = 2
    ABANDONED = 3
    """The entry has a frame, but its data was never written."""
    FILLER = 4
    """Unused space at the end of the ring that was too small for an entry."""
    SEALED = 5
    """The entry is committed and has checksums."""


class SlabStore(Protocol):
    """Memory or file of a slab, as a reader uses it."""

    @property
    def length(self) -> int:
        """Bytes of the whole slab."""
        ...

    def read(self, offset: int, length: int) -> memoryview:
        """Return a range of bytes; CorruptedError if the slab is shorter."""
        ...

    def read_number(self, offset: int) -> int:
        """Return a number that the other process may be changing."""
        ...

    def write_number(self, offset: int, value: int) -> None:
        """Store a number atomically."""
        ...


class SlabMemory:
    """A slab in a buffer, which is read without copies."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.length = len(memory)
        """Bytes of the whole slab."""
        self._numbers = memory[: len(memory) // 8 * 8].cast("Q")

    def read(self, offset: int, length: int) -> memoryview:
        """Return a read-only view of a range of bytes."""
        return self._memory[offset : offset + length].toreadonly()

    def read_number(self, offset: int) -> int:
        """Return a number, loaded atomically."""
        return self._numbers[offset // 8]

    def write_number(self, offset: int, value: int) -> None:
        """Store a number atomically."""
        self._numbers[offset // 8] = value


def compute_slab_bytes(ring_bytes: int, *, has_journal: bool = False) -> int:
    """Return the length in bytes of a slab with a ring of at least `ring_bytes`, rounded up to
    whole entries.
    """
    journal_bytes = JOURNAL_BYTES if has_journal else 0
    return RING_OFFSET + align_length(max(ring_bytes, MIN_RING_BYTES)) + journal_bytes


def make_slab_header(length: int, *, has_journal: bool = False) -> bytes:
    """Return the header of an empty slab of length `compute_slab_bytes`; the rest of it
    is zeros.
    """
    version = JOURNAL_SLAB_VERSION if has_journal else SLAB_VERSION
    ring_bytes = _compute_ring_bytes(version, length)
    if ring_bytes < MIN_RING_BYTES or ring_bytes % ENTRY_ALIGNMENT:
        raise ValueError(f"a slab cannot have {length} bytes: see compute_slab_bytes")
    return _SLAB_HEADER.pack(_SLAB_MAGIC, version, ring_bytes)


def format_slab(memory: memoryview, *, has_journal: bool = False) -> None:
    """Turn a buffer of zeros of length `compute_slab_bytes` into an empty slab."""
    header = make_slab_header(len(memory), has_journal=has_journal)
    memory[:RING_OFFSET] = header + bytes(RING_OFFSET - len(header))


def parse_slab_header(header: memoryview, length: int) -> tuple[int, int]:
    """Return the version and the length of the ring from a slab's header; CorruptedError if it is
    not a slab.
    """
    if length < RING_OFFSET + MIN_RING_BYTES or len(header) < SLAB_HEADER_BYTES:
        raise CorruptedError(f"damaged: a slab of {length} bytes is too short")
    magic, version, ring_bytes = _SLAB_HEADER.unpack_from(header)
    if magic == _SLAB_MAGIC and version not in _READABLE_VERSIONS:
        raise CorruptedError(
            f"slab has version {version}; this side reads {', '.join(map(str, _READABLE_VERSIONS))}"
        )
    if (
        magic != _SLAB_MAGIC
        or ring_bytes != _compute_ring_bytes(version, length)
        or ring_bytes < MIN_RING_BYTES
    ):
        raise CorruptedError(f"damaged: a slab of {length} bytes has header {bytes(header[:24])!r}")
    return version, ring_bytes


def _compute_ring_bytes(version: int, length: int) -> int:
    return length - RING_OFFSET - (JOURNAL_BYTES if version == JOURNAL_SLAB_VERSION else 0)


def align_length(length: int) -> int:
    """Return a length rounded up to ENTRY_ALIGNMENT."""
    return (length + ENTRY_ALIGNMENT - 1) & -ENTRY_ALIGNMENT

"""Send buffer on a slab without an agent: the test reads the rank's entries."""

from __future__ import annotations

import mmap
from pathlib import Path

from support.record_heads import head_of

from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.recorder_protocol import PlacementResult
from rankdump._core.session_protocol import RecordHead, SlabPlace
from rankdump._shm.slab_format import SlabMemory, compute_slab_bytes, format_slab
from rankdump._shm.slab_ring import SlabReader
from rankdump._transport.send_buffer import SendBuffer
from rankdump._transport.send_ring import SendRing

SIZE = 256
"""Bytes of every tensor."""


class SendBufferRig:
    """A send buffer on a slab, and the agent's view of it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "slab"
        path.write_bytes(bytes(compute_slab_bytes(0)))
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        format_slab(memory)
        self.reader = SlabReader(SlabMemory(memory))
        self.torn: list[RecordHead] = []
        self.buffer = SendBuffer(on_release=lambda _: None, on_copy_failed=self.torn.append)
        self.ring = SendRing(SlabPlace(str(path), memory.nbytes))
        self.buffer.use_ring(self.ring)

    def place(self, source) -> PlacementResult:
        key = TensorKey(
            rank=0,
            net_name="Net",
            graph=0,
            iteration=0,
            timestamp_us=1,
            op_type="Add",
            op_name="Default/Add-op0",
            side=TensorSide.OUTPUT,
            slot=0,
        )
        head = head_of(key, "uint8", (SIZE,), SIZE)
        return self.buffer.place_record(head, source)

    def read(self) -> list[bytes | None]:
        """What the agent finds: the data, or None where it never came."""
        return [
            bytes(self.reader.read_data(e)) if e.has_data else None
            for e in self.reader.read_entries()
        ]

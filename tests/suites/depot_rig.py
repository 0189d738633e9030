"""A depot on a slab without any agent: the test reads what a rank left."""

from __future__ import annotations

import mmap
from pathlib import Path

from suites.record_heads import head_of

from rankdump.contract.exchange import RecordHead, SlabPlace
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.slab import Memory, format_slab, slab_bytes
from rankdump.contract.slab_reader import SlabReader
from rankdump.ship.depot import Depot
from rankdump.ship.ring import Ring
from rankdump.values import Placing

SIZE = 256
"""Bytes of every tensor."""


class Rig:
    """A depot on a slab, and the agent's view of it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "slab"
        path.write_bytes(bytes(slab_bytes(0)))
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        format_slab(memory)
        self.reader = SlabReader(Memory(memory))
        self.torn: list[RecordHead] = []
        self.depot = Depot(on_taken=lambda _: None, on_torn=self.torn.append)
        self.ring = Ring(SlabPlace(str(path), memory.nbytes))
        self.depot.take_ring(self.ring)

    def place(self, source) -> Placing:
        key = TensorKey(
            rank=0,
            net_name="Net",
            graph=0,
            iteration=0,
            timestamp_us=1,
            op_type="Add",
            op_name="Default/Add-op0",
            side=Side.OUTPUT,
            slot=0,
        )
        head = head_of(key, "uint8", (SIZE,), SIZE)
        return self.depot.place(head, source, lambda: 0.0)

    def read(self) -> list[bytes | None]:
        """What the agent finds: the data, or None where it never came."""
        return [bytes(self.reader.data(e)) if e.whole else None for e in self.reader.entries()]

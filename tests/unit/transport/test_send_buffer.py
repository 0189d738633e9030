"""Space of a full slab: waiting items get it before new records, and no batch delays it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.send_buffer_rig import SIZE, SendBufferRig

from rankdump._core.recorder_protocol import PlacementResult
from rankdump._core.session_protocol import IterationEnd
from rankdump._frameworks.arrays import ArraySource
from rankdump._transport import send_buffer
from rankdump._transport.push_stream import RingLoader
from rankdump._transport.send_buffer import BatchingCondition


def test_new_records_do_not_starve_waiting_items(tmp_path: Path):
    """While a slab is full, free space goes to waiting items, not to new ones.

    Declarations once piled up in the memory of a rank whose agent was slower than it.
    """
    rig = SendBufferRig(tmp_path)
    loader = RingLoader(rig.buffer)
    tensor = ArraySource(np.zeros(SIZE, "u1"))
    while rig.place(tensor) is PlacementResult.DONE:
        pass
    rig.buffer.submit(IterationEnd(0, 1))
    while loader.load(rig.ring):
        rig.buffer.submit(IterationEnd(0, 1))
    first, *_ = list(rig.reader.read_entries())
    rig.reader.release(first.end_position)
    assert rig.place(tensor) is PlacementResult.FULL
    assert loader.load(rig.ring)
    assert not rig.buffer.items.has_unsent
    rig.reader.release(2 * first.end_position)
    assert rig.place(tensor) is PlacementResult.DONE


def test_batch_ends_when_a_tensor_waits_for_space(monkeypatch: pytest.MonkeyPatch):
    """The space of a small slab is freed only after its entries were announced."""
    monkeypatch.setattr(send_buffer, "BATCH_TIMEOUT_S", 60.0)
    lock = threading.RLock()
    batching, is_waiting = BatchingCondition(lock), threading.Event()

    def send():
        with lock:
            is_waiting.set()
            batching.wait_for_batch()

    sender = threading.Thread(target=send)
    sender.start()
    assert is_waiting.wait(30)
    with lock:
        batching.end_batch()
    sender.join(30)
    assert not sender.is_alive()

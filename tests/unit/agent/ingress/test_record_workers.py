"""Tests of RecordWorkers: threads continue after a failing record."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import pytest

from rankdumpd.agent.ingress.session_intake import RecordWorkers
from rankdumpd.agent.records import FrameId, ReceivedRecord, RecordOutcome, RecordStatus


@pytest.mark.parametrize("batches", [((0,), (1,)), ((0, 1),)])
def test_record_workers_continue_after_failing_record(make_head, caplog, batches):
    """An unforeseen error drops its record by a reason of its own; the worker goes on."""
    own: Any = object()
    done: queue.SimpleQueue[Sequence[RecordOutcome]] = queue.SimpleQueue()

    def store(batch: Sequence[ReceivedRecord], storage: Any) -> list[RecordOutcome]:
        assert storage is own
        if any(each.frame_id.sequence == 1 for each in batch):
            raise ZeroDivisionError
        return [RecordOutcome(each.frame_id, each.head, RecordStatus.STORED) for each in batch]

    workers = RecordWorkers(1, store, done.put)
    workers.start()
    parcels = [ReceivedRecord(FrameId("s", n), make_head(), memoryview(b"")) for n in (1, 2)]
    for batch in batches:
        workers.submit([parcels[n] for n in batch], own)
    workers.stop()
    workers.stop()
    outcomes = [outcome for _ in batches for outcome in done.get_nowait()]
    assert [(o.frame_id.sequence, o.status, o.reason) for o in outcomes] == [
        (1, RecordStatus.DROPPED, "internal_error"),
        (2, RecordStatus.STORED, ""),
    ]
    assert "ZeroDivisionError" in caplog.text

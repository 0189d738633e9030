"""Workers outlive what they work on."""

from __future__ import annotations

import queue

from rankdumpd.agent.pipeline import Workers
from rankdumpd.agent.values import Fate, Outcome, Parcel, Ticket


def test_failing_record_is_counted_and_the_next_is_served(make_head, caplog):
    """An unforeseen error drops its record by a reason of its own; the worker goes on."""
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def process(parcel: Parcel) -> Outcome:
        if parcel.ticket.sequence == 1:
            raise ZeroDivisionError
        return Outcome(parcel.ticket, parcel.head, Fate.STORED)

    workers = Workers(1, process, done.put)
    workers.start()
    for sequence in (1, 2):
        workers.submit(Parcel(Ticket("s", sequence), make_head(), memoryview(b"")))
    workers.stop()
    workers.stop()
    outcomes = [done.get_nowait() for _ in range(2)]
    assert [(o.ticket.sequence, o.fate, o.reason) for o in outcomes] == [
        (1, Fate.DROPPED, "internal_error"),
        (2, Fate.STORED, ""),
    ]
    assert "ZeroDivisionError" in caplog.text

"""Cost of an event for the training thread: its start and end, with and without a journal in shared
memory, in turns. The batches that leave twice a second are measured apart.
"""

from __future__ import annotations

import time

from rankdump._recorder.event_trace import EventTrace
from rankdump._shm.event_journal import EventJournal
from rankdump._shm.slab_format import JOURNAL_BYTES, compute_slab_bytes, format_slab

from .result import Result

EVENTS = 2000
ROUNDS = 100
_NAMES = [f"Default/network-Net/layers-ModuleList/{n}-Block/fc-Linear/Linear-op0" for n in range(9)]


def measure() -> Result:
    """Measure events of operators, whose names repeat in every iteration."""
    slab = memoryview(bytearray(compute_slab_bytes(0, has_journal=True)))
    format_slab(slab, has_journal=True)
    plain, journaled = EventTrace(), EventTrace()
    journaled.use_journal(EventJournal(slab[-JOURNAL_BYTES:]))
    rounds = [(_run(plain), _run(journaled)) for _ in range(ROUNDS)]
    # The least of many: other work on the machine only adds.
    plain_s, taken_s = (min(each[0][at] for each in rounds) for at in (0, 1))
    journaled_s = min(each[1][0] for each in rounds)
    return Result(
        figures={
            "event_us": plain_s * 1e6,
            "event_with_journal_us": journaled_s * 1e6,
            "event_in_batch_us": taken_s * 1e6,
            "events": EVENTS * ROUNDS,
        },
        ratios={"journal_vs_none": (journaled_s + taken_s) / (plain_s + taken_s)},
    )


def _run(trace: EventTrace) -> tuple[float, float]:
    """Return the processor time of an event, and of its place in a batch."""
    begun_s = time.thread_time()
    for number in range(EVENTS):
        event = trace.start_event(graph=0, name=_NAMES[number % len(_NAMES)])
        trace.finish_event(event)
    ended_s = time.thread_time()
    trace.take_events()
    return (ended_s - begun_s) / EVENTS, (time.thread_time() - ended_s) / EVENTS

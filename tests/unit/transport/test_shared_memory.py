"""Sessions over shared memory: tensors when it is full, and forked children."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from support.agent_double import FakeSlab, RunningFakeAgent, bodies, kinds, rows

import rankdump
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    FullBufferPolicy,
    OutputSettings,
    SavedDataMode,
    TensorSelection,
    TriggerMode,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._frameworks.arrays import ArraySource

from .test_send_ring import LARGE, eventually, order, tensors

SIZE = LARGE // 8


@pytest.fixture
def host(running: RunningFakeAgent, socket_folder: Path) -> RunningFakeAgent:
    """An agent that grants a slab."""
    running.agent.slab = FakeSlab(socket_folder / "a.slab", LARGE)
    return running


def session_of(
    host: RunningFakeAgent,
    *,
    saved: SavedDataMode = "tensor",
    trigger: TriggerMode = "always",
    on_full: FullBufferPolicy = "block",
    shared_memory: bool = True,
) -> rankdump.Session:
    plan = DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(trigger=trigger),
        content=ContentSettings(saved=saved),
        delivery=DeliverySettings(on_full, block_timeout_s=0.2, shared_memory=shared_memory),
    )
    return rankdump.Session(plan, agent=host.address)


def fill(session: rankdump.Session, count: int = 20) -> None:
    for number in range(count):
        session.dump("Add", f"a{number}", "input", 0, np.full(SIZE, 3, "u1"))


@pytest.mark.parametrize("on_full", ["block", "drop", "statistic"])
def test_exhausted_slab_counts_dropped_tensors(host: RunningFakeAgent, on_full):
    """expected = elements + statistics + dropped, and no tensor is in two of them."""
    agent = host.agent
    agent.acknowledge_up_to = 0
    with session_of(host, on_full=on_full) as session:
        fill(session)
        session.dump("Add", "z", "output", 0, np.ones(LARGE // 32, np.complex64))
        session.step()
        agent.acknowledge_up_to = float("inf")
        session.dump("Add", "last", "input", 0, np.full(SIZE, 3, "u1"))
    (end, *_) = bodies(host, "iteration_end")
    whole = [record for record in bodies(host, "record") if record.iteration == 0]
    degraded = [row for row in rows(host) if row.iteration == 0]
    assert end.expected == 21
    assert len(whole) + len(degraded) + sum(end.dropped.values()) == 21
    assert set(end.dropped) == {"buffer_full"}
    assert 0 < len(whole) < 10
    assert len(degraded) == (0 if on_full != "statistic" else 20 - len(whole))
    for row in degraded:
        assert row.figures == ("3", "3", f"{3 * SIZE**0.5:.6g}")
        assert (row.byte_count, row.degraded) == (SIZE, "buffer_full")
    order_of_kinds = kinds(host)
    if degraded:
        assert order_of_kinds.index("figure_rows") < order_of_kinds.index("iteration_end")
    assert order(host.agent) == list(range(1, len(order(host.agent)) + 1))


def test_session_without_shared_memory_requests_no_slab(host: RunningFakeAgent):
    with session_of(host, shared_memory=False) as session:
        fill(session, 2)
    assert not host.agent.opened[0].wants_slab
    assert len(tensors(host.agent)) == 2


def test_operators_held_for_overflow_use_the_slab(host: RunningFakeAgent):
    """An operator that overflowed is sent; any other leaves nothing and holds no space."""
    with session_of(host, trigger="overflow") as session:
        for number in range(3):
            session.dump("Add", f"a{number}", "input", 0, np.full(9, number, "f4"))
            result = np.full(9, np.inf if number == 1 else 0, "f4")
            session.dump("Add", f"a{number}", "output", 0, result)
    assert [(r.op_name, r.side) for r in bodies(host, "record")] == [
        ("a1", TensorSide.INPUT),
        ("a1", TensorSide.OUTPUT),
    ]
    assert host.agent.doorbells > 0
    assert tensors(host.agent)[1] == np.full(9, 1, "f4").tobytes()


def test_statistics_use_the_slab(host: RunningFakeAgent):
    with session_of(host, saved="statistic") as session:
        fill(session, 5)
    assert [len(row.figures) for row in rows(host)] == [3] * 5
    assert bodies(host, "record") == []
    assert kinds(host)[-1] == "session_end"
    assert host.agent.doorbells > 0


def test_failed_copy_is_counted_by_the_agent_and_logged(host: RunningFakeAgent, caplog):
    """The expected count has it once; its reason is in the agent's balance, not in the rank's."""

    class Unreadable(ArraySource):
        def accelerator(self):
            return None

        def copy_into(self, target):
            raise ValueError("gone")

    session = session_of(host)
    assert session._pipeline is not None
    recorder = session._pipeline.recorder
    for name, source in (("a", ArraySource(np.ones(3))), ("b", Unreadable(np.ones(3)))):
        assert recorder.is_wanted(0, name, TensorSide.INPUT)
        recorder.observe(TensorObservation(0, "Add", name, TensorSide.INPUT, 0, "", source))
    session.close()
    (end,) = bodies(host, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (2, {})
    assert host.agent.slab is not None
    assert host.agent.slab.torn == [2]
    assert "1 tensors were not dumped: 1 copy_failed" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_leaves_the_slab_alone(host: RunningFakeAgent):
    """A forked data-loader worker neither sends, nor hangs, nor touches slab, numbers and lock."""
    assert host.agent.slab is not None
    session = session_of(host)
    fill(session, 2)
    eventually(lambda: len(tensors(host.agent)) == 2)
    eventually(
        lambda: (
            session._pipeline is not None and not session._pipeline._send_buffer.has_waiting_tensors
        )
    )
    ring_before = bytes(host.agent.slab._memory)
    busy, stop = threading.Event(), threading.Event()
    pipeline = session._pipeline
    assert pipeline is not None

    def hold() -> None:
        with pipeline._send_buffer.changed:  # as a thread that sends just now
            busy.set()
            stop.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert busy.wait(20)
    child = os.fork()
    if child == 0:
        try:
            fill(session, 3)
            pipeline._metadata_sender.send_events()
            session.step()
            session.close()
            os._exit(0 if not pipeline.armed else 9)
        except BaseException:
            os._exit(8)
    stop.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(host.agent.slab._memory) == ring_before
    assert host.agent.slab.locked()
    fill(session, 1)
    session.close()
    assert len(tensors(host.agent)) == 3
    assert not host.agent.slab.locked()


def test_rejected_rank_reports_only_the_rejection(host: RunningFakeAgent, caplog):
    """The plan selects operators that ran, so no other cause may be reported."""
    host.agent.refusal = "rank 0 is taken"
    with session_of(host) as session:
        for step in range(3):
            session.step(step)
            fill(session, 2)
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "rejected this rank: rank 0 is taken" in text]
    assert [text for text in said if "nothing was dumped" in text] == [
        "rankdump: nothing was dumped: the agent rejected this rank"
    ]

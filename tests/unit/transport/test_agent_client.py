"""Client of an agent: frames in order, at least once, without holding up the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, introduction_of, plan
from support.record_heads import head_of

from rankdump._core.black_box import StepState, StepTensor
from rankdump._core.record import TensorKey, TensorKind, TensorSide
from rankdump._core.recorder_protocol import StagedRecord
from rankdump._core.session_protocol import IterationEnd, SessionEnd
from rankdump._transport.agent_client import AgentClient
from rankdump._transport.frame_queue import BufferedItem
from rankdump._transport.send_buffer import LinkState, SendBuffer
from rankdump._transport.step_outbox import StepOutbox
from rankdump._wire.black_box_messages import PIECE_BYTES
from rankdump._wire.frames import MAX_CHUNK_BYTES
from rankdump.errors import UnavailableError


def staged(data: bytes, stamp: int = 1) -> StagedRecord:
    key = TensorKey(0, "Net", 0, 0, stamp, "Add", "Default/Add-op0", TensorSide.INPUT, 0)
    head = head_of(key, "uint8", (len(data),), len(data))
    return StagedRecord(head, memoryview(bytearray(data)))


class WatchedClient:
    """A client that records its callbacks."""

    def __init__(
        self,
        address: str,
        tmp_path,
        on_tick=lambda: None,
        on_reason=lambda _: None,
        is_starting: Callable[[], bool] | None = None,
        outbox: StepOutbox | None = None,
    ) -> None:
        self.taken: list[BufferedItem] = []
        self.warnings: list[str] = []
        self.links: list[LinkState] = []
        self._on_reason = on_reason
        self.buffer = SendBuffer(on_release=self.taken.append, on_copy_failed=lambda _head: None)
        self.client = AgentClient(
            introduction_of(plan(tmp_path)),
            self.buffer,
            address,
            outbox=outbox,
            on_tick=on_tick,
            on_warning=self.warnings.append,
            on_link_change=self._hear,
            on_slab_unused=lambda _reason: None,
            is_starting=is_starting,
        )

    def _hear(self, link: LinkState, reason: str) -> None:
        self.links.append(link)
        self._on_reason(reason)


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "never became true"
        time.sleep(0.01)


def bytes_of(frames, sequence: int) -> bytes:
    parts = [f for f in frames if f.sequence == sequence]
    return b"".join(f.record.data or f.chunk.data for f in parts)


def test_client_delivers_records_whole_and_in_order(running: RunningFakeAgent, tmp_path):
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    data = np.random.default_rng(0).bytes(3 * MAX_CHUNK_BYTES + 17)
    watched.buffer.submit(staged(data))
    watched.buffer.submit(IterationEnd(0, 1))
    watched.buffer.submit(SessionEnd(1))
    assert watched.client.close(10) == 0
    frames = running.agent.frames
    assert [f.sequence for f in frames] == [1, 1, 1, 1, 2, 3]
    assert bytes_of(frames, 1) == data
    assert [f.chunk.offset for f in frames[1:4]] == [MAX_CHUNK_BYTES * i for i in (1, 2, 3)]
    assert len(watched.taken) == 1


@pytest.mark.parametrize("keeps_step_tensors", [True, False])
def test_client_delivers_tensors_of_steps_to_agents_that_keep_them(
    running: RunningFakeAgent, tmp_path, keeps_step_tensors
):
    """Before the end of the session, although nothing of them is acknowledged."""
    running.agent.keeps_steps = True
    running.agent.keeps_step_tensors = keeps_step_tensors
    outbox = StepOutbox(4, 1 << 24)
    watched = WatchedClient(running.address, tmp_path, outbox=outbox)
    size = 5 * PIECE_BYTES
    kind = TensorKind(0, "a", "a", TensorSide.OUTPUT, 0, "uint8", (size,), size)
    outbox.add_state(StepState(0, 0, 0, b""))
    outbox.add_tensor(StepTensor(0, kind, bytes(size)))
    watched.client.start(5)
    outbox.finish()
    watched.buffer.submit(SessionEnd(1))
    assert watched.client.close(10) == 0
    pieces = 5 * keeps_step_tensors
    assert running.agent.beside == ["step_states", *["step_tensors"] * pieces]


def test_client_resumes_after_the_last_acknowledged_record(running: RunningFakeAgent, tmp_path):
    """Nothing is lost by a reconnect, and nothing acknowledged is resent."""
    running.agent.cut_after = 4
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    for stamp in range(10):
        watched.buffer.submit(staged(b"x" * 100, stamp))
    assert watched.client.close(10) == 0
    assert len(running.agent.opened) >= 2
    assert len({r.session_id for r in running.agent.opened}) == 1
    seen = [f.record.timestamp_us for f in running.agent.frames]
    assert set(seen) == set(range(10))
    assert len(watched.taken) == 10


def test_client_delivers_everything_to_a_late_agent(address: str, tmp_path):
    watched = WatchedClient(address, tmp_path)
    watched.client.start(5)
    assert watched.client.link is LinkState.ABSENT
    watched.buffer.submit(staged(b"early"))
    late = RunningFakeAgent(address)
    try:
        eventually(lambda: watched.client.link is LinkState.UP)
        assert watched.client.close(10) == 0
        assert bytes_of(late.agent.frames, 1) == b"early"
    finally:
        late.stop()


def test_client_waits_quietly_for_an_agent_that_starts(address: str, tmp_path):
    """Nothing waits for it but the sender, and no failed attempt is reported."""
    serving = threading.Event()
    watched = WatchedClient(address, tmp_path, is_starting=lambda: not serving.is_set())
    watched.client.start(60)
    assert watched.client.link is LinkState.STARTING
    watched.buffer.submit(staged(b"early"))
    late = RunningFakeAgent(address)
    try:
        serving.set()
        assert watched.client.close(10) == 0
        assert bytes_of(late.agent.frames, 1) == b"early"
        assert watched.links[0] is LinkState.UP
    finally:
        late.stop()


def test_client_reports_why_an_agent_did_not_start(address: str, tmp_path):
    def fail() -> bool:
        raise UnavailableError("it ended before it was ready")

    reasons: list[str] = []
    watched = WatchedClient(address, tmp_path, on_reason=reasons.append, is_starting=fail)
    watched.client.start(5)
    eventually(lambda: watched.client.link is LinkState.ABSENT)
    watched.buffer.submit(staged(b"lost"))
    assert watched.client.close(10) == 1
    assert reasons[0] == "it ended before it was ready"


def test_client_reports_a_lost_agent_once(running: RunningFakeAgent, tmp_path, monkeypatch):
    """New items neither speed up the attempts to reconnect nor repeat the report."""
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    watched.buffer.submit(staged(b"first"))
    eventually(lambda: watched.taken)
    running.stop()
    eventually(lambda: watched.client.link is LinkState.AWAY)
    for stamp in range(200):
        watched.buffer.submit(staged(b"x", stamp))
        time.sleep(0.002)
    assert len(watched.links) < 12
    monkeypatch.setattr("rankdump._transport.agent_client.RETURN_AT_EXIT_TIMEOUT_S", 0.1)
    assert watched.client.close(60) == 200


def test_client_close_cuts_the_pause_short(running: RunningFakeAgent, tmp_path, monkeypatch):
    """Items are delivered to an agent that is back, however long it was away."""
    monkeypatch.setattr("rankdump._transport.agent_client.MIN_PAUSE_S", 600.0)
    monkeypatch.setattr("rankdump._transport.agent_client.MAX_PAUSE_S", 600.0)
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    running.stop()
    eventually(lambda: watched.client.link is LinkState.AWAY)
    watched.buffer.submit(staged(b"waits"))
    back = RunningFakeAgent(running.address)
    try:
        assert watched.client.close(20) == 0
        assert bytes_of(back.agent.frames, 1) == b"waits"
    finally:
        back.stop()


def test_client_counts_records_when_no_agent_answers(address: str, tmp_path):
    watched = WatchedClient(address, tmp_path)
    watched.client.start(5)
    watched.buffer.submit(staged(b"a"))
    watched.buffer.submit(IterationEnd(0, 1))
    begun = time.monotonic()
    assert watched.client.close(60) == 1
    assert time.monotonic() - begun < 30  # far from its patience: nobody was ever there


def test_client_close_waits_for_the_first_answer(running: RunningFakeAgent, tmp_path):
    """An agent on a busy host may take longer to answer than a short job takes."""
    held = threading.Event()
    running.agent.before_opening = lambda: held.wait(60)
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(0.01)
    assert watched.client.link is LinkState.CONNECTING
    watched.buffer.submit(staged(b"a"))
    lost: list[int] = []
    closing = threading.Thread(target=lambda: lost.append(watched.client.close(60)))
    closing.start()
    eventually(lambda: watched.client.closing)
    held.set()
    closing.join()
    assert lost == [0]


def test_client_reports_an_agent_that_does_not_answer(
    running: RunningFakeAgent, tmp_path, monkeypatch
):
    """It is not reported as absent, and gets at the end what waits."""
    held = threading.Event()
    running.agent.before_opening = lambda: held.wait(60)
    monkeypatch.setattr("rankdump._transport.agent_client.OPEN_TIMEOUT_S", 0.1)
    reasons: list[str] = []
    watched = WatchedClient(running.address, tmp_path, on_reason=reasons.append)
    watched.client.start(60)
    assert watched.client.link is LinkState.UNRESPONSIVE
    eventually(lambda: reasons)
    assert reasons[0] == "no answer within 0.1 s"
    watched.buffer.submit(staged(b"late"))
    monkeypatch.undo()
    held.set()
    assert watched.client.close(10) == 0
    assert bytes_of(running.agent.frames, 1) == b"late"


def test_client_ends_with_the_reason_of_a_rejection(running: RunningFakeAgent, tmp_path):
    running.agent.refusal = "rank 0 is taken by pid 7"
    said: list[str] = []
    client = AgentClient(
        introduction_of(plan(tmp_path)),
        SendBuffer(on_release=lambda _: None, on_copy_failed=lambda _: None),
        running.address,
        on_tick=lambda: None,
        on_warning=lambda _: None,
        on_link_change=lambda _link, reason: said.append(reason),
        on_slab_unused=lambda _reason: None,
    )
    client.start(5)
    assert client.link is LinkState.REJECTED
    assert said == ["rank 0 is taken by pid 7"]
    assert len(running.agent.opened) == 1
    client.close(1)


def test_idle_time_counts_only_while_items_wait(running: RunningFakeAgent, tmp_path):
    running.agent.acknowledge_up_to = 0
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    assert watched.buffer.idle_s() == 0
    watched.buffer.submit(staged(b"a"))
    eventually(lambda: watched.buffer.idle_s() > 0.05)
    assert watched.client.close(0.1) == 1


def test_wait_policy_waits_only_behind_tensors(running: RunningFakeAgent, tmp_path):
    """Items that free no memory when they are accepted are not waited for."""
    running.agent.acknowledge_up_to = 0
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    assert not watched.buffer.has_waiting_tensors
    watched.buffer.submit(IterationEnd(0, 0, {}, 0))
    assert not watched.buffer.has_waiting_tensors
    watched.buffer.submit(staged(b"a"))
    assert watched.buffer.has_waiting_tensors
    assert watched.client.close(0.1) == 1


@pytest.mark.parametrize("busy", [False, True])
def test_client_ticks_with_and_without_items(running: RunningFakeAgent, tmp_path, busy):
    asked, over = threading.Semaphore(0), threading.Event()
    watched = WatchedClient(running.address, tmp_path, on_tick=asked.release)
    watched.client.start(5)

    def send() -> None:
        while busy and not over.is_set():
            watched.buffer.submit(staged(b"a"))
            time.sleep(0.001)  # a rank that computes between its tensors

    sender = threading.Thread(target=send)
    sender.start()
    assert all(asked.acquire(timeout=20) for _ in range(3))
    over.set()
    sender.join()
    watched.client.close(5)


def test_client_passes_on_warnings_of_the_agent(running: RunningFakeAgent, tmp_path):
    running.agent.warnings = ["half of the time is used"]
    watched = WatchedClient(running.address, tmp_path)
    watched.client.start(5)
    watched.buffer.submit(staged(b"a"))
    eventually(lambda: watched.warnings)
    watched.client.close(5)
    assert set(watched.warnings) == {"half of the time is used"}


@pytest.mark.parametrize("count", [1, 500])
def test_client_batches_small_records(running: RunningFakeAgent, tmp_path, count):
    watched = WatchedClient(running.address, tmp_path)
    for stamp in range(count):
        watched.buffer.submit(staged(b"y" * 64, stamp))
    watched.client.start(5)
    assert watched.client.close(20) == 0
    assert [f.sequence for f in running.agent.frames] == list(range(1, count + 1))

"""Tensors through shared memory: the same bytes as on the stream, in order, each counted once."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support import record_heads
from support.agent_double import FakeAgent, FakeSlab, RunningFakeAgent, introduction_of, plan
from support.send_buffer_rig import SIZE, SendBufferRig

from rankdump._core.graph import GraphNode, GraphPart, OperatorGraph
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.recorder_protocol import PlacementResult, StagedRecord
from rankdump._core.session_protocol import IterationEnd, RecordHead, SessionEnd, SlabPlace
from rankdump._frameworks.arrays import ArraySource
from rankdump._shm.slab_format import (
    ENTRY_HEAD,
    MIN_RING_BYTES,
    RING_OFFSET,
    compute_slab_bytes,
    make_slab_header,
)
from rankdump._transport.agent_client import AgentClient
from rankdump._transport.frame_queue import BufferedItem
from rankdump._transport.push_stream import make_frames
from rankdump._transport.send_buffer import LinkState, SendBuffer, WaitPolicy
from rankdump._transport.send_ring import SendRing
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2

LARGE = 40 * MIN_RING_BYTES
DTYPES = ["u1", "?", "<i2", "<f4", "<f8", "<c8", ">i4"]


def head_of(source: ArraySource, stamp: int) -> RecordHead:
    key = TensorKey(0, "Net", 0, 0, stamp, "Add", "Default/Add-op0", TensorSide.INPUT, 0)
    return record_heads.head_of(key, source.dtype, source.shape, source.byte_count)


class RingRank:
    """A buffer and client as the recorder uses them, with a record of the callbacks."""

    def __init__(
        self, address: str, tmp_path, wants_slab: bool = True, timeout_s: float = 10.0
    ) -> None:
        from dataclasses import replace

        self.taken: list[BufferedItem] = []
        self.torn: list[RecordHead] = []
        self.streams: list[str] = []
        self._stamp = 0
        self.buffer = SendBuffer(
            on_release=self.taken.append,
            on_copy_failed=self.torn.append,
            wait_policy=WaitPolicy(timeout_s),
        )
        self.client = AgentClient(
            replace(introduction_of(plan(tmp_path)), wants_slab=wants_slab),
            self.buffer,
            address,
            on_tick=lambda: None,
            on_warning=lambda _: None,
            on_link_change=lambda _link, _reason: None,
            on_slab_unused=self.streams.append,
        )

    def keep(self, array, source_type=ArraySource) -> PlacementResult:
        """Place a tensor in shared memory, else send a copy as the staging buffer does."""
        source = source_type(array)
        self._stamp += 1
        head = head_of(source, self._stamp)
        placing = self.buffer.place_record(head, source)
        if placing is PlacementResult.ELSEWHERE:
            data = memoryview(bytearray(head.byte_count))
            source.copy_into(data)
            self.buffer.submit(StagedRecord(head, data))
        return placing


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "never became true"
        time.sleep(0.01)


def tensors(agent: FakeAgent) -> dict[int, bytes]:
    """The bytes of every record by its number."""
    found: dict[int, bytearray] = {}
    for frame in agent.frames:
        if frame.WhichOneof("body") == "record":
            found[frame.sequence] = bytearray(frame.record.data)
        elif frame.WhichOneof("body") == "chunk":
            assert frame.chunk.offset == len(found[frame.sequence])
            found[frame.sequence] += frame.chunk.data
    return {sequence: bytes(data) for sequence, data in found.items()}


def order(agent: FakeAgent) -> list[int]:
    """The numbers as they came, each once."""
    return list(dict.fromkeys(frame.sequence for frame in agent.frames))


@pytest.fixture
def slab(socket_folder: Path) -> FakeSlab:
    return FakeSlab(socket_folder / "a.slab", LARGE)


@pytest.fixture
def host(running: RunningFakeAgent, slab: FakeSlab) -> RunningFakeAgent:
    """An agent that grants a slab."""
    running.agent.slab = slab
    return running


arrays = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3), st.integers(0, 2**32 - 1)
).map(lambda made: some_array(*made))
lengths = st.integers(1, 5 * MIN_RING_BYTES).map(lambda n: some_array("u1", [n], n))


def some_array(dtype: str, shape: list[int], seed: int) -> np.ndarray:
    count = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    raw = np.frombuffer(np.random.default_rng(seed).bytes(count), "u1")
    array = (raw % 2).astype("?")[:count] if dtype == "?" else raw.view(dtype)
    return array.reshape(shape).T  # not contiguous


@settings(max_examples=25, deadline=None)
@given(given=st.lists(arrays | lengths, min_size=1, max_size=8))
def test_ring_and_stream_deliver_the_same_bytes(given):
    """For any type, form and size, with pieces of large tensors."""
    found = []
    for with_slab in (True, False):
        folder = Path(tempfile.mkdtemp(prefix="rd-"))
        server = RunningFakeAgent(f"unix://{folder}/a.sock")
        try:
            server.agent.slab = FakeSlab(folder / "a.slab", MIN_RING_BYTES)
            rank = RingRank(server.address, folder, with_slab)
            rank.client.start(5)
            for array in given:
                assert rank.keep(array) is not PlacementResult.FULL
            rank.buffer.submit(SessionEnd(1))
            assert rank.client.close(10) == 0
            assert order(server.agent) == list(range(1, len(given) + 2))
            assert (server.agent.doorbells > 0) is with_slab
            found.append(tensors(server.agent))
        finally:
            server.stop()
            shutil.rmtree(folder)
    little = [np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")) for a in given]
    expected = {n + 1: a.tobytes() for n, a in enumerate(little)}
    assert [n for n in expected if found[0][n] != expected[n]] == []
    assert [n for n in expected if found[1][n] != expected[n]] == []


def test_metadata_stays_behind_earlier_records(host: RunningFakeAgent, tmp_path):
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    for iteration in range(3):
        for _ in range(4):
            assert rank.keep(np.ones(100)) is PlacementResult.DONE
        rank.buffer.submit(IterationEnd(iteration, 4))
    rank.buffer.submit(SessionEnd(3))
    assert rank.client.close(10) == 0
    before = 0
    for frame in host.agent.frames:
        if frame.WhichOneof("body") == "record":
            before += 1
        elif frame.WhichOneof("body") == "iteration_end":
            assert before >= 4 * (frame.iteration_end.iteration + 1)
    ends = [f.iteration_end.iteration for f in host.agent.frames if f.HasField("iteration_end")]
    assert ends == [0, 1, 2]
    assert host.agent.frames[-1].HasField("session_end")
    assert not rank.buffer.has_waiting_tensors
    assert rank.client.left_in_slab == 0


def test_doorbell_covers_several_entries(host: RunningFakeAgent, tmp_path):
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    for _ in range(2000):
        assert rank.keep(np.ones(2)) is PlacementResult.DONE
    assert rank.client.close(10) == 0
    assert len(tensors(host.agent)) == 2000
    assert host.agent.doorbells < 1000


class UnreadableSource(ArraySource):
    def accelerator(self):
        return None

    def copy_into(self, target):
        raise ValueError("gone")


def test_failed_copy_keeps_its_number(host: RunningFakeAgent, tmp_path):
    """Numbers have no gaps; the agent counts the record without data."""
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    rank.keep(np.ones(3))
    assert rank.keep(np.ones(3), UnreadableSource) is PlacementResult.DONE
    rank.keep(np.ones(3))
    assert rank.client.close(10) == 0
    assert order(host.agent) == [1, 2, 3]
    assert host.agent.slab is not None
    assert host.agent.slab.torn == [2]
    assert [head.timestamp_us for head in rank.torn] == [2]


def test_place_record_waits_for_space_up_to_the_timeout(host: RunningFakeAgent, tmp_path):
    host.agent.acknowledge_up_to = 0
    rank = RingRank(host.address, tmp_path, timeout_s=0.2)
    rank.client.start(5)
    outcomes = [rank.keep(np.ones(LARGE // 64)) for _ in range(9)]
    assert set(outcomes[:5]) == {PlacementResult.DONE}
    assert outcomes[-1] is PlacementResult.FULL
    # What is left is the agent's, and not lost.
    assert rank.client.close(0.1) == 0
    assert rank.client.left_in_slab == outcomes.count(PlacementResult.DONE)


def test_slow_agent_loses_nothing(host: RunningFakeAgent, tmp_path):
    """Many times what the slab holds, from several threads at once."""
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    lock, outcomes = threading.Lock(), []

    def work() -> None:
        for _ in range(60):
            source = ArraySource(np.full(LARGE // 100, 7, "u1"))
            with lock:
                rank._stamp += 1
                head = head_of(source, rank._stamp)
            outcomes.append(rank.buffer.place_record(head, source))
            rank.buffer.submit(IterationEnd(0, 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [PlacementResult.DONE] * 240
    assert rank.client.close(10) == 0
    assert order(host.agent) == list(range(1, 481))
    assert set(tensors(host.agent).values()) == {b"\7" * (LARGE // 100)}


def test_late_agent_gets_waiting_items_first(address, slab, tmp_path):
    rank = RingRank(address, tmp_path)
    rank.client.start(5)
    for number in range(3):
        assert rank.keep(np.full(5, number)) is PlacementResult.ELSEWHERE
    rank.buffer.submit(IterationEnd(0, 3))
    late = RunningFakeAgent(address)
    late.agent.slab = slab
    try:
        eventually(lambda: len(rank.taken) == 3)
        assert rank.keep(np.full(5, 3)) is PlacementResult.DONE
        assert rank.client.close(10) == 0
    finally:
        late.stop()
    assert order(late.agent) == [1, 2, 3, 4, 5]
    assert [np.frombuffer(d, "<i8")[0] for d in tensors(late.agent).values()] == [0, 1, 2, 3]


def test_reconnect_resends_nothing_in_the_slab(host: RunningFakeAgent, slab, tmp_path):
    host.agent.acknowledge_up_to = 2
    host.agent.cut_after = 6
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    for number in range(10):
        assert rank.keep(np.full(5, number)) is PlacementResult.DONE
    eventually(lambda: len(host.agent.opened) > 1)
    host.agent.acknowledge_up_to = float("inf")
    rank.buffer.submit(SessionEnd(1))
    assert rank.client.close(10) == 0
    assert [frame.sequence for frame in host.agent.frames] == list(range(1, 12))


@pytest.mark.parametrize("with_slab", [True, False])
def test_abandoned_slab_moves_to_its_successor(host, slab, tmp_path, with_slab):
    """Only unacknowledged items are moved, with their numbers."""
    agent = host.agent
    agent.acknowledge_up_to = 2
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    big = np.arange(3 * LARGE // 4, dtype="u1")
    for number in range(4):
        assert rank.keep(np.full(5, number)) is PlacementResult.DONE
    rank.keep(np.ones(3), UnreadableSource)
    assert rank.keep(big) is PlacementResult.ELSEWHERE
    rank.buffer.submit(IterationEnd(0, 6))
    eventually(lambda: agent.examined == 7)
    agent.cut_now = True
    agent.acknowledge_up_to = float("inf")
    agent.slab = FakeSlab(slab.path.with_suffix(".new"), LARGE // 3) if with_slab else None
    assert rank.keep(np.full(5, 4)) is PlacementResult.DONE
    eventually(lambda: len(agent.opened) > 1)
    rank.keep(np.full(5, 5))
    assert rank.client.close(10) == 0
    assert order(agent) == [3, 4, 5, 6, 7, 8, 9]
    found = tensors(agent)
    assert found[6] == big.tobytes()
    assert [np.frombuffer(found[n], "<i8")[0] for n in (3, 4, 8, 9)] == [2, 3, 4, 5]
    assert set(rank.streams) == (
        set() if with_slab else {"the agent no longer grants shared memory"}
    )
    if agent.slab is not None:
        assert agent.slab.torn == [5]


def test_agent_restarted_inside_a_large_tensor_gets_all_of_it(host, slab, tmp_path):
    """Pieces that were released by the agent that died are resent."""
    agent = host.agent
    agent.cut_at_offset = 2 * LARGE
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    rank.keep(np.ones(3))
    big = np.arange(3 * LARGE, dtype="u1")
    rank.keep(big)
    eventually(lambda: len(agent.opened) > 1)
    rank.keep(np.zeros(3))
    assert rank.client.close(10) == 0
    assert tensors(agent)[2] == big.tobytes()
    assert order(agent) == [2, 3]
    assert len(rank.streams) == 1


@pytest.mark.parametrize("fault", ["missing", "short", "blank", "link", "locked"])
def test_unusable_slab_is_reported_once(running: RunningFakeAgent, socket_folder, tmp_path, fault):
    """Whatever is wrong with it, the frames go over the stream."""
    slab = FakeSlab(socket_folder / "a.slab", LARGE)
    holder = None
    if fault == "missing":
        slab.path.unlink()
    elif fault == "short":
        slab.place.length += 4096
    elif fault == "blank":
        slab._memory[:64] = bytes(64)
    elif fault == "link":
        slab.path.rename(slab.path.with_suffix(".real"))
        slab.path.symlink_to(slab.path.with_suffix(".real"))
    else:
        holder = locking(slab.path)
    running.agent.slab = slab
    rank = RingRank(running.address, tmp_path)
    rank.client.start(5)
    assert rank.keep(np.ones(3)) is PlacementResult.ELSEWHERE
    assert rank.client.close(10) == 0
    assert len(tensors(running.agent)) == 1
    assert len(rank.streams) == 1
    if holder is not None:
        holder.communicate(b"\n")


def locking(path: Path):
    """A process that holds the lock until it is told to end."""
    import subprocess
    import sys

    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "sys.stdin.readline()\n"
        "file.close()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"\n"
    return holder


def test_events_too_large_for_the_slab_use_the_stream(running, socket_folder, tmp_path):
    running.agent.slab = FakeSlab(socket_folder / "a.slab", MIN_RING_BYTES)
    rank = RingRank(running.address, tmp_path)
    rank.client.start(5)
    rank.keep(np.ones(3))
    node = GraphNode("n" * MIN_RING_BYTES, "T")
    rank.buffer.submit(GraphPart(OperatorGraph(0, (node,)), first=True, last=True))
    rank.buffer.submit(SessionEnd(1))
    assert rank.client.close(10) == 0
    assert order(running.agent) == [1, 2, 3]
    assert len(rank.streams) == 1


def test_slab_lock_is_held_while_the_rank_runs(host: RunningFakeAgent, slab: FakeSlab, tmp_path):
    rank = RingRank(host.address, tmp_path)
    rank.client.start(5)
    rank.keep(np.ones(3))
    assert slab.locked()
    assert rank.client.close(10) == 0
    assert not slab.locked()


def test_slab_is_not_used_unless_requested(host: RunningFakeAgent, tmp_path):
    rank = RingRank(host.address, tmp_path, wants_slab=False)
    rank.client.start(5)
    assert rank.keep(np.ones(3)) is PlacementResult.ELSEWHERE
    assert rank.client.close(10) == 0
    assert not host.agent.opened[0].wants_slab
    assert rank.streams == []


def test_rejected_rank_keeps_no_slab(running: RunningFakeAgent, tmp_path):
    running.agent.refusal = "no"
    rank = RingRank(running.address, tmp_path)
    rank.client.start(5)
    assert rank.client.link is LinkState.REJECTED
    assert rank.keep(np.ones(3)) is PlacementResult.ELSEWHERE
    assert rank.client.close(1) == 1


def test_abandoned_slab_reports_damaged_entries_as_lost(tmp_path, caplog):
    """Entries behind it are carried over, with the digests of their seals."""
    rig = SendBufferRig(tmp_path)
    source = ArraySource(np.arange(SIZE, dtype=np.uint8))
    for _ in range(5):
        assert rig.place(source) is PlacementResult.DONE
    rig.ring.seal(rig.ring.written)
    memory = rig.ring.mapping.memory
    entry = rig.ring.written // 5
    memory[RING_OFFSET + entry + ENTRY_HEAD.size] ^= 1
    memory[RING_OFFSET + 3 * entry + 20] ^= 1
    rig.buffer.abandon_ring()
    frames = [frame for each in rig.buffer.pop_items() for frame in make_frames(each)]
    assert [(f.sequence, f.WhichOneof("body")) for f in frames] == [
        (1, "record"),
        (2, "lost"),
        (3, "record"),
        (4, "lost"),
        (5, "record"),
    ]
    assert frames[3].lost == agent_pb2.Lost(iteration=0, tensors=1, reason="corrupted")
    assert frames[0].record.checksum == xxhash.xxh3_128_digest(frames[0].record.data)
    assert "2 tensors were damaged" in caplog.text


@pytest.mark.parametrize(("at", "body"), [(0, "lost"), (5, "record"), (ENTRY_HEAD.size, "lost")])
def test_entry_damaged_before_its_seal_is_found(tmp_path, at, body):
    """In magic, state or frame, of a slab abandoned between doorbells; a seal repairs the state."""
    rig = SendBufferRig(tmp_path)
    for value in range(3):
        rig.place(ArraySource(np.full(SIZE, value, dtype=np.uint8)))
    rig.ring.mapping.memory[RING_OFFSET + rig.ring.written // 3 + at] ^= 0x40
    rig.buffer.abandon_ring()
    frames = [frame for each in rig.buffer.pop_items() for frame in make_frames(each)]
    assert [f.WhichOneof("body") for f in frames] == ["record", body, "record"]
    assert frames[1].record.data[:1] in (b"", b"\1")
    assert (frames[0].record.data[:1], frames[2].record.data[:1]) == (b"\0", b"\2")


def test_failed_copy_in_the_slab_is_reported_on_the_stream(tmp_path):
    """Its number is assigned, so its loss must be reported."""
    rig = SendBufferRig(tmp_path)
    rig.place(UnreadableSource(np.ones(SIZE, dtype=np.uint8)))
    rig.buffer.abandon_ring()
    (frame,) = make_frames(*rig.buffer.pop_items())
    assert frame.lost == agent_pb2.Lost(iteration=0, tensors=1, reason="copy_failed")


def test_slab_of_an_earlier_agent_is_not_used(tmp_path):
    path = tmp_path / "slab"
    path.write_bytes(make_slab_header(compute_slab_bytes(0)).ljust(compute_slab_bytes(0), b"\0"))
    with path.open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(8, "little"))
    with pytest.raises(CorruptedError, match="version 1"):
        SendRing(SlabPlace(str(path), compute_slab_bytes(0)))

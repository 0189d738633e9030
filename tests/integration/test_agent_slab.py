"""The agent's side of shared memory, with a rank that writes the ring directly."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import zstandard
from support.slab_agents import MIB, SMALL, arrays_of, counts, manifest_of, wait_until
from support.slab_side import SlabSide

from rankdump._core.plan import ContentSettings, DeliverySettings
from rankdump._shm.slab_format import ENTRY_ALIGNMENT, RING_OFFSET
from rankdump.wire.v1 import agent_pb2


@pytest.fixture
def slab_agent(make_agent, short_dir):
    """Makes agents whose slabs are in a folder outside of the test's other files."""

    def make(**settings):
        return make_agent(**({"runtime_dir": str(short_dir), "slab_bytes": MIB} | settings))

    return make


@pytest.fixture
def enter(make_rank, request):
    """Opens a session and maps its slab."""

    def open_one(address: str, **fields):
        fields = {"wants_slab": True, "codec": "none", "delivery": SMALL} | fields
        rank = make_rank(address, **fields)
        place = rank.open().slab
        side = SlabSide(place.path, place.length)
        request.addfinalizer(side.close)
        return rank, side

    return open_one


@pytest.fixture
def put(frames):
    """Publishes a record in a slab, in pieces where asked; returns the position behind it."""

    def put_one(side: SlabSide, sequence: int, array: np.ndarray, piece: int = 0) -> int:
        data = array.tobytes()
        piece = piece or len(data)
        head = frames.record(sequence, array, first_bytes=0)
        written = side.put(head.SerializeToString(), data[:piece])
        for at in range(piece, len(data), piece):
            chunk = agent_pb2.Frame(sequence=sequence, chunk=agent_pb2.Chunk(offset=at))
            written = side.put(chunk.SerializeToString(), data[at : at + piece])
        return written

    return put_one


class TestRingTransfer:
    def test_entries_arrive_in_order_and_their_space_is_released(
        self, slab_agent, enter, put, frames
    ):
        """Several times the capacity of the slab passes through it and is in the tree,
        bit by bit.
        """
        rank, side = enter(slab_agent().address)
        stream = rank.push()
        arrays = [np.full(10_000 + n, n, np.float32) for n in range(100)]
        for number, array in enumerate(arrays, 1):
            stream.ring(put(side, number, array))
        side.put(frames.end(101, 0, 100).SerializeToString())
        stream.ring(side.put(frames.goodbye(102).SerializeToString()))
        stream.wait_acknowledged(102)
        assert side.writer.written > 3 * side.writer.ring_bytes
        assert side.writer.released == side.writer.written
        assert stream.finish() is grpc.StatusCode.OK
        assert arrays_of(rank.root) == [array.tobytes() for array in arrays]
        assert manifest_of(rank.root).status.is_balanced

    def test_record_larger_than_the_slab_is_split(self, slab_agent, enter, put, frames):
        """Pieces are released before the record is complete, so the slab need not hold
        all of it.
        """
        rank, side = enter(slab_agent().address)
        stream = rank.push()
        array = np.arange(MIB, dtype=np.float32)
        frame = frames.record(1, array, first_bytes=0).SerializeToString()
        data, piece = array.tobytes(), 100_000
        stream.ring(side.put(frame, data[:piece]))
        for at in range(piece, len(data), piece):
            chunk = agent_pb2.Frame(sequence=1, chunk=agent_pb2.Chunk(offset=at))
            stream.ring(side.put(chunk.SerializeToString(), data[at : at + piece]))
        stream.ring(put(side, 2, np.ones(5, np.int8)))
        stream.wait_acknowledged(2)
        assert arrays_of(rank.root) == [data, np.ones(5, np.int8).tobytes()]
        assert len(data) > 2 * side.writer.ring_bytes

    def test_entry_is_not_overwritten_before_its_commit(self, slab_agent, enter, put):
        """Space is released with the acknowledgement only, because the slab is the only copy."""
        agent = slab_agent()
        rank, side = enter(agent.address)
        with agent.agent._ledger._lock:
            stream = rank.push().ring(put(side, 1, np.ones(1000)))
            wait_until(lambda: list((rank.root / "rank_0" / "Net").rglob("*.npy")))
            assert (side.writer.released, stream.acknowledged) == (0, 0)
        stream.wait_acknowledged(1)
        assert side.writer.released == side.writer.written

    def test_uncommitted_frame_is_resent_through_another_slab(
        self, slab_agent, enter, put, frames, request
    ):
        """The agent has read beyond the frame, so the rank begins a new slab with unacknowledged
        frames.
        """
        agent = slab_agent()
        rank, side = enter(agent.address)
        ledger = agent.agent._ledger
        real = ledger.commit

        def failing(outcomes, *more, **named):
            if any(each.frame_id.sequence == 2 for each in outcomes):
                raise MemoryError
            real(outcomes, *more, **named)

        ledger.commit = failing
        stream = rank.push().ring(put(side, 1, np.ones(10)))
        stream.wait_acknowledged(1)
        stream.ring(put(side, 2, np.zeros(10)))
        assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
        ledger.commit = real
        opened = rank.open()
        assert opened.acknowledged_sequence == 1
        again = SlabSide(opened.slab.path, opened.slab.length)
        request.addfinalizer(again.close)
        assert again.writer.written == 0
        stream = rank.push().ring(put(again, 2, np.zeros(10)))
        stream.wait_acknowledged(2)
        assert len(arrays_of(rank.root)) == 2
        stream.finish()

    def test_failed_copy_is_counted_as_drop(self, slab_agent, enter, put, frames):
        """Also within a record in pieces; the records around it arrive."""
        rank, side = enter(slab_agent().address)
        array = np.arange(100, dtype=np.float32)
        put(side, 1, array)
        head = frames.record(2, array, first_bytes=0).SerializeToString()
        side.put(head, array.tobytes(), whole=False)
        head = frames.record(3, array, first_bytes=0).SerializeToString()
        side.put(head, array.tobytes()[:200])
        chunk = agent_pb2.Frame(sequence=3, chunk=agent_pb2.Chunk(offset=200))
        side.put(chunk.SerializeToString(), array.tobytes()[200:], whole=False)
        side.put(frames.record(4, array, first_bytes=0).SerializeToString(), whole=False)
        put(side, 5, array)
        stream = rank.push().ring(side.put(frames.end(6, 0, 5).SerializeToString()))
        stream.wait_acknowledged(6)
        assert counts(rank) == {"stored": 2, "degraded": 0, "expected": 5, "copy_failed": 3}
        assert manifest_of(rank.root).status.is_balanced

    @pytest.mark.parametrize("saved", ["tensor", "full"])
    def test_degraded_record_is_a_row_and_a_count(self, slab_agent, enter, put, frames, saved):
        """The statistics of a tensor without space are stored, whatever the plan saves."""
        content = ContentSettings(saved=saved, statistics=("max", "min"))
        delivery = DeliverySettings(buffer_bytes=MIB, on_full="statistic")
        rank, side = enter(slab_agent().address, content=content, delivery=delivery)
        array = np.arange(4, dtype=np.float32)
        poor = frames.figures(1, [(array, "3.5,0.25")], degraded="buffer_full")
        side.put(poor.SerializeToString())
        put(side, 2, array)
        stream = rank.push().ring(side.put(frames.end(3, 0, 2).SerializeToString()))
        stream.wait_acknowledged(3)
        assert counts(rank) == {"stored": 1, "degraded": 1, "expected": 2}
        (table,) = rank.root.rglob("statistic.csv")
        first, *others = table.read_text().splitlines()[1:]
        assert first.endswith(",3.5,0.25,")
        assert len(others) == (saved == "full")

    def test_unannounced_entries_are_read_on_the_next_stream(self, slab_agent, enter, put):
        """Entries whose doorbell was lost with its stream are not lost."""
        rank, side = enter(slab_agent().address)
        put(side, 1, np.ones(3))
        stream = rank.push()
        stream.wait_acknowledged(1)
        stream.cut()
        put(side, 2, np.ones(4))
        rank.open()
        rank.push().wait_acknowledged(2)

    def test_codec_reads_elements_without_a_copy(self, slab_agent, enter, put):
        """The packed file has the elements of the slab."""
        rank, side = enter(slab_agent().address, codec="zstd")
        array = np.arange(1000, dtype=np.float32)
        rank.push().ring(put(side, 1, array)).wait_acknowledged(1)
        (path,) = (rank.root / "rank_0" / "Net").rglob("*.npy.zst")
        packed = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
        assert packed.endswith(array.tobytes())

    def test_sixteen_sessions_run_at_once(self, slab_agent, enter, put, frames, short_dir):
        """Each session has its own tensors in its own tree; the queue is smaller than all
        of them.
        """
        address = slab_agent(queue_bytes=MIB).address
        whole = []

        def work(number: int) -> None:
            job, of_job = f"job{number // 2}", number % 2
            about = {"job_id": job, "session_id": f"s{number}", "rank": of_job, "world_size": 2}
            rank, side = enter(address, root=short_dir / job, **about)
            arrays = [np.full(5_000, number * 100 + n, np.int32) for n in range(100)]
            stream = rank.push()
            for sequence, array in enumerate(arrays, 1):
                stream.ring(put(side, sequence, array))
            side.put(frames.end(101, 0, 100).SerializeToString())
            stream.ring(side.put(frames.goodbye(102).SerializeToString()))
            stream.wait_acknowledged(102)
            stream.finish()
            if arrays_of(rank.root, of_job) == [array.tobytes() for array in arrays]:
                whole.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(whole) == list(range(16))
        wait_until(lambda: not list((short_dir / "slabs").iterdir()))


class TestSlabFiles:
    def test_file_has_group_mode_and_is_removed_with_the_session(
        self, slab_agent, enter, frames, short_dir
    ):
        """Only owner and group can map the file; all of its pages are allocated in advance."""
        rank, side = enter(slab_agent().address)
        (path,) = (short_dir / "slabs").iterdir()
        facts = path.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o660
        assert facts.st_blocks * 512 >= facts.st_size == RING_OFFSET + MIB
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o710
        stream = rank.push().ring(side.put(frames.goodbye(1).SerializeToString()))
        stream.wait_acknowledged(1)
        assert path.exists()
        stream.finish()
        wait_until(lambda: not path.exists())

    def test_reconnected_rank_gets_its_slab_again(self, slab_agent, enter, put):
        """It gets the same file while it holds the lock, and another one afterwards."""
        rank, side = enter(slab_agent().address)
        inode = os.fstat(side.descriptor).st_ino
        rank.push().ring(put(side, 1, np.ones(3))).wait_acknowledged(1)
        assert Path(rank.open().slab.path).stat().st_ino == inode
        side.unlock()
        assert Path(rank.open().slab.path).stat().st_ino != inode

    def test_record_in_pieces_is_not_continued_by_another_agent(
        self, slab_agent, enter, put, frames
    ):
        """Released pieces are lost, so the rank gets another slab and begins the record again."""
        rank, side = enter(slab_agent().address)
        inode = os.fstat(side.descriptor).st_ino
        array = np.arange(1000, dtype=np.float32)
        head = frames.record(1, array, first_bytes=0).SerializeToString()
        stream = rank.push().ring(side.put(head, array.tobytes()[:1000]))
        wait_until(lambda: side.writer.released == side.writer.written)
        stream.cut()
        place = rank.open().slab
        assert Path(place.path).stat().st_ino != inode
        again = SlabSide(place.path, place.length)
        rank.push().ring(put(again, 1, array, piece=900)).wait_acknowledged(1)
        again.close()
        assert arrays_of(rank.root) == [array.tobytes()]
        assert rank.drain().drained

    def test_slab_that_cannot_be_mapped_is_removed(self, slab_agent, make_rank, frames):
        """A rank that sends its frames on the stream occupies no slab."""
        rank = make_rank(slab_agent().address, wants_slab=True, delivery=SMALL)
        path = Path(rank.open().slab.path)
        assert path.exists()
        rank.push().send(frames.record(1, np.ones(3))).wait_acknowledged(1)
        assert not path.exists()

    def test_leftover_files_are_removed(self, slab_agent, short_dir):
        """An agent that starts removes slabs that no session and no process needs."""
        folder = short_dir / "slabs"
        folder.mkdir()
        (folder / "old.slab").write_bytes(bytes(100))
        (folder / "note.txt").write_bytes(b"not ours")
        slab_agent()
        assert [path.name for path in folder.iterdir()] == ["note.txt"]


class TestSlabMemory:
    def test_memory_limit_denies_slab_then_session(self, slab_agent, make_rank, frames):
        """Both are reported; a rank without a slab sends its frames on the stream."""
        cap = {"memory_bytes": 36 * MIB + MIB // 2, "queue_bytes": MIB, "max_record_bytes": MIB}
        agent = slab_agent(**cap)
        for number in range(3):
            about = {"session_id": f"s{number}", "job_id": f"j{number}", "wants_slab": True}
            rank = make_rank(agent.address, **about)
            assert rank.open().HasField("slab")
            rank.push()
            wait_until(lambda live=number + 1: agent.agent._registry.live() == live)
        late = make_rank(agent.address, session_id="s9", job_id="j9", wants_slab=True)
        assert not late.open().HasField("slab")
        (finding,) = late.status().findings
        assert "its frames are sent on the stream instead of shared memory: a slab needs" in finding
        late.push().send(frames.record(1, np.ones(3))).wait_acknowledged(1)
        with pytest.raises(grpc.RpcError) as refused:
            make_rank(agent.address, session_id="s10", job_id="j10").open()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "a session needs 8388608 bytes" in (refused.value.details() or "")

    def test_missing_space_for_the_file_is_reported(self, slab_agent, make_rank, frames, short_dir):
        """Frames are sent on the stream if the folder cannot be made."""
        (short_dir / "slabs").write_text("in the way")
        rank = make_rank(slab_agent().address, wants_slab=True)
        assert not rank.open().HasField("slab")
        assert "sent on the stream" in rank.status().findings[0]
        rank.push().send(frames.record(1, np.ones(3))).wait_acknowledged(1)

    @pytest.mark.parametrize(("setting", "wants"), [({"slab_bytes": 0}, True), ({}, False)])
    def test_slabs_can_be_disabled(self, slab_agent, make_rank, setting, wants):
        """By the operator with a size of 0, and by a rank that requests none."""
        rank = make_rank(slab_agent(**setting).address, wants_slab=wants)
        assert not rank.open().HasField("slab")
        assert list(rank.status().findings) == []


def scribbled(side: SlabSide, frames) -> None:
    side.put(frames.goodbye(1).SerializeToString())
    side.memory[RING_OFFSET : RING_OFFSET + ENTRY_ALIGNMENT] = bytes(ENTRY_ALIGNMENT)


def truncated(side: SlabSide, frames) -> None:
    side.put(frames.goodbye(1).SerializeToString())
    os.ftruncate(side.descriptor, RING_OFFSET)


def garbage(side: SlabSide, frames) -> None:
    side.put(b"\xff\xff\xff")


def read_too_little(side: SlabSide, frames) -> None:
    side.put(frames.goodbye(1).SerializeToString())
    side.memory[64:72] = (1 << 40).to_bytes(8, "little")


def numbered_with_a_gap(side: SlabSide, frames) -> None:
    side.put(frames.goodbye(5).SerializeToString())


def data_twice(side: SlabSide, frames) -> None:
    array = np.ones(4, np.float32)
    side.put(frames.record(1, array).SerializeToString(), array.tobytes())


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (scribbled, "no entry at 0"),
        (truncated, "now has 4096"),
        (garbage, "slab entry before"),
        (read_too_little, "damaged slab: written to"),
        (numbered_with_a_gap, "expected at most 1"),
        (data_twice, "bytes of data itself"),
    ],
)
def test_contradictory_entry_ends_only_its_stream(
    slab_agent, enter, make_rank, frames, attack, says
):
    """The rank gets one clear line; no other rank is affected."""
    agent = slab_agent()
    rank, side = enter(agent.address)
    attack(side, frames)
    stream = rank.push().ring(1)
    codes = grpc.StatusCode
    expected = (codes.INVALID_ARGUMENT, codes.DATA_LOSS, codes.UNAVAILABLE)
    assert stream.wait_over() in expected
    assert says in stream.details
    other = make_rank(agent.address, session_id="other", job_id="other")
    other.open()
    other.push().send(frames.record(1, np.ones(3))).wait_acknowledged(1)


def test_rank_that_overwrites_the_agents_position_loses_its_stream(slab_agent, enter, put):
    """The stream ends when the rank overwrites the position that belongs to the agent."""
    rank, side = enter(slab_agent().address)
    stream = rank.push().ring(put(side, 1, np.ones(3)))
    stream.wait_acknowledged(1)
    side.memory[128:136] = (1 << 40).to_bytes(8, "little")
    written = put(side, 2, np.ones(3))
    while stream.code is None:
        stream.ring(written)
        time.sleep(0.01)
    assert stream.wait_over() is grpc.StatusCode.INVALID_ARGUMENT
    assert "release to" in stream.details


def test_doorbell_without_entry_or_slab_is_rejected(slab_agent, enter, make_rank):
    """A doorbell beyond the written entries is rejected, and one without a slab."""
    agent = slab_agent()
    rank, _ = enter(agent.address)
    stream = rank.push().ring(1 << 60)
    assert stream.wait_over() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the slab has 0" in stream.details
    poor = make_rank(agent.address, session_id="poor", job_id="poor")
    poor.open()
    stream = poor.push().ring(64)
    assert stream.wait_over() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no shared-memory ring" in stream.details

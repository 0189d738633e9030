"""Agent in this process, driven frame by frame over a real Unix socket."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import zstandard
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.npy_arrays import view_npy_array
from support.slab_agents import wait_until

from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._codec.file_codec import get_codec
from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.manifest import Manifest
from rankdump._core.plan import DeliverySettings, IterationSelection, TensorSelection
from rankdump._core.status import SessionState
from rankdump._kernels.kernel_functions import load_kernels
from rankdump._wire.metadata_messages import events_to_wire
from rankdump.wire.v1 import agent_pb2, status_pb2
from rankdumpd.agent import service
from rankdumpd.agent.ledger.agent_ledger import AgentLedger

ARRAY = np.arange(1000, dtype=np.float32).reshape(10, 100)


def tensors(root: Path, rank: int = 0) -> list[Path]:
    return sorted((root / f"rank_{rank}" / "Net").rglob("*.npy*"))


def load(path: Path) -> np.ndarray:
    if path.suffix == ".zst":
        return view_npy_array(
            bytes(get_codec("zstd").decode(path.read_bytes(), limit_bytes=1 << 30))
        )
    return np.load(path)


def manifests(root: Path, rank: int = 0) -> list[Manifest]:
    folder = root / f"rank_{rank}" / ".dump_metadata" / "manifest"
    return [Manifest.from_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def test_agent_logs_that_kernels_are_not_compiled(make_agent, monkeypatch, caplog):
    monkeypatch.setattr(service, "KERNELS", load_kernels("numpy"))
    agent = make_agent()
    assert len([line for line in caplog.messages if "compiled kernels" in line]) == 1
    monkeypatch.undo()
    caplog.clear()
    agent.restart()
    assert not [line for line in caplog.messages if "compiled kernels" in line]


@pytest.fixture
def rank(make_agent, make_rank):
    """A rank connected to a running agent."""
    return make_rank(make_agent().address)


class TestRecordFiles:
    def test_zstd_command_unpacks_to_the_npy_bytes(self, rank, frames, tmp_path):
        """numpy loads what `zstd -d` unpacks, and it equals what the rank sent."""
        rank.open()
        rank.push().send(frames.record(1, ARRAY), frames.goodbye(2)).finish()
        (packed,) = tensors(rank.root)
        plain = tmp_path / "plain.npy"
        if shutil.which("zstd"):
            subprocess.run(["zstd", "-q", "-d", packed, "-o", plain], check=True)
        else:
            plain.write_bytes(zstandard.ZstdDecompressor().decompress(packed.read_bytes()))
        assert np.load(plain).tobytes() == ARRAY.tobytes()
        assert np.load(plain).shape == ARRAY.shape

    @pytest.mark.parametrize("size", [1, 7, 4000, 5000])
    def test_chunk_size_does_not_change_the_file(self, make_agent, make_rank, frames, size):
        """The division of a record into chunks does not affect its file."""
        rank = make_rank(make_agent().address, codec="none")
        rank.open()
        array = ARRAY[:1] if size == 1 else ARRAY
        stream = rank.push().send(frames.record(1, array, first_bytes=0))
        stream.send(*frames.chunks(1, array, 0, size), frames.goodbye(2))
        assert stream.finish() is grpc.StatusCode.OK
        (path,) = tensors(rank.root)
        assert np.load(path).tobytes() == array.tobytes()

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
    def test_scalars_and_empty_tensors_are_stored(self, rank, frames, shape):
        """Tensors without dimensions and tensors without elements have files."""
        array = np.ones(shape, dtype=np.int64)
        rank.open()
        rank.push().send(frames.record(1, array), frames.goodbye(2)).finish()
        (path,) = tensors(rank.root)
        assert load(path).shape == shape
        assert load(path).tobytes() == array.tobytes()

    @pytest.mark.parametrize(
        ("dtype", "raw", "values"),
        [
            ("bfloat16", np.array([0x3F80, 0xC000], dtype="<u2"), [1.0, -2.0]),
            ("float8_e4m3fn", np.array([0x38, 0xC0], dtype=np.uint8), [1.0, -2.0]),
        ],
    )
    def test_types_without_numpy_equivalent_are_widened(self, rank, frames, dtype, raw, values):
        """bfloat16 and float8 are float32 on disk, with their own name in the manifest."""
        rank.open()
        stream = rank.push().send(frames.record(1, raw, dtype=dtype), frames.end(2, 0, 1))
        stream.finish()
        (path,) = tensors(rank.root)
        assert load(path).dtype == np.float32
        assert load(path).tolist() == values
        assert manifests(rank.root)[0].records[0].dtype == dtype

    def test_file_modes_follow_the_plan_regardless_of_umask(self, rank, frames):
        """Files and folders get the plan's modes."""
        old = os.umask(0o077)
        try:
            rank.open()
            rank.push().send(frames.record(1, ARRAY), frames.goodbye(2)).finish()
        finally:
            os.umask(old)
        (path,) = tensors(rank.root)
        assert stat.S_IMODE(path.stat().st_mode) == 0o440
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


class TestIterationEnds:
    def test_manifest_is_balanced_and_written_last(self, rank, frames):
        """Expected equals stored plus dropped, from both sides; no manifest before the end."""
        rank.open()
        stream = rank.push().send(
            frames.record(1, ARRAY),
            frames.record(2, ARRAY, dtype="float4_unknown"),
        )
        stream.wait_acknowledged(2)
        assert manifests(rank.root) == []
        stream.send(frames.end(3, 0, 5, buffer_full=3))
        stream.wait_acknowledged(3)
        (manifest,) = manifests(rank.root)
        assert manifest.status.is_balanced
        assert (manifest.status.expected, manifest.status.stored) == (5, 1)
        assert manifest.status.dropped == {"buffer_full": 3, "unsupported_dtype": 1}
        assert [rank.root / record.path for record in manifest.records] == tensors(rank.root)
        assert stream.send(frames.goodbye(4)).finish() is grpc.StatusCode.OK
        assert rank.status().findings == []

    def test_unbalanced_iteration_is_reported(self, rank, frames):
        """A finding reports an iteration in which a rank expects more tensors than it sent."""
        rank.open()
        rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 4), frames.goodbye(3)).finish()
        assert rank.status().findings == [
            "rank 0, iteration 0: 4 tensors expected, 1 kept and 0 dropped"
        ]

    def test_dropped_records_are_counted_and_their_bytes_discarded(
        self, make_agent, make_rank, frames
    ):
        """The agent applies the plan as well; the balance has the records that it drops."""
        selection = TensorSelection(iterations=IterationSelection("1", ((1, 1),)))
        rank = make_rank(make_agent(max_record_bytes=100).address, selection=selection)
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY, first_bytes=10))
        stream.send(*frames.chunks(1, ARRAY, 10, 1000))
        stream.send(frames.record(2, ARRAY, iteration=1), frames.end(3, 0, 1), frames.end(4, 1, 1))
        stream.wait_acknowledged(4)
        assert tensors(rank.root) == []
        dropped = [dict(status.dropped) for status in rank.status().iterations]
        assert dropped == [{"iteration_excluded": 1}, {"record_too_large": 1}]
        stream.finish()

    def test_order_files_are_written_for_each_rank(self, rank, frames):
        """Operators are in program order, and each iteration on a line of its own."""

        def events(sequence: int, iteration: int) -> agent_pb2.Frame:
            names = ["Default/b-op0", "Default/a-op0"]
            columns = EventColumns.from_events(
                [
                    RankEvent(0, iteration, place, place, names[place], EventKind.OPERATOR, 1, 2)
                    for place in (1, 0)
                ]
            )
            return agent_pb2.Frame(sequence=sequence, events=events_to_wire(columns))

        rank.open()
        stream = rank.push()
        stream.send(events(1, 3), frames.end(2, 3, 0), events(3, 7), frames.end(4, 7, 0))
        assert stream.finish() is grpc.StatusCode.OK
        folder = rank.root / "rank_0" / "execution_order"
        assert (folder / "ms_execution_order_graph_0.csv").read_text() == (
            "NodeExecutionOrder-FullNameWithScope\nDefault/b-op0\nDefault/a-op0\n"
        )
        assert (folder / "ms_global_execution_order_graph_0.csv").read_text() == "3\n7\n"

    def test_metadata_is_written_for_every_rank(self, make_agent, make_rank):
        """Each rank folder has its own metadata; a file that exists is not replaced."""
        address = make_agent().address
        for number in (0, 1):
            rank = make_rank(address, rank=number, world_size=2, session_id=f"s{number}")
            rank.open()
            folder = rank.root / f"rank_{number}" / ".dump_metadata"
            assert (folder / "data_dump.json").read_bytes() == rank.config_source
            assert (folder / "config.json").read_bytes() == (
                b'{"device_target":"CPU","ms_version":"2.3.0"}'
            )
        again = make_rank(address, session_id="later", config_source=b"{}")
        again.open()
        kept = (again.root / "rank_0" / ".dump_metadata" / "data_dump.json").read_bytes()
        assert kept == rank.config_source


class TestSessionResumption:
    def test_resumed_stream_loses_and_duplicates_nothing(self, rank, frames):
        """After a cut the rank resends unacknowledged frames, and each is stored once."""
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1))
        stream.send(frames.record(3, ARRAY + 2, first_bytes=100))
        stream.wait_acknowledged(2)
        stream.cut()
        assert rank.open().acknowledged_sequence == 2
        stream = rank.push().send(
            frames.record(2, ARRAY + 1),
            frames.record(3, ARRAY + 2),
            frames.end(4, 0, 3),
            frames.goodbye(5),
        )
        assert stream.finish() is grpc.StatusCode.OK
        assert [load(path)[0, 0] for path in tensors(rank.root)] == [0, 1, 2]
        (manifest,) = manifests(rank.root)
        assert manifest.status.is_balanced
        assert len(manifest.records) == 3

    def test_restarted_agent_continues_after_the_last_committed_frame(
        self, make_agent, make_rank, frames
    ):
        """A new agent on the same state acknowledges what the old one committed."""
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        rank.push().send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1)).finish()
        agent.restart()
        assert rank.open().acknowledged_sequence == 2
        stream = rank.push()
        stream.send(frames.record(1, ARRAY), frames.record(2, ARRAY + 1))
        stream.send(frames.record(3, ARRAY + 2), frames.end(4, 0, 3), frames.goodbye(5))
        assert stream.finish() is grpc.StatusCode.OK
        assert len(tensors(rank.root)) == 3
        (manifest,) = manifests(rank.root)
        assert len(manifest.records) == 3
        assert manifest.status.is_balanced
        agent.restart()
        assert rank.status().sessions == []

    def test_committed_metadata_without_effect_is_applied_after_restart(
        self, make_agent, make_rank, frames
    ):
        """If an agent ends between commit and manifest, the next one writes the manifest."""
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY), frames.end(2, 7, 0))
        stream.wait_acknowledged(2)
        agent.agent._actions._apply = lambda session, declared: None
        columns = EventColumns.from_events(
            [RankEvent(0, 0, 0, 0, "Default/op0", EventKind.OPERATOR, 1, 2)]
        )
        stream.send(
            agent_pb2.Frame(sequence=3, events=events_to_wire(columns)), frames.end(4, 0, 1)
        )
        stream.send(frames.goodbye(5)).wait_acknowledged(5)
        stream.cut()
        assert [manifest.status.iteration for manifest in manifests(rank.root)] == [7]
        agent.restart()
        assert [manifest.status.iteration for manifest in manifests(rank.root)] == [0, 7]
        assert all(manifest.status.is_balanced for manifest in manifests(rank.root))
        folder = rank.root / "rank_0" / "execution_order"
        assert (folder / "ms_global_execution_order_graph_0.csv").read_text() == "0\n"
        assert "Default/op0" in (folder / "ms_execution_order_graph_0.csv").read_text()
        (session,) = rank.status().sessions
        assert session.state == status_pb2.SESSION_STATE_CLOSED
        agent.restart()
        assert rank.status().sessions == []
        assert (folder / "ms_global_execution_order_graph_0.csv").read_text() == "0\n"

    def test_second_stream_of_a_session_ends_the_first(self, rank, frames):
        """A rank can reconnect before the agent notices that the first stream is broken."""
        rank.open()
        first = rank.push().send(frames.record(1, ARRAY))
        first.wait_acknowledged(1)
        second = rank.push().send(frames.record(2, ARRAY), frames.goodbye(3))
        second.wait_acknowledged(3)
        assert first.wait_over() is grpc.StatusCode.UNAVAILABLE
        assert second.finish() is grpc.StatusCode.OK

    def test_lost_rank_is_reported_as_lost(self, rank, frames):
        """After a stream that breaks without a session end the session is lost and its iteration
        open.
        """
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY))
        stream.wait_acknowledged(1)
        assert rank.status().sessions[0].state == status_pb2.SESSION_STATE_OPEN
        assert stream.finish() is grpc.StatusCode.OK
        view = rank.status()
        assert view.sessions[0].state == status_pb2.SESSION_STATE_LOST
        assert view.findings == ["rank 0 ended within iteration 0, with 1 tensor in the tree"]

    def test_end_of_lost_rank_is_in_its_session_file(self, make_agent, make_rank, frames):
        """The file has the counts of the unfinished iteration, also when the agent stops
        at once.
        """
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        (begun,) = read_tree_sessions(rank.root)
        assert (begun.status.state, begun.unfinished) == (SessionState.OPEN, ())
        stream = rank.push().send(frames.record(1, ARRAY))
        stream.wait_acknowledged(1)
        assert stream.finish() is grpc.StatusCode.OK
        agent.stop()
        (ended,) = read_tree_sessions(rank.root)
        assert ended.status.state is SessionState.LOST
        assert [(each.iteration, each.stored) for each in ended.unfinished] == [(0, 1)]

    def test_late_records_of_lost_rank_change_its_session_file(
        self, make_agent, make_rank, frames, monkeypatch
    ):
        """Records are committed after the file was written for the lost session."""
        begun, gate, commit = threading.Event(), threading.Event(), AgentLedger.commit

        def commit_late(*arguments, **named):
            begun.set()
            assert gate.wait(60)
            return commit(*arguments, **named)

        monkeypatch.setattr(AgentLedger, "commit", commit_late)
        rank = make_rank(make_agent().address)
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY))
        assert begun.wait(60)
        stream.cut()
        wait_until(lambda: read_tree_sessions(rank.root)[0].status.state is SessionState.LOST)
        assert read_tree_sessions(rank.root)[0].unfinished == ()
        gate.set()
        wait_until(lambda: read_tree_sessions(rank.root)[0].unfinished)
        (ended,) = read_tree_sessions(rank.root)
        assert [(each.iteration, each.stored) for each in ended.unfinished] == [(0, 1)]


class TestSessionOpening:
    def test_second_live_session_of_a_rank_is_rejected_by_name(self, make_agent, make_rank, frames):
        """Two processes that both claim to be rank 0 must not mix their tensors."""
        address = make_agent().address
        first = make_rank(address, pid=111)
        first.open()
        stream = first.push().send(frames.record(1, ARRAY))
        stream.wait_acknowledged(1)
        second = make_rank(address, session_id="other", pid=222)
        with pytest.raises(grpc.RpcError) as refused:
            second.open()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = refused.value.details() or ""
        assert all(part in details for part in ("rank 0", "111", "'here'")), details
        stream.finish()
        second.open()

    def test_wrong_token_is_rejected(self, rank):
        """The id of a session does not suffice to push into it."""
        rank.open()
        assert rank.push(token=b"guess").wait_over() is grpc.StatusCode.PERMISSION_DENIED
        assert rank.push(token=b"").wait_over() is grpc.StatusCode.PERMISSION_DENIED

    def test_unknown_session_must_open_again(self, rank):
        """The error asks a rank whose session the agent does not know to open it again."""
        stream = rank.push(token=b"x")
        assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
        assert "open it again" in stream.details

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"root_text": "relative/dump"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"codec": "lzma"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"session_id": "../../etc"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"rank": 1}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"root_text": "/proc/nowhere"}, grpc.StatusCode.FAILED_PRECONDITION),
        ],
    )
    def test_unsupported_sessions_are_rejected(self, make_agent, make_rank, fields, code):
        """A plan that cannot be executed is rejected at the opening, not tensor by tensor."""
        rank = make_rank(make_agent().address, **fields)
        with pytest.raises(grpc.RpcError) as refused:
            rank.open()
        assert refused.value.code() is code

    def test_rank_on_excluded_device_gets_the_reason(self, make_agent, make_rank):
        """The answer to the opening tells a rank that the plan excludes it."""
        rank = make_rank(make_agent().address, selection=TensorSelection(devices=(1,)))
        assert rank.open().excluded == "support_device [1] excludes this rank's device 0"

    @pytest.mark.parametrize(
        "frames_of",
        [
            lambda f: [f.record(2, ARRAY)],
            lambda f: [f.record(1, ARRAY), f.record(3, ARRAY)],
            lambda f: [f.record(1, ARRAY, first_bytes=10), f.record(2, ARRAY)],
            lambda f: f.chunks(1, ARRAY, 0, 1000),
            lambda f: [f.record(1, ARRAY, byte_count=3)],
            lambda f: [f.record(1, ARRAY, iteration=1 << 63)],
            lambda f: [agent_pb2.Frame(sequence=1)],
        ],
    )
    def test_bad_frame_ends_only_its_stream(self, make_agent, make_rank, frames, frames_of):
        """An invalid frame ends its stream; the agent and all other streams continue."""
        address = make_agent().address
        good = make_rank(address, rank=1, world_size=2, session_id="good")
        good.open()
        good_stream = good.push().send(frames.record(1, ARRAY))
        bad = make_rank(address, world_size=2, session_id="bad")
        bad.open()
        assert bad.push().send(*frames_of(frames)).wait_over() is grpc.StatusCode.UNAVAILABLE
        good_stream.send(frames.record(2, ARRAY), frames.goodbye(3))
        assert good_stream.finish() is grpc.StatusCode.OK
        assert len(tensors(good.root, rank=1)) == 2

    def test_symlink_out_of_the_tree_is_not_followed(self, rank, frames, tmp_path):
        """Nothing is written behind a link that leaves the tree; the records are counted as
        dropped.
        """
        rank.open()
        (rank.root / "rank_0" / "Net").symlink_to(tmp_path)
        rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1)).finish()
        assert list(tmp_path.iterdir()) == []
        assert dict(rank.status().iterations[0].dropped) == {"outside_root": 1}


class TestAgentQueue:
    def test_full_queue_blocks_ranks_and_loses_nothing(self, make_agent, make_rank, frames):
        """All records arrive although they exceed the limit of the queue, one of them by itself."""
        rank = make_rank(make_agent(queue_bytes=1 << 20).address, codec="none")
        rank.open()
        big = np.zeros(3 << 20, dtype=np.uint8)
        stream = rank.push()
        for sequence in range(1, 41):
            stream.send(frames.record(sequence, np.zeros(100_000, dtype=np.uint8)))
        stream.send(frames.record(41, big, first_bytes=0), *frames.chunks(41, big, 0, 1 << 20))
        stream.send(frames.end(42, 0, 41), frames.goodbye(43))
        assert stream.finish() is grpc.StatusCode.OK
        assert len(tensors(rank.root)) == 41
        assert manifests(rank.root)[0].status.is_balanced
        assert rank.status().load.queued_bytes == 0

    def test_synced_records_are_acknowledged(self, make_agent, make_rank, frames):
        """With `synced` the tree and the acknowledgements are the same."""
        rank = make_rank(make_agent().address, delivery=DeliverySettings(durability="synced"))
        rank.open()
        stream = rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3))
        assert stream.finish() is grpc.StatusCode.OK
        assert len(tensors(rank.root)) == 1

    def test_drain_returns_when_everything_is_in_the_tree(self, rank, frames):
        """Control(Drain) returns after the last received record is committed."""
        rank.open()
        stream = rank.push().send(*[frames.record(n, ARRAY) for n in range(1, 51)])
        stream.wait_acknowledged(50)
        assert rank.drain().drained
        assert len(tensors(rank.root)) == 50
        stream.finish()


class TestAgentService:
    def test_health_and_reflection_are_served(self, rank):
        """Health is SERVING for the server and for its service; reflection lists the service."""
        rank.status()
        # The stub files of both know the classes but not the calls.
        health: Any = health_pb2_grpc.HealthStub(rank.channel)
        for name in ("", "rankdump.wire.v1.AgentService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(rank.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in answer.list_services_response.service}
        assert "rankdump.wire.v1.AgentService" in names

    def test_stop_leaks_no_descriptor(self, make_agent, make_rank, frames):
        """An agent that has stopped has no file open."""
        agent = make_agent()

        def serve(session_id: str) -> int:
            rank = make_rank(agent.address, session_id=session_id)
            rank.open()
            rank.push().send(frames.record(1, ARRAY), frames.goodbye(2)).finish()
            rank.close()
            agent.restart()
            return len([fd for fd in Path("/proc/self/fd").iterdir() if is_ours(fd)])

        first = serve("one")
        assert [serve("two"), serve("three")] == [first, first]

    def test_manifest_is_plain_json(self, rank, frames):
        """A manifest is plain JSON with the names that people search for."""
        rank.open()
        rank.push().send(frames.record(1, ARRAY), frames.end(2, 0, 1), frames.goodbye(3)).finish()
        folder = rank.root / "rank_0" / ".dump_metadata" / "manifest"
        body = json.loads(next(folder.iterdir()).read_text())
        assert body["records"][0]["op_name"] == "Default/fc-Dense/MatMul-op0"


def is_ours(descriptor: Path) -> bool:
    # gRPC keeps descriptors of its own between servers; files and sockets with a path are ours.
    try:
        return "/rd-" in str(descriptor.readlink())
    except FileNotFoundError:
        return False


class TestResentFrames:
    def test_duplicate_and_swapped_batches_are_stored_once_in_order(
        self, make_agent, make_rank, frames
    ):
        """A repeated batch changes nothing; a batch that arrives too early is requested again."""
        rank = make_rank(make_agent().address)
        rank.open()
        batches = [
            [frames.record(2 * n + 1, ARRAY), frames.record(2 * n + 2, ARRAY)] for n in range(4)
        ]
        last = [frames.end(9, 0, 8), frames.goodbye(10)]
        stream = rank.push()
        for batch in (batches[0], batches[0], batches[1], batches[0], batches[3], batches[2]):
            stream.send(*batch)
        assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
        assert "frame 7 follows frame 4" in stream.details
        stream = rank.push()
        for batch in (*batches, *batches, last, last):
            stream.send(*batch)
        assert stream.finish() is grpc.StatusCode.OK
        (written,) = manifests(rank.root)
        assert written.status.is_balanced
        assert (written.status.stored + written.status.linked, len(tensors(rank.root))) == (8, 8)

    def test_poison_frame_drops_only_itself(self, make_agent, make_rank, frames):
        """A frame that cannot be committed is resent twice, then counted; later frames are
        accepted.
        """
        agent = make_agent()
        rank = make_rank(agent.address)
        rank.open()
        poison = agent_pb2.Frame(sequence=2, record=agent_pb2.Record(kind=b"\xff"))
        for _ in range(2):
            stream = rank.push().send(frames.record(1, ARRAY), poison, frames.record(3, ARRAY))
            assert stream.wait_over() is grpc.StatusCode.UNAVAILABLE
        rank.push().send(frames.record(1, ARRAY), poison).wait_acknowledged(2)
        agent.restart()
        rank.open()
        stream = rank.push().send(frames.record(3, ARRAY), frames.end(4, 0, 3), frames.goodbye(5))
        assert stream.finish() is grpc.StatusCode.OK
        (written,) = manifests(rank.root)
        assert dict(written.status.dropped) == {"unreadable": 1}
        assert written.status.is_balanced

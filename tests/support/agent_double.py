"""Test double of an agent: a real gRPC server whose answers a test decides."""

from __future__ import annotations

import mmap
import queue
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
from support.event_lists import list_events

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.session_protocol import SessionRequest
from rankdump._shm.slab_format import SlabMemory, compute_slab_bytes, format_slab
from rankdump._shm.slab_ring import SlabReader
from rankdump._wire.metadata_messages import events_from_wire
from rankdump._wire.session_messages import (
    kind_from_wire,
    record_from_wire,
    statistic_rows_from_wire,
)
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc


class FakeAgent(agent_pb2_grpc.AgentServiceServicer):
    """Keeps every frame, and acknowledges up to `acknowledge_up_to`."""

    def __init__(self) -> None:
        self.opened: list[agent_pb2.OpenSessionRequest] = []
        self.frames: list[agent_pb2.Frame] = []
        self.committed = 0
        self.examined = 0
        """Number of the last frame that was looked at whether it is acknowledged."""
        self.acknowledge_up_to: float = float("inf")
        self.cut_after: float = float("inf")
        self.refusal = ""
        self.redirect = ""
        self.before_opening: Callable[[], object] = lambda: None
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.slab: FakeSlab | None = None
        self.doorbells = 0
        self.cut_now = False
        self.cut_at_offset: float = float("inf")
        self._missing = 0
        self.warnings: list[str] = []
        self.changes_plans = True
        self.keeps_steps = self.keeps_step_tensors = False
        self.beside: list[str] = []
        """Messages beside the frames."""

    def OpenSession(self, request, context):  # noqa: N802 - gRPC's name
        self.opened.append(request)
        self.before_opening()
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        if self.redirect:
            return agent_pb2.OpenSessionResponse(redirect=self.redirect)
        slab = self.slab.place if self.slab and request.wants_slab else None
        return agent_pb2.OpenSessionResponse(
            token=b"t",
            acknowledged_sequence=self.committed,
            slab=slab,
            changes_plans=self.changes_plans,
            keeps_steps=self.keeps_steps,
            keeps_step_tensors=self.keeps_step_tensors,
        )

    def Status(self, request, context):  # noqa: N802 - gRPC's name
        raise NotImplementedError

    def AnswerOrder(self, request, context):  # noqa: N802 - gRPC's name
        raise NotImplementedError

    def Control(self, request, context):  # noqa: N802 - gRPC's name
        raise NotImplementedError

    def Push(self, request_iterator, context):  # noqa: N802 - gRPC's name
        for request in request_iterator:
            if request.WhichOneof("body") == "hello":
                assert request.hello.token == b"t"
                continue
            body = request.WhichOneof("body")
            if body in ("step_states", "step_tensors", "fault"):
                self.beside.append(body)
                continue
            if self.cut_now:
                self.cut_now = False
                self.frames.clear()  # a test looks at what follows
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if request.WhichOneof("body") == "doorbell":
                self.doorbells += 1
                assert self.slab is not None
                frames = self.slab.take()
                # What was read of a slab does not come again.
                self.frames += frames
            else:
                frames = request.batch.frames
            for frame in frames:
                if not request.HasField("doorbell"):
                    self.frames.append(frame)
                if frame.chunk.offset >= self.cut_at_offset:
                    self.cut_at_offset = float("inf")
                    self.frames.clear()
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if frame.sequence > self.cut_after:
                    self.cut_after = float("inf")
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if self._complete(frame) and frame.sequence <= self.acknowledge_up_to:
                    self.committed = max(self.committed, frame.sequence)
                self.examined = frame.sequence
            if self.slab:
                self.slab.release(self.committed)
            yield agent_pb2.PushResponse(
                acknowledged_sequence=self.committed, warnings=self.warnings
            )

    def _complete(self, frame: agent_pb2.Frame) -> bool:
        """Whether nothing of the frame's item follows."""
        if frame.WhichOneof("body") == "record":
            expected = kind_from_wire(frame.record.kind).byte_count
            torn = self.slab is not None and frame.sequence in self.slab.torn
            self._missing = 0 if torn else expected - len(frame.record.data)
        elif frame.WhichOneof("body") == "chunk":
            self._missing -= len(frame.chunk.data)
        return not self._missing


class FakeSlab:
    """A slab on the agent's side; `take` returns entries as frames of the stream."""

    def __init__(self, path: Path, ring_bytes: int) -> None:
        self.path = path
        length = compute_slab_bytes(ring_bytes)
        with path.open("wb") as file:
            file.truncate(length)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), length)
        memory = memoryview(self._map)
        format_slab(memory)
        self.place = agent_pb2.Slab(path=str(path), length=length)
        self._memory = memory
        self.begin_anew()
        self.torn: list[int] = []

    def begin_anew(self) -> None:
        """Read again from what was released, as an agent that restarted does."""
        self.reader = SlabReader(SlabMemory(self._memory))
        self._ends: list[tuple[int, int]] = []

    def take(self) -> list[agent_pb2.Frame]:
        frames = []
        for entry in self.reader.read_entries():
            frame = agent_pb2.Frame.FromString(bytes(entry.frame))
            if not entry.has_data:
                self.torn.append(frame.sequence)
            elif frame.WhichOneof("body") == "chunk":
                frame.chunk.data = bytes(self.reader.read_data(entry))
            elif frame.WhichOneof("body") == "record":
                frame.record.data = bytes(self.reader.read_data(entry))
            # A piece of a record is copied out at once, so its room is free.
            cut = frame.WhichOneof("body") == "chunk" or (
                frame.WhichOneof("body") == "record"
                and len(frame.record.data) < kind_from_wire(frame.record.kind).byte_count
            )
            self._ends.append((0 if cut else frame.sequence, entry.end_position))
            frames.append(frame)
        return frames

    def release(self, committed: int) -> None:
        end = 0
        while self._ends and self._ends[0][0] <= committed:
            end = self._ends.pop(0)[1]
        if end:
            self.reader.release(end)

    def locked(self) -> bool:
        """Whether another process holds the file; asked from a child, for locks are by process."""
        code = (
            "import fcntl, sys\n"
            "with open(sys.argv[1], 'r+b') as file:\n"
            "    try:\n"
            "        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "    except OSError:\n"
            "        sys.exit(7)\n"
        )
        return subprocess.run([sys.executable, "-c", code, str(self.path)]).returncode == 7


class RunningFakeAgent:
    """A fake agent that answers on an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.agent = FakeAgent()
        self._server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="fake-agent"))
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.agent, self._server)
        self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()


def bodies(running: RunningFakeAgent, kind: str) -> list:
    """What of one kind arrived, in its order; of a record, with all that its kind says."""
    frames = running.agent.frames
    found = [getattr(f, kind) for f in frames if f.WhichOneof("body") == kind]
    return [sent(record) for record in found] if kind == "record" else found


def sent(record: agent_pb2.Record) -> SimpleNamespace:
    """A record as it arrived."""
    head = record_from_wire(record, rank=0, net_name="Net")
    return SimpleNamespace(
        **kind_from_wire(record.kind)._asdict(),
        iteration=head.iteration,
        timestamp_us=head.timestamp_us,
        switched_on=head.switched_on,
        data=record.data,
    )


def rows(running: RunningFakeAgent) -> list[SimpleNamespace]:
    """All rows of statistics that arrived, in their order, each with what its frame says."""
    found = []
    for message in bodies(running, "figure_rows"):
        frame = statistic_rows_from_wire(message)
        columns = zip(frame.kinds, frame.timestamps_us, frame.statistics, strict=True)
        found += [
            SimpleNamespace(
                **kind._asdict(),
                timestamp_us=stamp,
                figures=tuple(figures.split(",")),
                iteration=frame.iteration,
                switched_on=frame.switched_on,
                degraded=frame.degraded,
            )
            for kind, stamp, figures in columns
        ]
    return found


def kinds(running: RunningFakeAgent) -> list[str | None]:
    """The kinds of all frames, in their order."""
    return [frame.WhichOneof("body") for frame in running.agent.frames]


def event_names(running: RunningFakeAgent) -> list[str]:
    """The names of all events."""
    batches = map(events_from_wire, bodies(running, "events"))
    return [event.name for batch in batches for event in list_events(batch)]


def plan(tmp_path: Path, **delivery) -> DumpPlan:
    from rankdump._core.plan import DeliverySettings

    return DumpPlan(output=OutputSettings(str(tmp_path)), delivery=DeliverySettings(**delivery))


def introduction_of(a_plan: DumpPlan) -> SessionRequest:
    return SessionRequest(
        job_id="job",
        session_id="s" * 32,
        rank=0,
        world_size=1,
        device=0,
        host="h",
        pid=1,
        framework="numpy",
        device_target="CPU",
        plan_json=plan_to_json(a_plan),
        config_source=b"{}",
    )

"""An agent's double: a real gRPC server whose answers a test decides."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from rankdump.contract.exchange import SessionRequest
from rankdump.contract.plan import DumpPlan, Output
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc


class FakeAgent(agent_pb2_grpc.AgentServiceServicer):
    """Keeps every frame, and acknowledges up to `acknowledge_up_to`."""

    def __init__(self) -> None:
        self.opened: list[agent_pb2.OpenSessionRequest] = []
        self.frames: list[agent_pb2.Frame] = []
        self.committed = 0
        self.acknowledge_up_to: float = float("inf")
        self.cut_after: float = float("inf")
        self.refusal = ""
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def OpenSession(self, request, context):  # noqa: N802 - gRPC's name
        self.opened.append(request)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return agent_pb2.OpenSessionResponse(token=b"t", acknowledged_sequence=self.committed)

    def Status(self, request, context):  # noqa: N802 - gRPC's name
        raise NotImplementedError

    def Control(self, request, context):  # noqa: N802 - gRPC's name
        raise NotImplementedError

    def Push(self, request_iterator, context):  # noqa: N802 - gRPC's name
        for request in request_iterator:
            if request.WhichOneof("body") == "hello":
                assert request.hello.token == b"t"
                continue
            for frame in request.batch.frames:
                self.frames.append(frame)
                if frame.sequence > self.cut_after:
                    self.cut_after = float("inf")
                    context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                if frame.sequence <= self.acknowledge_up_to:
                    self.committed = max(self.committed, frame.sequence)
            yield agent_pb2.PushResponse(acknowledged_sequence=self.committed)


class Running:
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


@pytest.fixture
def address(socket_folder: Path) -> str:
    return f"unix://{socket_folder}/a.sock"


@pytest.fixture
def running(address: str) -> Iterator[Running]:
    server = Running(address)
    yield server
    server.stop()


def bodies(running: Running, kind: str) -> list:
    """What of one kind arrived, in its order."""
    frames = running.agent.frames
    return [getattr(f, kind) for f in frames if f.WhichOneof("body") == kind]


def kinds(running: Running) -> list[str | None]:
    """The kinds of all frames, in their order."""
    return [frame.WhichOneof("body") for frame in running.agent.frames]


def event_names(running: Running) -> list[str]:
    """The names of all events."""
    return [e.names[index] for e in bodies(running, "events") for index in e.name]


def plan(tmp_path: Path, **delivery) -> DumpPlan:
    from rankdump.contract.plan import Delivery

    return DumpPlan(output=Output(str(tmp_path)), delivery=Delivery(**delivery))


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
        plan_json=a_plan.to_json(),
        config_source=b"{}",
    )

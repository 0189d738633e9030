"""Ranks that speak the wire protocol directly, and agents for them: in this process or in
another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankdump._core.black_box import StepTensor
from rankdump._core.plan import (
    BlackBoxSettings,
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    OutputSettings,
    TensorSelection,
    plan_to_json,
)
from rankdump._wire.black_box_messages import step_tensor_to_wire
from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc, control_pb2
from rankdumpd.agent.service import DumpAgent
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.settings import AgentSettings

WAIT_S = 300
"""Longer than anything here takes; only a broken agent waits for it."""


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves space for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


STAMP = 1_700_000_000_000_000
_KIND_FIELDS = agent_pb2.TensorKind.DESCRIPTOR.fields_by_name.keys()


def kind_of(array: np.ndarray, **fields: Any) -> bytes:
    """Return the message with the kind of a tensor, which records and rows contain."""
    defaults: dict[str, Any] = {
        "op_type": "MatMul",
        "op_name": "Default/fc-Dense/MatMul-op0",
        "side": agent_pb2.SIDE_OUTPUT,
        "dtype": array.dtype.name,
        "shape": array.shape,
        "byte_count": array.nbytes,
    }
    return agent_pb2.TensorKind(**{**defaults, **fields}).SerializeToString()


class FrameBuilder:
    """Builder of frames."""

    @staticmethod
    def record(
        sequence: int,
        array: np.ndarray,
        *,
        iteration: int = 0,
        op_name: str = "Default/fc-Dense/MatMul-op0",
        dtype: str = "",
        first_bytes: int | None = None,
        **fields: Any,
    ) -> agent_pb2.Frame:
        """Return one record, with all of its bytes or the first few."""
        data = array.tobytes()
        about = {name: fields.pop(name) for name in _KIND_FIELDS & fields.keys()}
        record = agent_pb2.Record(
            kind=kind_of(array, op_name=op_name, **({"dtype": dtype} if dtype else {}), **about),
            iteration=iteration,
            timestamp_us=fields.pop("timestamp_us", STAMP + sequence),
            data=data if first_bytes is None else data[:first_bytes],
            **fields,
        )
        return agent_pb2.Frame(sequence=sequence, record=record)

    @staticmethod
    def figures(
        sequence: int,
        rows: list[tuple[np.ndarray, str]],
        *,
        iteration: int = 0,
        degraded: str = "",
        switched_on: bool = False,
        stamps: list[int] | None = None,
        **fields: Any,
    ) -> agent_pb2.Frame:
        """Return rows of statistics; the first row has the time of the record with that number."""
        times = stamps or range(STAMP + sequence, STAMP + sequence + len(rows))
        body = agent_pb2.FigureRows(
            iteration=iteration,
            kinds=[kind_of(array, **fields) for array, _ in rows],
            timestamps_us=times,
            figures=[text for _, text in rows],
            degraded=bool(degraded),
            degraded_reason=degraded,
            switched_on=switched_on,
        )
        return agent_pb2.Frame(sequence=sequence, figure_rows=body)

    @staticmethod
    def chunks(sequence: int, array: np.ndarray, start: int, size: int) -> list[agent_pb2.Frame]:
        """Return the rest of a record in chunks."""
        data = array.tobytes()
        return [
            agent_pb2.Frame(
                sequence=sequence,
                chunk=agent_pb2.Chunk(offset=offset, data=data[offset : offset + size]),
            )
            for offset in range(start, len(data), size)
        ]

    @staticmethod
    def end(sequence: int, iteration: int, expected: int, **dropped: int) -> agent_pb2.Frame:
        end = agent_pb2.IterationEnd(iteration=iteration, expected=expected, dropped=dropped)
        return agent_pb2.Frame(sequence=sequence, iteration_end=end)

    @staticmethod
    def goodbye(sequence: int, iterations_seen: int = 1) -> agent_pb2.Frame:
        end = agent_pb2.SessionEnd(iterations_seen=iterations_seen)
        return agent_pb2.Frame(sequence=sequence, session_end=end)


@pytest.fixture
def frames() -> type[FrameBuilder]:
    """The builder of frames."""
    return FrameBuilder


OrderCallback = Callable[[control_pb2.ControlOrder], None]


class PushStreamClient:
    """One Push stream, and the answers that the agent sent on it."""

    def __init__(
        self,
        stub: agent_pb2_grpc.AgentServiceStub,
        hello: agent_pb2.Hello,
        on_order: OrderCallback = lambda order: None,
    ) -> None:
        self._on_order = on_order
        self._requests: queue.SimpleQueue[agent_pb2.PushRequest | None] = queue.SimpleQueue()
        self._requests.put(agent_pb2.PushRequest(hello=hello))
        self._call = stub.Push(iter(self._requests.get, None))
        self._changed = threading.Condition()
        self.acknowledged = 0
        self.draining = self.slab_ready = False
        self.warnings: list[str] = []
        self.notices: list[agent_pb2.FreezeNotice] = []
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def send(self, *frames: agent_pb2.Frame) -> PushStreamClient:
        batch = agent_pb2.FrameBatch(frames=frames)
        self._requests.put(agent_pb2.PushRequest(batch=batch))
        return self

    def ring(self, written: int) -> PushStreamClient:
        """Send a doorbell for what is in the slab."""
        doorbell = agent_pb2.Doorbell(written=written)
        self._requests.put(agent_pb2.PushRequest(doorbell=doorbell))
        return self

    def step(self, state: agent_pb2.StepState) -> PushStreamClient:
        """Send a step of the black box."""
        message = agent_pb2.StepStates(states=[state])
        self._requests.put(agent_pb2.PushRequest(step_states=message))
        return self

    def step_tensors(self, *tensors: StepTensor) -> PushStreamClient:
        """Send tensors of a step in full."""
        pieces = [piece for tensor in tensors for piece in step_tensor_to_wire(tensor)]
        return self.step_pieces(*pieces)

    def step_pieces(self, *pieces: agent_pb2.StepTensor) -> PushStreamClient:
        """Send pieces of tensors of a step."""
        message = agent_pb2.StepTensors(pieces=pieces)
        self._requests.put(agent_pb2.PushRequest(step_tensors=message))
        return self

    def fault(self, notice: agent_pb2.FaultNotice) -> PushStreamClient:
        """Report a fault."""
        self._requests.put(agent_pb2.PushRequest(fault=notice))
        return self

    def wait_frozen(self, count: int = 1) -> None:
        self._wait(lambda: len(self.notices) >= count)

    def wait_acknowledged(self, sequence: int) -> None:
        self._wait(lambda: self.acknowledged >= sequence or self.code is not None)
        assert self.acknowledged >= sequence, (self.acknowledged, self.code, self.details)

    def wait_draining(self) -> None:
        self._wait(lambda: self.draining)

    def wait_slab(self) -> None:
        self._wait(lambda: self.slab_ready)

    def wait_warned(self, count: int = 1) -> None:
        self._wait(lambda: len(self.warnings) >= count)

    def wait_over(self) -> grpc.StatusCode:
        self._wait(lambda: self.code is not None)
        self._requests.put(None)
        self._thread.join()
        assert self.code is not None
        return self.code

    def finish(self) -> grpc.StatusCode:
        """Close the rank's side and wait until the agent closes its own."""
        self._requests.put(None)
        return self.wait_over()

    def cut(self) -> None:
        """End the stream without closing it, as a process does that dies."""
        self._call.cancel()
        self._requests.put(None)
        self._thread.join()

    def _wait(self, holds) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_S), "the agent does not answer"

    def _listen(self) -> None:
        try:
            for answer in self._call:
                with self._changed:
                    self.acknowledged = answer.acknowledged_sequence
                    self.draining = self.draining or answer.draining
                    self.slab_ready = self.slab_ready or answer.slab_ready
                    self.warnings += answer.warnings
                    if answer.HasField("freeze"):
                        self.notices.append(answer.freeze)
                    self._changed.notify_all()
                for order in answer.orders:
                    self._on_order(order)
            code, details = grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        with self._changed:
            self.code, self.details = code, details
            self._changed.notify_all()


@dataclass
class WireRank:
    """A simulated training process on the wire."""

    address: str
    root: Path
    rank: int = 0
    device: int | None = None
    """The number of the rank where it is None."""
    world_size: int = 1
    session_id: str = "session0000"
    job_id: str = "job"
    pid: int = 4711
    host: str = "here"
    codec: str = "zstd"
    selection: TensorSelection = field(default_factory=TensorSelection)
    content: ContentSettings = field(default_factory=ContentSettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)
    black_box: BlackBoxSettings = field(default_factory=BlackBoxSettings)
    profile: str = "ms2.3"
    device_target: str = "CPU"
    root_text: str = ""
    output: dict[str, Any] = field(default_factory=dict)
    """More of the plan's output."""
    config_source: bytes = b'{"common_dump_settings": {}}'
    channel: grpc.Channel = field(init=False)
    stub: agent_pb2_grpc.AgentServiceStub = field(init=False)
    token: bytes = b""
    wants_slab: bool = False
    secret: bytes = b""

    def __post_init__(self) -> None:
        self.channel = grpc.insecure_channel(self.address)
        self.stub = agent_pb2_grpc.AgentServiceStub(self.channel)

    def leave(self, *frames: agent_pb2.Frame) -> agent_pb2.OpenSessionResponse:
        """Tell the agent that this rank no longer waits for its session."""
        return self.open(left=agent_pb2.FrameBatch(frames=frames))

    def open(self, **more: Any) -> agent_pb2.OpenSessionResponse:
        root = self.root_text or str(self.root)
        output = OutputSettings(root=root, codec=self.codec, profile=self.profile, **self.output)
        plan = DumpPlan(output, self.selection, self.content, self.delivery, self.black_box)
        response = self.stub.OpenSession(
            agent_pb2.OpenSessionRequest(
                job_id=self.job_id,
                session_id=self.session_id,
                rank=self.rank,
                world_size=self.world_size,
                device=self.rank if self.device is None else self.device,
                host=self.host,
                pid=self.pid,
                framework="none 0",
                device_target=self.device_target,
                plan_json=plan_to_json(plan),
                config_source=self.config_source,
                wants_slab=self.wants_slab,
                secret=self.secret,
                **more,
            ),
            wait_for_ready=True,
            timeout=WAIT_S,
        )
        self.token = response.token
        return response

    def push(
        self,
        token: bytes | None = None,
        on_order: OrderCallback = lambda order: None,
    ) -> PushStreamClient:
        token = self.token if token is None else token
        hello = agent_pb2.Hello(session_id=self.session_id, token=token)
        return PushStreamClient(self.stub, hello, on_order)

    def status(self):
        return self.stub.Status(agent_pb2.AgentStatusRequest()).view

    def freeze(self, text: str = "", job_id: str = "") -> agent_pb2.ControlResponse:
        """Have people ask for a freeze."""
        freeze = agent_pb2.Freeze(job_id=job_id, text=text)
        return self.stub.Control(agent_pb2.ControlRequest(freeze=freeze), timeout=WAIT_S)

    def drain(self, timeout_ms: int = WAIT_S * 1000) -> agent_pb2.ControlResponse:
        return self.stub.Control(
            agent_pb2.ControlRequest(drain=agent_pb2.Drain(timeout_ms=timeout_ms))
        )

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def make_rank(short_dir: Path) -> Iterator:
    """Makes ranks whose channels are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(address: str, **fields) -> WireRank:
            rank = WireRank(address, fields.pop("root", short_dir / "dump"), **fields)
            stack.callback(rank.close)
            return rank

        yield make


class EmbeddedAgent:
    """An agent in this process; may be stopped and started again on the same state."""

    def __init__(self, folder: Path, **settings) -> None:
        self._settings = AgentSettings(
            listen=f"unix:{folder}/a.sock", state_dir=str(folder / "state"), **settings
        )
        self.start()

    def start(self) -> None:
        self.counters = MetricCounters()
        self.agent = DumpAgent(self._settings, counters=self.counters)
        self.server = GrpcServer(self._settings.listen, (self.agent,))
        self.agent.start()
        self.address = self.server.start()

    def stop(self) -> None:
        self.server.stop(0)
        self.agent.stop()

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture
def make_agent(short_dir: Path) -> Iterator:
    """Makes agents that are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**settings) -> EmbeddedAgent:
            # Tests do not depend on how full the disk of this machine is.
            usual = {"encode_threads": 2, "keep_free_ratio": 0.0, "keep_free_inodes_ratio": 0.0}
            usual |= {"table": False, "slab_bytes": 16 << 20}
            folder = settings.pop("folder", short_dir)
            folder.mkdir(exist_ok=True)
            embedded = EmbeddedAgent(folder, **(usual | settings))
            stack.callback(embedded.stop)
            return embedded

        yield make


class StandaloneProcess:
    """`rankdumpd standalone` as a process of its own."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/d.sock"
        self.log_path = folder / "daemon.log"
        self._environ = {**os.environ, **environ}
        self.start()

    def start(self) -> None:
        self.launch()
        self.wait_serving()

    def launch(self) -> None:
        """Start it, and wait for nothing: it may be killed at once."""
        command = [sys.executable, "-m", "rankdumpd", "standalone"]
        command += ["--socket", f"{self.folder}/d.sock", "--state-dir", f"{self.folder}/state"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environ, cwd=self.folder
            )

    def wait_serving(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            # Its stub file knows the class but not the calls.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answer = stub.Check(request, wait_for_ready=True, timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, self.log()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def exit_status(self) -> int:
        return self.process.wait(WAIT_S)

    def log(self) -> str:
        return self.log_path.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()


@pytest.fixture
def make_daemon(short_dir: Path) -> Iterator:
    """Makes daemons that are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**environ: str) -> StandaloneProcess:
            daemon = StandaloneProcess(short_dir, **environ)
            stack.callback(daemon.close)
            return daemon

        yield make

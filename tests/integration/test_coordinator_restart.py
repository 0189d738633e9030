"""`rankdumpd coordinator` as a process that is killed in the middle of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.reporting_agent import PATIENCE_S, ReportedJob, ReportingAgent

from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._core.status import SessionState, StatusView
from rankdump._wire.status_messages import entry_from_wire, view_from_wire
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub

pytestmark = pytest.mark.slow

AGENTS = 4
RANKS = 2
"""Of each agent."""
WORLD = AGENTS * RANKS
ITERATIONS = 12


class CoordinatorProcess:
    """A coordinator process that can be killed and started again on the same state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"unix:{folder}/c.sock"
        self._log = folder / "log"
        self._environ = {
            **os.environ,
            "RANKDUMPD_COORDINATOR__LISTEN": self.address,
            "RANKDUMPD_COORDINATOR__STATE_DIR": str(folder / "state"),
            "RANKDUMPD_COORDINATOR__DEADLINE_S": "3600",
        }
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rankdumpd", "coordinator"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environ, stderr=log)
        self._channel = grpc.insecure_channel(
            self.address, [("grpc.initial_reconnect_backoff_ms", 50)]
        )
        grpc.channel_ready_future(self._channel).result(PATIENCE_S)
        self.stub = CoordinatorServiceStub(self._channel)

    def end(self, number: int = signal.SIGKILL) -> int:
        self._process.send_signal(number)
        self._channel.close()
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.end(signal.SIGTERM)

    def status(self, job_id: str = "") -> StatusView:
        request = pb.CoordinatorStatusRequest(job_id=job_id)
        return view_from_wire(self.stub.Status(request, timeout=PATIENCE_S).view)


@pytest.fixture
def process(socket_folder: Path) -> Iterator[Callable[[str], CoordinatorProcess]]:
    with contextlib.ExitStack() as stack:

        def make(name: str) -> CoordinatorProcess:
            made = CoordinatorProcess(socket_folder / name)
            stack.callback(made.close)
            return made

        yield make


def wait_until(true: Callable[[], object]) -> None:
    while not true():
        threading.Event().wait(0.02)


def run(
    process: CoordinatorProcess, job: ReportedJob, kills: dict[tuple[int, int], int]
) -> list[ReportingAgent]:
    """Run a job; after the report of (iteration, agent), kill the coordinator as often as given."""
    agents = [ReportingAgent(f"agent{number}", f"host{number}") for number in range(AGENTS)]
    for agent in agents:
        agent.connect(process.stub)
    for number, agent in enumerate(agents):
        for rank in range(number * RANKS, (number + 1) * RANKS):
            agent.session(job.session(rank, host=agent.host), job.root)
    for iteration in range(ITERATIONS):
        for number, agent in enumerate(agents):
            for rank in range(number * RANKS, (number + 1) * RANKS):
                agent.iteration(job, rank, iteration)
            agent.send()
            for _ in range(kills.get((iteration, number), 0)):
                process.end()
                process.start()
                # The last one first: what was complete before must not look complete now.
                for each in reversed(agents):
                    each.connect(process.stub)
    for number, agent in enumerate(agents):
        for rank in range(number * RANKS, (number + 1) * RANKS):
            agent.session(job.session(rank, SessionState.CLOSED, host=agent.host))
        agent.send()
    for agent in agents:
        wait_until(agent.acknowledged)
    return agents


def files(root: str) -> dict[str, bytes]:
    folder = Path(root) / GLOBAL_ORDER_FOLDER
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def order(process: CoordinatorProcess, job_id: str) -> list[tuple[int, int]]:
    pages = process.stub.Order(pb.OrderRequest(job_id=job_id), timeout=PATIENCE_S)
    entries = (entry_from_wire(entry) for page in pages for entry in page.entries)
    return [(entry.position, entry.iteration) for entry in entries]


def test_repeatedly_killed_coordinator_publishes_the_same_order(process, tmp_path) -> None:
    """It is killed with part of an iteration received, after a complete one, and twice in a row."""
    calm = ReportedJob("job", str(tmp_path / "calm"), WORLD)
    run(process("calm"), calm, {})
    kills = {(0, 1): 1, (2, AGENTS - 1): 1, (3, 0): 1, (6, 2): 2, (11, AGENTS - 1): 1}
    torn = ReportedJob("job", str(tmp_path / "torn"), WORLD)
    disturbed = process("torn")
    agents = run(disturbed, torn, kills)
    assert files(torn.root) == files(calm.root)
    assert len(order(disturbed, "job")) == ITERATIONS * (WORLD * 6 + 2)

    view = disturbed.status("job")
    assert (view.merges[0].published_iterations, view.merges[0].pending_iterations) == (12, 0)
    assert view.merges[0].published_events == ITERATIONS * WORLD * 8
    assert len(view.iterations) == ITERATIONS * WORLD
    assert view.order_findings == ()
    assert {session.state for session in view.sessions} == {SessionState.CLOSED}
    for agent in agents:
        agent.close()


def test_restart_keeps_status_order_and_numbers(process, tmp_path) -> None:
    """Status, order and numbers are as before, and an ended job can still be read."""
    job = ReportedJob("job", str(tmp_path), WORLD)
    coordinator = process("c")
    agents = run(coordinator, job, {})
    before, entries, written = coordinator.status(), order(coordinator, "job"), files(job.root)
    coordinator.end()
    coordinator.start()
    for agent in agents:
        agent.connect(coordinator.stub)
        assert agent.first_answer.acknowledged_sequence == len(agent.items)
    after = coordinator.status()
    assert after.sessions == before.sessions
    assert after.iterations == before.iterations
    assert after.merges == before.merges
    assert {agent.agent_id for agent in after.agents} == {agent.agent_id for agent in agents}
    assert order(coordinator, "job") == entries
    assert coordinator.end(signal.SIGTERM) == 0
    assert files(job.root) == written


def test_stop_leaves_a_running_iteration_to_the_next_process(process, tmp_path) -> None:
    """SIGTERM within a job publishes no incomplete iteration."""
    job = ReportedJob("job", str(tmp_path), 2)
    coordinator = process("c")
    one, two = ReportingAgent("one"), ReportingAgent("two")
    for rank, agent in enumerate((one, two)):
        agent.connect(coordinator.stub)
        agent.session(job.session(rank), job.root)
        agent.send()
    one.iteration(job, 0, 0)
    one.send()
    assert coordinator.end(signal.SIGTERM) == 0
    assert not (tmp_path / GLOBAL_ORDER_FOLDER).exists()
    coordinator.start()
    two.connect(coordinator.stub)
    two.iteration(job, 1, 0)
    two.send()
    one.connect(coordinator.stub)
    for agent in (one, two):
        wait_until(agent.acknowledged)
    assert len(order(coordinator, "job")) == 2 * 6 + 2
    assert coordinator.status().order_findings == ()


def test_second_coordinator_on_one_state_is_rejected(process, socket_folder) -> None:
    """The second coordinator ends with one line."""
    process("c")
    environ = {
        **os.environ,
        "RANKDUMPD_COORDINATOR__LISTEN": f"unix:{socket_folder}/other.sock",
        "RANKDUMPD_COORDINATOR__STATE_DIR": str(socket_folder / "c" / "state"),
    }
    command = [sys.executable, "-m", "rankdumpd", "coordinator"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "is used by another coordinator" in done.stderr.splitlines()[-1]

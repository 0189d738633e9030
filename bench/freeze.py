"""Time from a fault at one rank until the agents of all hosts have the rings of their ranks in
files.

The coordinator is a process of its own, and so are groups of up to 32 agents. Each agent has its
own state folder, ledger, sessions of eight ranks with rings of steps, its own reporter with a real
report stream, and its own black box with its thread. Simulated are the ranks, whose steps are put
into the rings without a stream; the parts of an agent that no freeze needs are not started. All
of them share the cores of this machine, which a real fleet does not.

`waiting_share` is the part of the time in which the cores had nothing to do: 1 less processor time
of all these processes over time and cores. The order of the coordinator waits for the next
heartbeat of each agent, up to a second: `last_order_s` is when the last agent had it. No tree is
written meanwhile, because agents wait for further steps for three seconds.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from rankdump._core.black_box import PULSE_ROW, StepCause, StepState
from rankdump._core.plan import BlackBoxSettings, DumpPlan, OutputSettings, plan_to_json
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import SessionRequest
from rankdump._wire.black_box_messages import step_state_to_wire
from rankdump._wire.session_messages import kind_to_wire
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.service import DumpAgent
from rankdumpd.settings import AgentSettings

from .host import memory_folder, running_coordinator
from .process import cpu_s
from .result import Result, median

# The parts of an agent that a freeze needs are started one by one, and its files are watched.
# pyright: reportPrivateUsage=false

SCALES = {64: 3, 1024: 3}
"""Freezes that are measured, by ranks; each of a fleet of its own."""
QUICK_SCALES = {64: 1}
RANKS_PER_AGENT = 8
AGENTS_PER_PROCESS = 32
"""More of them in one process, each with threads of gRPC, cost more than they do apart."""
STEPS = 8
"""Of each ring: too few for an agent to judge that its ranks, which make no more, hang."""
TENSORS = 256
"""Of each step."""
_JOB = "bench"
_PATIENCE_S = 300.0
_POLL_S = 0.1
_KINDS = tuple(
    kind_to_wire(
        TensorKind(0, "Linear", f"Default/l{at}", TensorSide.OUTPUT, 0, "float32", (4,), 16)
    )
    for at in range(TENSORS)
)


@dataclass(frozen=True, slots=True)
class FleetFreeze:
    """One freeze of all agents."""

    frozen_s: float
    """From the fault until the last agent has its rings in a file."""
    order_s: float
    """Until the last agent had the order of the coordinator."""
    own_s: float
    """Until the agent of the faulty rank had its rings in a file."""
    waiting_share: float
    setup_s: float


class SimulatedAgent:
    """One agent, of which ledger, reporter and black box run."""

    def __init__(self, folder: Path, coordinator: str, index: int, world_size: int) -> None:
        folder.mkdir()
        settings = AgentSettings(
            listen=f"unix:{folder}/a.sock",
            state_dir=str(folder / "state"),
            runtime_dir=str(folder),
            coordinator=coordinator,
            keep_free_ratio=0.0,
            keep_free_inodes_ratio=0.0,
        )
        self._agent: Any = DumpAgent(settings)
        self.order_s = self.frozen_s = 0.0
        self._watch()
        self._agent._reporter.start()
        self._agent._black_box.start()
        ranks = range(index * RANKS_PER_AGENT, (index + 1) * RANKS_PER_AGENT)
        self._sessions = [self._open(folder, rank, world_size) for rank in ranks]

    def step(self, message: agent_pb2.StepState) -> None:
        """Have all ranks end a step."""
        for session in self._sessions:
            self._agent._black_box.take_step(session, message)

    def fault(self) -> None:
        """Have the first rank find a value that is not finite in the last step."""
        notice = agent_pb2.FaultNotice(iteration=STEPS - 1, kind="non_finite", text="NaN")
        self._agent._black_box.take_fault(self._sessions[0], notice)

    def close(self) -> None:
        """Stop without writing the tree."""
        self._agent._reporter.stop()
        self._agent._black_box.stop(_PATIENCE_S)
        self._agent._registry.close()
        self._agent._ledger.close()

    def _open(self, folder: Path, rank: int, world_size: int) -> Any:
        plan = DumpPlan(
            OutputSettings(str(folder / "tree")), black_box=BlackBoxSettings(STEPS, post_steps=64)
        )
        request = SessionRequest(
            *(_JOB, f"s{rank}", rank, world_size, rank % RANKS_PER_AGENT, folder.name),
            *(os.getpid(), "torch 2.13.0", "CPU"),
            plan_json=plan_to_json(plan),
            config_source=b"{}",
        )
        self._agent._registry.open(request)
        session = self._agent._registry.get(request.session_id)
        self._agent._notifier.report_session(session)
        return session

    def _watch(self) -> None:
        """Note when the order arrives, and when the first raw file is complete."""
        box = self._agent._black_box
        write, join = box._raw.write, box.recent.note_relayed

        def write_noted(*arguments: Any) -> Path:
            path = write(*arguments)
            self.frozen_s = self.frozen_s or time.perf_counter()
            return path

        def join_noted(relayed: Any) -> Any:
            self.order_s = self.order_s or time.perf_counter()
            return join(relayed)

        box._raw.write, box.recent.note_relayed = write_noted, join_noted


class AgentProcess:
    """A process with some agents, which answers each line of its input with one."""

    def __init__(self, folder: Path, address: str, agents: range, world_size: int) -> None:
        command = [sys.executable, "-m", "bench.freeze", str(folder), address]
        command += map(str, (agents.start, agents.stop, world_size))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def ask(self, line: str = "") -> list[float]:
        """Send a line, if there is one; return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a process of agents has ended")
        return json.loads(answer)

    def close(self) -> None:
        """Stop the agents."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(*, quick: bool = False) -> Result:
    """Freeze fleets of each size; of several freezes the medians count."""
    figures: dict[str, float] = {"cores": os.cpu_count() or 1}
    ratios: dict[str, float] = {}
    scales = QUICK_SCALES if quick else SCALES
    for ranks, count in scales.items():
        found = [_freeze_fleet(ranks) for _ in range(count)]
        end = f"_{ranks}_ranks"
        figures |= {
            f"all_frozen_s{end}": median(each.frozen_s for each in found),
            f"all_frozen_s_worst{end}": max(each.frozen_s for each in found),
            f"last_order_s{end}": median(each.order_s for each in found),
            f"own_frozen_s{end}": median(each.own_s for each in found),
            f"setup_s{end}": median(each.setup_s for each in found),
        }
        # The last one is that of the largest fleet.
        ratios["waiting_share"] = median(each.waiting_share for each in found)
    return Result(figures=figures, ratios=ratios)


def _freeze_fleet(ranks: int) -> FleetFreeze:
    with memory_folder() as folder, running_coordinator(folder) as (address, pid):
        begun_s = time.perf_counter()
        with _running_agents(folder, address, ranks) as processes:
            _wait_known(address, ranks)
            setup_s = time.perf_counter() - begun_s
            pids = (pid, *(process.pid for process in processes))
            busy_s = sum(map(cpu_s, pids))
            (fault_s,) = processes[0].ask("fault")
            times = [process.ask("times") for process in processes]
            frozen_s = max(each[0] for each in times) - fault_s
            busy_s = sum(map(cpu_s, pids)) - busy_s
            return FleetFreeze(
                frozen_s,
                max(each[1] for each in times) - fault_s,
                times[0][2] - fault_s,
                max(0.0, 1 - busy_s / (frozen_s * (os.cpu_count() or 1))),
                setup_s,
            )


@contextmanager
def _running_agents(
    folder: Path, address: str, ranks: int
) -> Generator[list[AgentProcess], None, None]:
    count = ranks // RANKS_PER_AGENT
    processes: list[AgentProcess] = []
    try:
        for first in range(0, count, AGENTS_PER_PROCESS):
            agents = range(first, min(first + AGENTS_PER_PROCESS, count))
            process = AgentProcess(folder, address, agents, ranks)
            processes.append(process)
        for process in processes:
            process.ask()
        yield processes
    finally:
        for process in processes:
            process.close()


def _make_step(iteration: int) -> agent_pb2.StepState:
    rows = np.zeros(TENSORS, PULSE_ROW)
    rows["kind"] = range(TENSORS)
    cause = StepCause({"loss": 0.5, "learning_rate.0": 0.01})
    return step_state_to_wire(StepState(iteration, 1, 2, rows.tobytes(), cause), _KINDS, 0)


def _wait_known(address: str, ranks: int) -> None:
    """Return when the coordinator knows all ranks."""
    with grpc.insecure_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            view = stub.Status(coordinator_pb2.CoordinatorStatusRequest()).view
            if len(view.sessions) == ranks:
                return
            time.sleep(1.0)
    raise RuntimeError(f"the coordinator does not know {ranks} ranks after {_PATIENCE_S} s")


def _wait_frozen(agents: list[SimulatedAgent]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not all(agent.frozen_s for agent in agents):
        if time.monotonic() > deadline:
            left = sum(not agent.frozen_s for agent in agents)
            raise RuntimeError(f"{left} agents have not frozen their ranks after {_PATIENCE_S} s")
        time.sleep(_POLL_S)


def main() -> None:
    """Run some agents: answer that they are ready, then each line, until the input ends."""
    folder, address, *numbers = sys.argv[1:]
    first, last, world_size = map(int, numbers)
    # Each agent logs its freeze.
    logging.getLogger("rankdumpd").setLevel(logging.ERROR)
    agents = [
        SimulatedAgent(Path(folder) / f"host{index}", address, index, world_size)
        for index in range(first, last)
    ]
    for iteration in range(STEPS):
        message = _make_step(iteration)
        for agent in agents:
            agent.step(message)
    print("[]", flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(line.strip(), agents)), flush=True)
    for agent in agents:
        agent.close()


def _answer(line: str, agents: list[SimulatedAgent]) -> list[float]:
    """Return when the fault was; or when all had frozen, when all had the order, and the first."""
    if line == "fault":
        fault_s = time.perf_counter()
        agents[0].fault()
        return [fault_s]
    _wait_frozen(agents)
    frozen = [agent.frozen_s for agent in agents]
    return [max(frozen), max(agent.order_s for agent in agents), frozen[0]]


if __name__ == "__main__":
    main()

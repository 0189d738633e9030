"""Events a second from simulated agents into the published order, and memory of the coordinator.

The coordinator is a process of its own; agents send over real streams, all at once, one iteration
after the other as a job would. The first iteration warms up: the clock runs from the second one's
first report until the last line is in the file. A sort of the same columns is measured in the same
run.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

import grpc
import numpy as np

from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

from .fleet import EVENTS, JOB, RANKS_PER_AGENT, Agent, Program
from .host import memory_folder, running_coordinator
from .process import cpu_s, memory_mb
from .result import Result

SCALES = {8: 40, 64: 8, 256: 4, 1024: 3}
"""Iterations, by ranks: enough to separate their cost from that of the start."""
LARGEST = max(SCALES)
_POLL_S = 0.5
"""A status of a thousand ranks loads the coordinator, so it is requested rarely."""
_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """One job of one size."""

    events: int
    wall_s: float
    cpu_s: float
    """Processor time of the coordinator."""
    peak_mb: float
    first_peak_mb: float
    """Peak after the first iteration."""


def measure() -> Result:
    """Run a job of each size against a coordinator of its own."""
    runs = {ranks: _run(ranks, iterations) for ranks, iterations in SCALES.items()}
    tabled = _run(LARGEST, SCALES[LARGEST], tables=True) if find_spec("pyarrow") else None
    largest = runs[LARGEST]
    per_event = {ranks: run.cpu_s / run.events for ranks, run in runs.items()}
    figures = {
        "events_per_s": largest.events / largest.wall_s,
        "peak_mb": largest.peak_mb,
        "peak_growth_mb": largest.peak_mb - largest.first_peak_mb,
        "lexsort_events_per_s": _lexsort_events_per_s(LARGEST),
        "agents": LARGEST // RANKS_PER_AGENT,
    }
    figures |= {f"events_per_s_{n}_ranks": run.events / run.wall_s for n, run in runs.items()}
    figures |= {f"cpu_ns_per_event_{n}_ranks": cost * 1e9 for n, cost in per_event.items()}
    if tabled is not None:
        figures["events_per_s_with_tables"] = tabled.events / tabled.wall_s
    ratios = {
        "speed_vs_lexsort": figures["events_per_s"] / figures["lexsort_events_per_s"],
        "cost_per_event_1024_vs_8": per_event[LARGEST] / per_event[min(SCALES)],
    }
    return Result(figures=figures, ratios=ratios)


def _run(ranks: int, iterations: int, *, tables: bool = False) -> Run:
    with memory_folder() as folder, running_coordinator(folder, tables=tables) as (address, pid):
        program = Program(ranks)
        with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(4) as pool:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            agents = [
                Agent(address, index, program, str(folder / "tree"))
                for index in range(-(-ranks // RANKS_PER_AGENT))
            ]
            for agent in agents:
                agent.wait_received()
            _say(pool, agents, 0)
            _wait_published(stub, 1)
            first_peak_mb = memory_mb(pid, "VmHWM")
            before_s, begun = cpu_s(pid), time.perf_counter()
            for iteration in range(1, iterations + 1):
                _say(pool, agents, iteration)
            _wait_published(stub, iterations + 1)
            wall_s, used_s = time.perf_counter() - begun, cpu_s(pid) - before_s
            for agent in agents:
                agent.close()
        return Run(
            events=ranks * EVENTS * iterations,
            wall_s=wall_s,
            cpu_s=used_s,
            peak_mb=memory_mb(pid, "VmHWM"),
            first_peak_mb=first_peak_mb,
        )


def _say(pool: ThreadPoolExecutor, agents: list[Agent], iteration: int) -> None:
    """Report an iteration from all agents at once; return when the coordinator has received it."""
    for said in [pool.submit(agent.say, iteration) for agent in agents]:
        said.result()
    for agent in agents:
        agent.wait_received()


def _wait_published(stub: coordinator_pb2_grpc.CoordinatorServiceStub, iterations: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        view = stub.Status(coordinator_pb2.CoordinatorStatusRequest(job_id=JOB)).view
        if view.order_findings:
            raise RuntimeError(f"a clean job has findings: {view.order_findings[0].text}")
        if view.merges and view.merges[0].published_iterations >= iterations:
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"{iterations} iterations are not published after {_PATIENCE_S} s")


def _lexsort_events_per_s(ranks: int) -> float:
    """Return how fast the columns of one iteration are sorted by time, then rank and position."""
    program = Program(ranks)
    parts = [program.columns(rank, 0, groups_at=0, calls_at=0).columns for rank in range(ranks)]
    start_us = np.concatenate([part["start_us"] for part in parts])
    position = np.concatenate([part["position"] for part in parts])
    rank = np.repeat(np.arange(ranks), EVENTS)
    begun = time.perf_counter()
    np.lexsort((position, rank, start_us))
    return len(rank) / (time.perf_counter() - begun)

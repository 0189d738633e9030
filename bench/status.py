"""Duration of a status call while ranks load the agent fully, and when it is idle."""

from __future__ import annotations

import time

import grpc

from rankdump.wire.v1 import agent_pb2, agent_pb2_grpc

from .host import Host, running_host
from .load import loaded
from .result import Result, median, quantile
from .timing import seconds

RANKS = 2
CALLS = 300
PAUSE_S = 0.02
WARMUP_S = 3.0
"""Time after which the ranks have filled their buffers."""
TIMEOUT_S = 60.0


def measure() -> Result:
    """Measure calls of one client, one after the other, first idle and then loaded."""
    with running_host() as host, grpc.insecure_channel(host.agent) as channel:
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        idle_s, _ = _calls(stub)
        with loaded(host, RANKS):
            time.sleep(WARMUP_S)
            before = _accounted(host)
            begun = time.perf_counter()
            busy_s, queued = _calls(stub)
            records = (_accounted(host) - before) / (time.perf_counter() - begun)
    return Result(
        figures={
            "p50_ms": quantile(busy_s, 0.5) * 1e3,
            "p99_ms": quantile(busy_s, 0.99) * 1e3,
            "idle_p50_ms": quantile(idle_s, 0.5) * 1e3,
            "idle_p99_ms": quantile(idle_s, 0.99) * 1e3,
            "calls": CALLS,
            "ranks": RANKS,
            "records_per_s": records,
            "queued_records": median(queued),
        },
        ratios={"p99_vs_idle": quantile(busy_s, 0.99) / quantile(idle_s, 0.99)},
    )


def _calls(stub: agent_pb2_grpc.AgentServiceStub) -> tuple[list[float], list[int]]:
    """Return the seconds of each call, and the records that were queued then."""
    taken_s: list[float] = []
    queued: list[int] = []

    def call() -> None:
        response = stub.Status(agent_pb2.AgentStatusRequest(), timeout=TIMEOUT_S)
        queued.append(response.view.load.queued_records)

    call()  # connects
    queued.clear()
    for _ in range(CALLS):
        taken_s.append(seconds(call))
        time.sleep(PAUSE_S)
    return taken_s, queued


def _accounted(host: Host) -> int:
    """Return the number of tensors that the agent has processed."""
    return sum(each.accounted_tensors for each in host.status().iterations)

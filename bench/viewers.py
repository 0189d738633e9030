"""Delay of a coordinator's calls while 50 people read pages beside it.

Each viewer asks for a page, reads it and waits two seconds, over a connection of its own. The calls
are those of an agent's clock, each 5 ms after the answer to the last one. The tree changes twice a
second, as that of a job that runs, so pages are made anew. `p95_vs_alone` is the ratio of the
calls' p95 with viewers to that without any; `inside_vs_alone` is the same where the coordinator's
own process makes the pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump._web.dump_source import SourceList
from rankdump._web.web_server import run_pages
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.server.grpc_server import GrpcServer
from rankdumpd.server.lifecycle import relax_garbage_collector
from rankdumpd.server.metrics_page import MetricsEndpoint, ProcessMetrics
from rankdumpd.server.page_process import PageProcess
from rankdumpd.settings import CoordinatorSettings, TlsSettings

from .host import memory_folder
from .result import Result, median, quantile
from .table import write_bench_tree
from .timing import seconds

VIEWERS, THINK_S = 50, 2.0
ROUNDS, SPAN_S, WARMUP_S = 3, 6.0, 3.0
ITERATIONS = 20
CHANGE_S = 0.5
_PAUSE_S = 0.005
_TIMEOUT_S = 60.0
_PATHS = (
    *("/", "/overview.json", "/tensors", "/tensors?rank=1", "/tensors?search=op7"),
    *("/ranks?search=op7", "/modules?iteration=3", "/modules"),
)


def measure() -> Result:
    """Measure both ways in turns, alone and with viewers."""
    alone_s: list[float] = []
    busy_s: dict[str, list[float]] = {"process": [], "inside": []}
    pages: list[float] = []
    with memory_folder() as folder:
        root = folder / "tree"
        write_bench_tree(root, ITERATIONS)
        index = [sys.executable, "-m", "rankdump", "index", str(root)]
        subprocess.run(index, check=True, capture_output=True)
        for number in range(ROUNDS):
            for way in busy_s:
                own = folder / f"{way}{number}"
                own.mkdir()
                with _running(way, own, root) as (address, stub):
                    _view(address, 4, WARMUP_S).join()
                    alone_s += _call(stub)
                    with _viewing(address) as taken_s, _changing(root):
                        busy_s[way] += _call(stub)
                    pages += taken_s if way == "process" else []
    alone_p95 = quantile(alone_s, 0.95)
    busy_p95 = {way: quantile(taken_s, 0.95) for way, taken_s in busy_s.items()}
    return Result(
        figures={
            "alone_p95_ms": alone_p95 * 1e3,
            "viewers_p95_ms": busy_p95["process"] * 1e3,
            "viewers_p99_ms": quantile(busy_s["process"], 0.99) * 1e3,
            "inside_p95_ms": busy_p95["inside"] * 1e3,
            "inside_p99_ms": quantile(busy_s["inside"], 0.99) * 1e3,
            "pages_per_s": len(pages) / (ROUNDS * (SPAN_S + WARMUP_S)),
            "page_p50_ms": median(pages) * 1e3,
        },
        ratios={
            "p95_vs_alone": busy_p95["process"] / alone_p95,
            "inside_vs_alone": busy_p95["inside"] / alone_p95,
        },
    )


def _call(stub: CoordinatorServiceStub) -> list[float]:
    """Return the seconds of the calls in a span of time."""
    taken_s: list[float] = []
    end_s = time.monotonic() + SPAN_S
    while time.monotonic() < end_s:
        taken_s.append(seconds(lambda: stub.Clock(pb.ClockRequest(), timeout=_TIMEOUT_S)))
        time.sleep(_PAUSE_S)
    return taken_s


@contextlib.contextmanager
def _running(
    way: str, folder: Path, root: Path
) -> Generator[tuple[str, CoordinatorServiceStub], None, None]:
    """Run a coordinator with pages in a process of its own; yield its addresses."""
    command = [sys.executable, "-m", "bench.viewers", "serve", way, str(folder), str(root)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout
        address = server.stdout.readline().strip()
        with grpc.insecure_channel(f"unix:{folder}/c.sock") as channel:
            yield address, CoordinatorServiceStub(channel)
        assert server.stdin
        server.stdin.close()


@contextlib.contextmanager
def _changing(root: Path) -> Generator[None, None, None]:
    """Change the time of a folder of manifests during the block, as another iteration would."""
    over = threading.Event()

    def change() -> None:
        while not over.wait(CHANGE_S):
            os.utime(root / "rank_0" / MANIFEST_FOLDER)

    changing = threading.Thread(target=change)
    changing.start()
    yield
    over.set()
    changing.join()


@contextlib.contextmanager
def _viewing(address: str) -> Generator[list[float], None, None]:
    """Let viewers, in a process of their own, read during the block; yield times of pages."""
    span_s = WARMUP_S + SPAN_S
    command = [sys.executable, "-m", "bench.viewers", "view", address, str(span_s)]
    taken_s: list[float] = []
    with subprocess.Popen(command, stdout=-1, text=True) as viewers:
        time.sleep(WARMUP_S)
        yield taken_s
        assert viewers.stdout
        taken_s += map(float, viewers.stdout.read().split())


def _view(address: str, count: int, span_s: float, taken_s: list[float] | None = None) -> Any:
    """Start viewers for a span of time; return what joins them all."""
    end_s = time.monotonic() + span_s
    taken_s = [] if taken_s is None else taken_s

    def view(number: int) -> None:
        choice = random.Random(number)
        time.sleep(choice.random() * THINK_S)
        while time.monotonic() < end_s:
            taken_s.append(seconds(lambda: _get(address, choice.choice(_PATHS))))
            time.sleep(THINK_S)

    threads = [threading.Thread(target=view, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return SimpleNamespace(join=lambda: [thread.join() for thread in threads])


def _get(address: str, path: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S)) as asking:
        asking.request("GET", path)
        answer = asking.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}")


def _serve(way: str, folder: Path, root: Path) -> None:
    """Run a coordinator in this process until standard input ends."""
    settings = dataclasses.replace(CoordinatorSettings(), state_dir=str(folder / "state"))
    coordinator = JobCoordinator(settings)
    server = GrpcServer(f"unix:{folder}/c.sock", (coordinator,))
    with contextlib.ExitStack() as stack:
        pages: Any = PageProcess(lambda: [str(root)], coordinator.build_status)
        if way == "inside":
            sources = SourceList()
            sources.add([root])
            pages = stack.enter_context(run_pages(sources)).make_application()
            pages.start = pages.stop = lambda: None
        metrics = ProcessMetrics((coordinator.samples,))
        endpoint = MetricsEndpoint("127.0.0.1:0", metrics, TlsSettings(), pages=pages)
        for part in (coordinator, endpoint, server):
            part.start()
        relax_garbage_collector()
        print(endpoint.address, flush=True)
        sys.stdin.read()
        endpoint.stop()
        server.stop(0.0)
        coordinator.stop()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], *map(Path, sys.argv[3:]))
    else:
        times_s: list[float] = []
        _view(sys.argv[2], VIEWERS, float(sys.argv[3]), times_s).join()
        print(*times_s)

"""Pages of `rankdump web` on a tree with a million tensors, which has a table.

The tree is that of `bench table`, with an order of as many events as one iteration of each rank has
operators. `first_page_s` is from the start of the command to the last byte of the overview,
`first_page_cpu_s` the processor time of that. `p95_first_byte_ms` is over all pages, each asked for
at other places, so that hardly anything is kept of an earlier one. `server_peak_mb` is of the
server, and `query_peak_mb` of the process that runs statements of people.

`diff_s` is from the first request for the comparison of two trees of a million fingerprints each to
the answer with its rows, `diff_peak_mb` the memory of the process that compares, `diff_page_ms` the
slowest of pages with rows of other verdicts and places.

`step_with_viewers_vs_alone` is the step of a small job that dumps to an agent on this host, with 50
people at the pages of that tree and without, in turns.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np

import rankdump
from rankdump._core.events import EventKind
from rankdump._core.execution_order import (
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    format_order_line,
    make_order_file_name,
)
from rankdump._core.status import OrderEntry

from .arrays import activations, dump, stamp
from .fingerprint_trees import FingerprintTrees, write_trees
from .host import Host, memory_folder, running_host
from .page_viewers import watched
from .result import Result, median, quantile
from .table import ITERATION_WITH_FILES, RANKS, ROWS, write_bench_tree

ROUNDS = 12
STARTS = 3
TURNS = 5
STEPS = 60
"""Steps of the job in a turn."""
_MB = 1e6
_OPERATORS = ROWS // 4


def measure(*, quick: bool = False, rows: int = RANKS * 125 * ROWS) -> Result:
    """Serve a tree with at least so many rows, and ask for every page at many places."""
    iterations = 2 if quick else -(-rows // (RANKS * ROWS))
    rounds = 2 if quick else ROUNDS
    with memory_folder() as folder:
        root = folder / "tree"
        write_bench_tree(root, iterations)
        _write_order(root, iterations)
        index = [sys.executable, "-m", "rankdump", "index", str(root)]
        subprocess.run(index, check=True, capture_output=True)
        starts = [_time_first_page(root) for _ in range(1 if quick else STARTS)]
        times_ms, sizes, peaks_kb = _ask_all_pages(root, iterations, rounds)
        beside = _time_job_beside_viewers(root, iterations, turns=1 if quick else TURNS)
    return Result(
        figures=_compare_trees(FingerprintTrees(8, 4 if quick else 125))
        | {
            "rows": float(RANKS * iterations * ROWS),
            "first_page_s": median(taken_s for taken_s, _ in starts),
            "first_page_cpu_s": min(cpu_s for _, cpu_s in starts),
            "p50_first_byte_ms": median(times_ms),
            "p95_first_byte_ms": quantile(times_ms, 0.95),
            "largest_page_kb": max(sizes) / 1e3,
            "server_peak_mb": peaks_kb[0] * 1024 / _MB,
            "query_peak_mb": peaks_kb[1] * 1024 / _MB,
            "step_alone_ms": beside.alone_s * 1e3,
            "step_with_viewers_ms": beside.watched_s * 1e3,
            "viewers_pages_per_s": beside.pages_per_s,
        },
        ratios={"step_with_viewers_vs_alone": beside.watched_s / beside.alone_s},
    )


def _time_first_page(root: Path) -> tuple[float, float]:
    """Return the wall time and the processor time until the overview is there."""
    begun = time.perf_counter()
    server = PageServer(root)
    try:
        server.get("/")
        return time.perf_counter() - begun, server.read_cpu_s()
    finally:
        server.stop()


def _compare_trees(trees: FingerprintTrees) -> dict[str, float]:
    """Compare two trees by the page, and ask for pages of their rows."""
    with memory_folder() as folder:
        server = PageServer(*write_trees(folder, trees))
        try:
            begun = time.perf_counter()
            while True:
                _, _, body = server.ask("/diff.json?a=0&b=1")
                found = json.loads(body)["comparison"]
                if found["state"] not in ("waiting", "running"):
                    break
                time.sleep(0.2)
            taken_s = time.perf_counter() - begun
            counts = {each["verdict"]: each["pairs"] for each in found["summary"]["counts"]}
            if counts != {"same": trees.equal, "different": trees.tensors - trees.equal}:
                raise RuntimeError(f"the trees were compared wrongly: {counts}")
            places = product(("different", "same", "same,different"), (0, trees.tensors // 3))
            pages_ms = [
                server.get(f"/diff?a=0&b=1&verdicts={verdicts}&row={row}")[0]
                for verdicts, row in places
            ]
            _, peak_kb = server.read_peaks_kb()
        finally:
            server.stop()
    return {
        "diff_s": taken_s,
        "diff_peak_mb": peak_kb * 1024 / _MB,
        "diff_page_ms": max(pages_ms),
    }


def _ask_all_pages(
    root: Path, iterations: int, rounds: int
) -> tuple[list[float], list[int], tuple[int, int]]:
    """Return milliseconds until the first byte, sizes in bytes, and the peaks of memory."""
    server = PageServer(root)
    try:
        server.get("/")
        times_ms: list[float] = []
        sizes: list[int] = []
        for number in range(rounds):
            for path in _list_addresses(number, iterations):
                taken_ms, size = server.get(path)
                times_ms.append(taken_ms)
                if not path.startswith(("/tensor/elements", "/order/trace")):
                    sizes.append(size)
        return times_ms, sizes, server.read_peaks_kb()
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class StepsBeside:
    """Steps of a job, alone and while people look at pages, and how many pages these were given."""

    alone_s: float
    watched_s: float
    pages_per_s: float


def _time_job_beside_viewers(root: Path, iterations: int, *, turns: int) -> StepsBeside:
    """Serve the pages of a tree beside a job that dumps into another one."""
    paths = [path for number in range(3) for path in _list_addresses(number, iterations)]
    alone: list[float] = []
    seen: list[float] = []
    rates: list[float] = []
    server = PageServer(root)
    try:
        with running_host(table=False) as host, host.session("web") as session:
            job = SmallJob(host, session)
            job.run_steps()
            for _ in range(turns):
                alone += job.run_steps()
                with watched(server.port, server.cookie, paths) as pages:
                    begun = time.perf_counter()
                    seen += job.run_steps()
                    taken_s = time.perf_counter() - begun
                rates.append(pages[0] / taken_s)
    finally:
        server.stop()
    return StepsBeside(median(alone), median(seen), median(rates))


class SmallJob:
    """Computes and dumps in steps of some milliseconds, on one core."""

    def __init__(self, host: Host, session: rankdump.Session) -> None:
        self._host, self._session = host, session
        self._tensors = activations(32, 1 << 12)
        self._state = activations(1, 1 << 20)
        self._iteration = 0

    def run_steps(self) -> list[float]:
        """Return the seconds of each step; all are in the tree afterwards."""
        times_s: list[float] = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            self._session.step(self._iteration)
            np.tanh(self._state, out=self._state)
            stamp(self._tensors, self._iteration)
            dump(self._session, self._tensors)
            times_s.append(time.perf_counter() - begun)
            self._iteration += 1
        self._session.step(self._iteration)
        self._host.wait_until_written("web", self._iteration - 1)
        return times_s


def _list_addresses(number: int, iterations: int) -> Iterator[str]:
    """Yield every page, at places that depend on a number."""
    at = number * 7 % iterations
    operator, rank = number * 17 % _OPERATORS, number % RANKS
    name = f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"
    tensor = urlencode({"name": name, "side": "input", "slot": 0})
    stored = f"{tensor}&rank={rank}&iteration={ITERATION_WITH_FILES}"
    yield "/"
    yield "/overview.json"
    yield f"/tensors?iteration={at}"
    yield f"/tensors?search=op{operator}"
    yield f"/tensors?after={at}-{rank}-0-500"
    yield "/tensors?nonfinite=1"
    yield f"/tensor?{tensor}&rank={rank}&iteration={at}"
    yield f"/tensor?{stored}"
    yield f"/tensor.json?{stored}"
    yield f"/tensor/slice.png?{stored}"
    yield f"/tensor/elements.npy?{stored}"
    yield "/modules"
    yield f"/modules?iteration={at}"
    yield f"/modules?under=layers&rank={rank}"
    yield f"/ranks?search=op{operator}"
    yield f"/ranks/map.png?search=op{operator}&statistic=max"
    yield "/ranks?statistic=time"
    yield f"/ranks?statistic=fingerprint_differences&tensors=all&base={rank}&search=op{operator}"
    yield f"/order/trace.json?iteration={at}"
    yield f"/order?iteration={at}"
    yield f"/order?iteration={at}&around={at * _OPERATORS + operator}"
    sql = f"SELECT iteration, max(l2norm) AS norm FROM tensors WHERE rank = {rank} GROUP BY ALL"
    yield f"/query?{urlencode({'sql': sql})}"


class PageServer:
    """A running `rankdump web`, with its cookie."""

    def __init__(self, *roots: Path) -> None:
        command = [sys.executable, "-m", "rankdump", "web", *map(str, roots), "--no-browser"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address = urlsplit(self._process.stdout.readline().strip())
        self.port = address.port or 0
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._connection.request("GET", f"/?{address.query}")
        answer = self._connection.getresponse()
        answer.read()
        self.cookie = answer.headers["set-cookie"].partition(";")[0]

    def get(self, path: str) -> tuple[float, int]:
        """Return milliseconds until the first byte, and the number of bytes of a page."""
        taken_ms, size, _ = self.ask(path)
        return taken_ms, size

    def ask(self, path: str) -> tuple[float, int, bytes]:
        """Return milliseconds until the first byte, the number of bytes, and a page."""
        begun = time.perf_counter()
        self._connection.request("GET", path, headers={"cookie": self.cookie})
        answer = self._connection.getresponse()
        taken_ms = (time.perf_counter() - begun) * 1e3
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}: {body[:500]!r}")
        return taken_ms, len(body), body

    def read_peaks_kb(self) -> tuple[int, int]:
        """Return the peak memory of the server, and of the largest process that it started."""
        pid = self._process.pid
        threads = Path(f"/proc/{pid}/task").iterdir()
        started = [each for t in threads for each in (t / "children").read_text().split()]
        return _read_peak_kb(str(pid)), max(map(_read_peak_kb, started), default=0)

    def read_cpu_s(self) -> float:
        """Return the processor time of the server."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()


def _read_peak_kb(pid: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])


def _write_order(root: Path, iterations: int) -> None:
    folder = root / GLOBAL_ORDER_FOLDER
    folder.mkdir()
    everyone = tuple(range(RANKS))
    with (folder / make_order_file_name(0)).open("w") as file:
        file.write(ORDER_HEADER)
        for position in range(iterations * _OPERATORS):
            iteration, operator = divmod(position, _OPERATORS)
            is_collective = operator % 50 == 49
            name = f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"
            entry = OrderEntry(
                *(position, 0, iteration, everyone if is_collective else (operator % RANKS,)),
                name="Default/AllReduce-op0" if is_collective else name,
                kind=EventKind.ALL_REDUCE if is_collective else EventKind.OPERATOR,
                group="world" if is_collective else "",
                start_us=position * 100,
                end_us=position * 100 + 90,
            )
            file.write(format_order_line(entry))

"""`rankdump index` and queries of the table of a tree with a million tensors.

The tree is one of statistics: manifests and `statistic.csv` of 8 ranks, written here without an
agent; of one iteration there are also the tensors. `device_...` and `api_...` are of trees with as
many rows whose statistics are one growing file a rank. Each command is a process of its own. Times
of commands include the start of Python. `index_vs_parse` is the time of indexing over that of
reading the same manifests with `json.loads` and one process.

    python -m bench table --rows 10000000

measures a tree of another size; 10^7 rows take 4 GB of memory as files.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.status import IterationStatus
from rankdump._layout import tree_paths as layout

from .growing_trees import write_api_tree, write_device_tree
from .host import memory_folder
from .result import Result, median
from .timing import seconds

RANKS, ITERATIONS, ROWS = 8, 125, 1000
"""Rows of an iteration of a rank."""
ITERATION_WITH_FILES = 1
REPEATS = 3
_STARTED_US = 1_700_000_000_000_000
_HEADER = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,"
    "Max Value,Min Value,NaN Count,L2Norm Value"
)
_MB = 1e6
QUERIES = {
    "query": "SELECT name, side, slot, avg(l2norm), max(max) FROM tensors GROUP BY ALL",
    "place": "SELECT * FROM tensors WHERE rank = 3 AND iteration = 5",
    "nonfinite": "SELECT rank, iteration, name FROM tensors WHERE nan_count > 0",
}
_RUN = """
import json, resource, sys, time
from pathlib import Path
import rankdump
dump = rankdump.open(sys.argv[1])
begun = time.perf_counter()
rows = len(dump.sql(sys.argv[2]))
taken = time.perf_counter() - begun
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(json.dumps({"seconds": taken, "rows": rows, "peak_kb": int(peak)}))
"""

COMMANDS = {
    # With the folder of the tree.
    "ls": ("ls", "{}", "--rank", "3", "--iteration", "1"),
    "ls_all": ("ls", "{}"),
    "status": ("status", "{}"),
    "stats": ("stats", "{}", "--rank", "3", "--iteration", "1"),
    "stats_nonfinite": ("stats", "{}", "--nonfinite"),
    "forecast": ("forecast", "{}"),
}
_PLACE = ("stats", "{}", "--rank", "3", "--iteration", "1")
GROWING_COMMANDS = {
    "device": {"stats": _PLACE, "stats_nonfinite": ("stats", "{}", "--nonfinite")},
    "api": {"stats": _PLACE, "find_source": ("find-source", "{}", "train.py:7", "--rank", "3")},
}
_COMMAND = """
import sys
from pathlib import Path
from rankdump._cli.command_group import run_command_line
code = run_command_line(sys.argv[1:])
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0], file=sys.stderr)
sys.exit(code)
"""


def measure(*, quick: bool = False, rows: int = RANKS * ITERATIONS * ROWS) -> Result:
    """Index a tree with at least so many rows, then query and read it."""
    iterations = 2 if quick else -(-rows // (RANKS * ROWS))
    with memory_folder() as folder:
        root = folder / "tree"
        write_bench_tree(root, iterations)
        parse_s = seconds(lambda: _parse(root))
        # Before there is a table, a place is chosen by its names.
        named = {name: COMMANDS[name] for name in COMMANDS if name != "stats_nonfinite"}
        figures = {f"unindexed_{name}": it for name, it in _time_commands(root, named).items()}
        index = [sys.executable, "-m", "rankdump", "index", str(root), "--json"]
        before_s = _get_children_cpu_s()
        index_s = seconds(lambda: subprocess.run(index, check=True, capture_output=True))
        figures |= {
            "rows": float(RANKS * iterations * ROWS),
            "index_s": index_s,
            "index_cpu_s": _get_children_cpu_s() - before_s,
            "index_rows_per_s": RANKS * iterations * ROWS / index_s,
            "table_mb": sum(path.stat().st_size for path in root.rglob("*.parquet")) / _MB,
            "tree_mb": sum(path.stat().st_size for path in root.rglob("*.*s*")) / _MB,
        }
        for name, sql in QUERIES.items():
            taken = [_query(root, sql) for _ in range(REPEATS)]
            figures[f"{name}_s"] = median(each["seconds"] for each in taken)
            figures[f"{name}_mb"] = max(each["peak_kb"] for each in taken) * 1024 / _MB
        figures |= _time_commands(root, COMMANDS)
    for name, write in (("device", write_device_tree), ("api", write_api_tree)):
        with memory_folder() as folder:
            write(folder / "tree", iterations)
            taken = _time_commands(folder / "tree", GROWING_COMMANDS[name])
            figures |= {f"{name}_{figure}": value for figure, value in taken.items()}
    return Result(figures=figures, ratios={"index_vs_parse": index_s / parse_s})


def _get_children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _time_commands(root: Path, commands: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the wall time, the processor time and the peak memory of each command, in processes
    of their own.
    """
    figures: dict[str, float] = {}
    for name, arguments in commands.items():
        seconds_taken: list[float] = []
        cpu_s: list[float] = []
        for _ in range(REPEATS):
            begun, cpu_begun_s = time.perf_counter(), _get_children_cpu_s()
            done = subprocess.run(
                [sys.executable, "-c", _COMMAND, *(each.format(root) for each in arguments)],
                check=False,  # a forecast also ends with 1 where little fits on the disk
                capture_output=True,
                text=True,
            )
            seconds_taken.append(time.perf_counter() - begun)
            cpu_s.append(_get_children_cpu_s() - cpu_begun_s)
            figures[f"{name}_mb"] = max(figures.get(f"{name}_mb", 0), int(done.stderr) * 1024 / _MB)
        figures[f"{name}_s"], figures[f"{name}_cpu_s"] = median(seconds_taken), min(cpu_s)
    return figures


def _query(root: Path, sql: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(root), sql], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def _parse(root: Path) -> None:
    for path in root.glob("rank_*/.dump_metadata/manifest/*.json"):
        json.loads(path.read_bytes())


def write_bench_tree(root: Path, iterations: int) -> None:
    """Write iterations of 8 ranks, without a table."""
    for rank in range(RANKS):
        for iteration in range(iterations):
            _write_iteration(root, rank, iteration)


def _write_iteration(root: Path, rank: int, iteration: int) -> None:
    begun_us = _STARTED_US + (iteration * RANKS + rank) * ROWS
    records: list[ManifestRecord] = []
    lines = [_HEADER]
    folder = root / f"rank_{rank}" / "Net" / "0" / str(iteration)
    folder.mkdir(parents=True)
    for row in range(ROWS):
        operator, side, slot = row // 4, ("input", "output")[row % 4 // 2], row % 2
        name = f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"
        spelled = name.replace("/", "_")
        path, size = "", 0
        if iteration == ITERATION_WITH_FILES:
            path = _write_tensor(folder, spelled, begun_us + row, f"{side}.{slot}")
            size, path = (folder / path).stat().st_size, f"{folder.relative_to(root)}/{path}"
        records.append(
            ManifestRecord(
                *(path, begun_us + row, "Linear", name, f"args.{slot}", "float32", (16, 64)),
                *(4096, size, ""),
            )
        )
        norm = 1 + (row * 7 + iteration) % 1000 / 100
        lines.append(
            f"Linear,{spelled},0,0,{begun_us + row},{side},{slot},4096,float32,"
            f'"(16,64)",{norm},{-norm},0,{norm * 16:.6g},'
        )
    (folder / layout.STATISTIC_FILE).write_text("\n".join(lines) + "\n")
    _write_manifest(root, rank, iteration, records)


def _write_tensor(folder: Path, name: str, stamp_us: int, part: str) -> str:
    file = f"Linear.{name.replace('.', '_')}.0.0.{stamp_us}.{part}.DefaultFormat.npy"
    np.save(folder / file, np.ones((16, 64), np.float32))
    return file


def _write_manifest(
    root: Path, rank: int, iteration: int, records: Sequence[ManifestRecord]
) -> None:
    stored = sum(1 for record in records if record.path)
    status = IterationStatus(
        job_id="bench",
        session_id=f"session{rank}",
        rank=rank,
        iteration=iteration,
        complete=True,
        expected=ROWS,
        stored=stored,
        degraded=ROWS - stored,
        bytes_in=stored * 4096,
        bytes_stored=sum(record.bytes_stored for record in records),
    )
    manifests = root / f"rank_{rank}" / layout.METADATA_FOLDER / "manifest"
    manifests.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(status, RANKS, rank, "host", tuple(records))
    name = make_manifest_name(iteration, status.session_id)
    (manifests / name).write_bytes(manifest.to_json())

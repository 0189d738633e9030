"""`rankdump index` and queries of the table of a tree with a million tensors.

The tree has statistics alone: manifests and `statistic.csv` of 8 ranks, written here without an
agent. Each command is a process of its own. `index_vs_parse` is the time of indexing over that of
reading the same manifests with `json.loads` and one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.status import IterationStatus
from rankdump._layout import tree_paths as layout

from .host import memory_folder
from .result import Result, median
from .timing import seconds

RANKS, ITERATIONS, ROWS = 8, 125, 1000
"""Rows of an iteration of a rank."""
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


def measure(*, quick: bool = False) -> Result:
    """Index a tree, then query it."""
    iterations = 2 if quick else ITERATIONS
    with memory_folder() as folder:
        root = folder / "tree"
        _write_tree(root, iterations)
        parse_s = seconds(lambda: _parse(root))
        index = [sys.executable, "-m", "rankdump", "index", str(root), "--json"]
        index_s = seconds(lambda: subprocess.run(index, check=True, capture_output=True))
        figures = {
            "rows": float(RANKS * iterations * ROWS),
            "index_s": index_s,
            "index_rows_per_s": RANKS * iterations * ROWS / index_s,
            "table_mb": sum(path.stat().st_size for path in root.rglob("*.parquet")) / _MB,
            "tree_mb": sum(path.stat().st_size for path in root.rglob("*.*s*")) / _MB,
        }
        for name, sql in QUERIES.items():
            taken = [_query(root, sql) for _ in range(REPEATS)]
            figures[f"{name}_s"] = median(each["seconds"] for each in taken)
            figures[f"{name}_mb"] = max(each["peak_kb"] for each in taken) * 1024 / _MB
    return Result(figures=figures, ratios={"index_vs_parse": index_s / parse_s})


def _query(root: Path, sql: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(root), sql], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def _parse(root: Path) -> None:
    for path in root.glob("rank_*/.dump_metadata/manifest/*.json"):
        json.loads(path.read_bytes())


def _write_tree(root: Path, iterations: int) -> None:
    for rank in range(RANKS):
        for iteration in range(iterations):
            _write_iteration(root, rank, iteration)


def _write_iteration(root: Path, rank: int, iteration: int) -> None:
    begun_us = _STARTED_US + (iteration * RANKS + rank) * ROWS
    records: list[ManifestRecord] = []
    lines = [_HEADER]
    for row in range(ROWS):
        operator, side, slot = row // 4, ("input", "output")[row % 4 // 2], row % 2
        name = f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"
        records.append(
            ManifestRecord(
                *("", begun_us + row, "Linear", name, f"args.{slot}", "float32", (16, 64)),
                *(4096, 0, ""),
            )
        )
        spelled = name.replace("/", "_")
        norm = 1 + (row * 7 + iteration) % 1000 / 100
        lines.append(
            f"Linear,{spelled},0,0,{begun_us + row},{side},{slot},4096,float32,"
            f'"(16,64)",{norm},{-norm},0,{norm * 16:.6g},'
        )
    folder = root / f"rank_{rank}"
    table = folder / "Net" / "0" / str(iteration) / layout.STATISTIC_FILE
    table.parent.mkdir(parents=True)
    table.write_text("\n".join(lines) + "\n")
    status = IterationStatus(
        job_id="bench",
        session_id=f"session{rank}",
        rank=rank,
        iteration=iteration,
        complete=True,
        expected=ROWS,
        degraded=ROWS,
    )
    manifests = folder / layout.METADATA_FOLDER / "manifest"
    manifests.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(status, RANKS, rank, "host", tuple(records))
    name = make_manifest_name(iteration, status.session_id)
    (manifests / name).write_bytes(manifest.to_json())

"""Trees of statistics and fingerprints without tensors, and their comparison in a process of its
own: two jobs with the same weights, of which one goes another way in the middle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from rankdump._analysis.table_index import index_tree
from rankdump._core.manifest import (
    FingerprintSeal,
    Manifest,
    ManifestRecord,
    make_fingerprint_name,
    make_manifest_name,
)
from rankdump._core.status import IterationStatus
from rankdump._core.tensor_fingerprint import format_fingerprint_file
from rankdump._kernels.shard_fingerprint import SKETCH_BUCKETS
from rankdump._layout import tree_paths as layout

ROWS = 1000
"""Tensors of an iteration of a rank."""
_SHAPE, _STARTED_US = (16, 64), 1_700_000_000_000_000
_NOISE = 1e-2
_CORES = 2
_HEADER = (
    "Op Type,Op Name,Task ID,Stream ID,Timestamp,IO,Slot,Data Size,Data Type,Shape,"
    "Max Value,Min Value,NaN Count,L2Norm Value"
)
_COMPARE = """
import json, sys, time
from pathlib import Path
import rankdump
from rankdump._analysis.compare.report_summary import count_verdicts
begun = time.perf_counter()
report = rankdump.compare(sys.argv[1], sys.argv[2], processes=2)
counts = {verdict.value: count for verdict, count in count_verdicts(report.rows).items()}
taken = time.perf_counter() - begun
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
origin = report.origins[0].suspects[0]
print(json.dumps({"seconds": taken, "peak_kb": int(peak), "counts": counts,
    "origin": [origin.rank, origin.iteration, origin.name_a], "notes": report.notes}))
"""


class FingerprintTrees(NamedTuple):
    """Extents of both trees."""

    ranks: int
    iterations: int

    @property
    def tensors(self) -> int:
        """Number of tensors of each."""
        return self.ranks * self.iterations * ROWS

    @property
    def equal(self) -> int:
        """Number of pairs before the difference starts: at half of the steps, in half of one."""
        return self.ranks * (self.iterations // 2 * ROWS + ROWS // 2)


def write_trees(folder: Path, trees: FingerprintTrees) -> tuple[Path, Path]:
    """Write both trees, each with its table of statistics."""
    roots = folder / "a", folder / "b"
    for root in roots:
        for rank in range(trees.ranks):
            for iteration in range(trees.iterations):
                apart = root == roots[1] and iteration >= trees.iterations // 2
                first = ROWS // 2 if iteration == trees.iterations // 2 else 0
                _write_iteration(root, rank, iteration, first if apart else ROWS)
        index_tree(root)
    return roots


def compare_trees(roots: tuple[Path, Path], trees: FingerprintTrees) -> tuple[float, float]:
    """Return the seconds and the peak memory in MB of a comparison on two cores.

    RuntimeError when it finds something else than what was written.
    """
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE, *map(str, roots)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_use_two_cores,
    )
    found = json.loads(done.stdout)
    counts, origin = found["counts"], found["origin"]
    expected = {"same": trees.equal, "different": trees.tensors - trees.equal}
    if counts != expected or origin[1:] != [trees.iterations // 2, _name_operator(ROWS // 8)]:
        raise RuntimeError(f"the trees were compared wrongly: {found}")
    return found["seconds"], found["peak_kb"] * 1024 / 1e6


def _use_two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_CORES])


def _name_operator(operator: int) -> str:
    return f"Default/network-Net/layers.{operator}-Linear/Linear-op{operator}"


def _write_iteration(root: Path, rank: int, iteration: int, equal: int) -> None:
    """Write an iteration, of which so many tensors are the same in both trees."""
    begun_us = _STARTED_US + (iteration * 64 + rank) * ROWS
    random = np.random.default_rng((rank, iteration))
    digests = random.integers(0, 1 << 63, ROWS, np.uint64)
    sketches = random.standard_normal((ROWS, SKETCH_BUCKETS), np.float32)
    digests[equal:] += np.uint64(1)
    sketches[equal:] += np.float32(_NOISE) * random.standard_normal(
        sketches[equal:].shape, np.float32
    )
    norms = np.linalg.norm(sketches.astype(np.float64), axis=1)
    records = [_make_record(row, begun_us + row) for row in range(ROWS)]
    lines = [
        f"Linear,{each.op_name.replace('/', '_')},0,0,{each.timestamp_us},{_SIDES[at // 2 % 2]},"
        f'{at % 2},4096,float32,"(16,64)",{norm / 8:.8g},{-norm / 8:.8g},0,{norm:.8g},'
        for at, (each, norm) in enumerate(zip(records, norms.tolist(), strict=True))
    ]
    folder = root / f"rank_{rank}" / "Net" / "0" / str(iteration)
    folder.mkdir(parents=True)
    (folder / layout.STATISTIC_FILE).write_text("\n".join([_HEADER, *lines]) + "\n")
    _write_manifest(root, rank, iteration, records, _format_fingerprints(digests, sketches))


_SIDES = ("input", "output")


def _make_record(row: int, stamp_us: int) -> ManifestRecord:
    name = _name_operator(row // 4)
    return ManifestRecord(
        "", stamp_us, "Linear", name, f"args.{row % 2}", "float32", _SHAPE, 4096, 0, ""
    )


def _format_fingerprints(digests: npt.NDArray[Any], sketches: npt.NDArray[Any]) -> bytes:
    return format_fingerprint_file(
        [
            (row, digest.to_bytes(8, "little") + sketch.tobytes())
            for row, (digest, sketch) in enumerate(zip(digests.tolist(), sketches, strict=True))
        ]
    )


def _write_manifest(
    root: Path, rank: int, iteration: int, records: list[ManifestRecord], prints: bytes
) -> None:
    status = IterationStatus(
        job_id="bench",
        session_id=f"session{rank}",
        rank=rank,
        iteration=iteration,
        complete=True,
        expected=ROWS,
        degraded=ROWS,
    )
    own, name = root / f"rank_{rank}", make_manifest_name(iteration, status.session_id)
    seal = FingerprintSeal(len(prints), xxhash.xxh3_128_hexdigest(prints))
    manifest = Manifest(status, 8, rank, "host", tuple(records), fingerprints=seal)
    for folder, file, data in (
        (layout.FINGERPRINT_FOLDER, make_fingerprint_name(name), prints),
        (layout.MANIFEST_FOLDER, name, manifest.to_json()),
    ):
        (own / folder).mkdir(parents=True, exist_ok=True)
        (own / folder / file).write_bytes(data)

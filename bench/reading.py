"""Duration and memory of commands that read a tree of many tensors.

The tree has 100,000 tensors of 10 ranks and 10 iterations with their manifests, written here
without an agent. Each command is a process of its own, alternating; `..._vs_python` is against an
interpreter that starts and does nothing. Processor time is given too, for busy machines.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from rankdump._core import npy_format
from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.record import TensorKey, TensorSide
from rankdump._core.status import IterationStatus
from rankdump._layout import tree_paths as layout

from .host import memory_folder
from .result import Result, median
from .timing import seconds

RANKS, ITERATIONS, OPERATORS = 10, 10, 250
SIDES = (
    (TensorSide.INPUT, 0),
    (TensorSide.INPUT, 1),
    (TensorSide.OUTPUT, 0),
    (TensorSide.OUTPUT, 1),
)
"""Tensors of an operator."""
REPEATS = 5
_SHAPE, _DATA_BYTES = (2, 3), 24
_STARTED_US = 1_700_000_000_000_000
_KB_PER_MB = 1e6 / 1024
COMMANDS = {
    "python": (),
    "version": ("--version",),
    "ls_one": ("ls", "--rank", "0", "--iteration", "3"),
    "ls": ("ls",),
    "status": ("status",),
    "forecast": ("forecast",),
}
"""Commands by the name of their results; `ls_one` lists one iteration of one rank."""
_RUN = """
import json, sys
from pathlib import Path
try:
    if sys.argv[1:]:
        from rankdump._cli.main import main
        main()
finally:
    import resource
    # Not what the kernel counts for the process: that has its parent's memory in it.
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    used = resource.getrusage(resource.RUSAGE_SELF)
    json.dump({"peak": int(peak), "cpu_s": used.ru_utime + used.ru_stime}, sys.stderr)
"""
"""Runs a command line in a process that prints its resources at the end."""


def measure(*, quick: bool = False) -> Result:
    """Measure all commands alternately; `quick` is a tree of a hundredth, once."""
    operators = OPERATORS // 100 if quick else OPERATORS
    taken: dict[str, list[float]] = defaultdict(list)
    with memory_folder() as folder:
        tensors = write_tree(folder, operators)
        for _ in range(1 if quick else REPEATS):
            for name, command in COMMANDS.items():
                reads = name not in ("python", "version")
                for figure, value in _run(*command, *([str(folder)] if reads else [])).items():
                    taken[f"{name}_{figure}"].append(value)
    figures = {name: median(values) for name, values in taken.items()}
    share = 1 - 1 / (RANKS * ITERATIONS)
    more_mb = figures["ls_peak_mb"] - figures["ls_one_peak_mb"]
    bare = {figure: figures[f"python_{figure}"] for figure in ("s", "peak_mb")}
    return Result(
        figures={
            **figures,
            "tensors": tensors,
            "ls_bytes_per_tensor": more_mb * 1e6 / (share * tensors),
        },
        ratios={
            **{f"{n}_vs_python": figures[f"{n}_s"] / bare["s"] for n in COMMANDS if n != "python"},
            "ls_one_memory_vs_python": figures["ls_one_peak_mb"] / bare["peak_mb"],
        },
    )


def write_tree(root: Path, operators: int) -> int:
    """Write the tree; return how many tensors it has."""
    content = npy_format.format_npy_header("<f4", _SHAPE) + bytes(_DATA_BYTES)
    for rank in range(RANKS):
        for iteration in range(ITERATIONS):
            _write_iteration(root, rank, iteration, operators, content)
    return RANKS * ITERATIONS * operators * len(SIDES)


def _write_iteration(root: Path, rank: int, iteration: int, operators: int, content: bytes) -> None:
    records = [
        _record(rank, iteration, operator, at, len(content))
        for operator in range(operators)
        for at in range(len(SIDES))
    ]
    (root / records[0].path).parent.mkdir(parents=True)
    for record in records:
        (root / record.path).write_bytes(content)
    count, session = len(records), f"session-{rank}"
    about = "job", session, rank, iteration, True
    status = IterationStatus(
        *about, expected=count, stored=count, bytes_stored=count * len(content)
    )
    manifest = Manifest(status, RANKS, rank, "host", tuple(records))
    path = root / layout.make_rank_folder(rank) / layout.MANIFEST_FOLDER
    path.mkdir(parents=True, exist_ok=True)
    (path / make_manifest_name(iteration, session)).write_bytes(manifest.to_json())


def _record(rank: int, iteration: int, operator: int, at: int, size: int) -> ManifestRecord:
    side, slot = SIDES[at]
    stamp = _STARTED_US + (iteration * OPERATORS + operator) * len(SIDES) + at
    name = f"Default/network-Net/encoder-Encoder/layers-{operator // 10}/Linear-op{operator}"
    key = TensorKey(rank, "Net", 0, iteration, stamp, "Linear", name, side, slot)
    return ManifestRecord(
        path=layout.make_mindspore_place(key, "").path,
        timestamp_us=stamp,
        op_type="Linear",
        op_name=name,
        argument=f"{side.value}.{slot}",
        dtype="float32",
        shape=_SHAPE,
        bytes_in=_DATA_BYTES,
        bytes_stored=size,
        digest=f"{hash((rank, stamp)) & (1 << 128) - 1:032x}",
    )


def _run(*arguments: str) -> dict[str, float]:
    """Return seconds and MB of one command; RuntimeError when it fails."""
    command = [sys.executable, "-c", _RUN, *arguments]
    done: list[subprocess.CompletedProcess[str]] = []
    taken_s = seconds(
        lambda: done.append(subprocess.run(command, capture_output=True, text=True, check=False))
    )
    if done[0].returncode:
        raise RuntimeError(f"{arguments}: {done[0].stderr}")
    said = json.loads(done[0].stderr)
    return {"s": taken_s, "cpu_s": said["cpu_s"], "peak_mb": said["peak"] / _KB_PER_MB}

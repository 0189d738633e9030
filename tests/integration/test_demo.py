"""The demonstration: a two-rank DDP job, dumped byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rankdump._core.events import EventKind
from rankdump.reader import load, read_order, status, walk

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LAUNCHER = [sys.executable, str(ROOT / "tests" / "support" / "rank_launcher.py"), "2"]
EXAMPLE = ROOT / "examples" / "torch_ddp.py"
CONFIG = ROOT / "examples" / "data_dump.json"
JOBS = Path(__file__).parent / "jobs"


def dumped(
    tree: Path, command: list[str], temp: Path, config: Path = CONFIG
) -> subprocess.CompletedProcess[str]:
    """Run a command under `rankdump run`, with the configuration of the example by default."""
    rankdump = [sys.executable, "-m", "rankdump", "run"]
    options = ["--config", str(config), "--output", str(tree)]
    environ = {**os.environ, "TMPDIR": str(temp), "OMP_NUM_THREADS": "1"}
    return finished([*rankdump, *options, "--", *command], environ)


def finished(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The tree of one job that computes digests, and the digests of its own hooks."""
    folder = tmp_path_factory.mktemp("digests")
    temp = Path("/tmp")
    job = [*LAUNCHER, str(JOBS / "ddp_digests.py"), str(folder)]
    done = dumped(folder / "tree", job, temp, JOBS / "ddp_digests.json")
    seen = {rank: json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)}
    return folder / "tree", seen, done.stderr


def test_files_equal_the_tensors_of_the_ranks(collected):
    """The tree has every tensor that independent hooks received, bit for bit, and no other."""
    tree, seen, _ = collected
    found: dict[int, Counter] = {0: Counter(), 1: Counter()}
    for entry in walk(tree).entries:
        if entry.op_name.startswith("Gradients/Default/"):
            continue  # gradients of activations; the job's hooks see the forward only
        name = entry.op_name if entry.op_type == "Parameter" else entry.op_type
        digest = hashlib.sha256(load(entry).tobytes()).hexdigest()
        key = entry.key
        found[key.rank][key.iteration, name, key.side.value, key.slot, digest] += 1
    for rank in (0, 1):
        expected = Counter(tuple(row) for row in seen[rank])
        assert expected - found[rank] == Counter()
        assert found[rank] - expected == Counter()
    assert sum(found[0].values()) > 100


def test_zstd_command_unpacks_to_npy_files(collected, tmp_path):
    """A tree can be read without any tool of rankdump."""
    tree, _, _ = collected
    command = shutil.which("zstd")
    if command is None and os.environ.get("CI") != "true":
        pytest.skip("the zstd command is not here")
    assert command is not None, "CI has the zstd command"
    entries = [entry for entry in walk(tree).entries if entry.key.rank == 0]
    packed = [entry.path for entry in entries if entry.path.suffix == ".zst"]
    assert packed
    subprocess.run([command, "-d", "-q", "--output-dir-flat", tmp_path, *packed], check=True)
    for entry in entries:
        # What zstd could not make smaller is an npy file already.
        plain = tmp_path / entry.path.stem if entry.path in packed else entry.path
        np.testing.assert_array_equal(np.load(plain), load(entry))


def test_all_iterations_are_complete_without_drops(collected):
    """Both ranks ended all iterations, and no tensor was dropped."""
    view = status(collected[0])
    assert [(i.rank, i.iteration) for i in view.iterations] == [
        (rank, iteration) for rank in (0, 1) for iteration in (0, 1, 2)
    ]
    assert all(i.complete and i.is_balanced and not i.dropped for i in view.iterations)
    assert view.findings == ()
    assert "dropped:" not in collected[2]


def test_order_merges_both_ranks(collected):
    """Each all-reduce and barrier is one line with both ranks, and there is no finding."""
    order = read_order(collected[0])
    assert order.findings == ()
    entries = list(order.entries())
    joint = [entry for entry in entries if entry.kind.is_collective]
    assert {entry.ranks for entry in joint} == {(0, 1)}
    kinds = Counter((entry.iteration, entry.kind) for entry in joint)
    for iteration in (0, 1, 2):
        assert kinds[iteration, EventKind.ALL_REDUCE] >= 1
        assert kinds[iteration, EventKind.BARRIER] == 1
    reduced = [e for e in joint if e.kind is EventKind.ALL_REDUCE]
    assert len({(e.group, e.sequence) for e in reduced}) == len(reduced)
    for entry in reduced:
        later = [e.position for e in entries if e.iteration > entry.iteration]
        assert all(position > entry.position for position in later)
    for rank in (0, 1):
        own = [e.name for e in entries if e.ranks == (rank,)]
        assert any("Conv2d" in name for name in own)


TUTORIAL = [0, *range(5, 9), *range(100, 121)]
"""The iterations that `0|5-8|100-120` means, both ends of a range included."""


def test_example_trains_identically_without_dump(socket_folder):
    """`make demo` shows a whole dump, whose tree is complete, and it changes no loss."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = finished([*LAUNCHER, str(EXAMPLE)], environ).stdout
    demo = finished(["make", "-C", str(ROOT), "demo"], {**environ, "TMPDIR": str(socket_folder)})
    losses = [line for line in demo.stdout.splitlines(keepends=True) if line.startswith("step ")]
    assert "".join(losses) == alone
    assert alone.count("loss") == 7
    assert re.search(r"all +52/242", demo.stdout)
    tree = walk(ROOT / "build" / "demo")
    assert {(e.key.rank, e.key.iteration) for e in tree.entries} == {
        (rank, iteration) for rank in (0, 1) for iteration in TUTORIAL
    }
    assert tree.problems == ()
    # saved_data is full: a row for every tensor, and a tensor for every row.
    for folder in sorted((ROOT / "build" / "demo").glob("rank_*/Digits/0/*")):
        rows = (folder / "statistic.csv").read_text().splitlines()[1:]
        assert len(rows) == len(list(folder.glob("*.npy*"))) > 0


def test_tutorial_settings_select_26_iterations_of_listed_devices(tmp_path, socket_folder):
    """Of ranks on devices 0, 7 and 8, `support_device` [0..7] dumps the first two."""
    job = f"{sys.executable} {JOBS / 'many_steps.py'}"
    ranks = " && ".join(f"RANK={r} LOCAL_RANK={d} {job}" for r, d in enumerate((0, 7, 8)))
    done = dumped(tmp_path / "tree", ["sh", "-c", f"export WORLD_SIZE=3; {ranks}"], socket_folder)
    tree = walk(tmp_path / "tree")
    places = Counter((entry.key.rank, entry.key.iteration) for entry in tree.entries)
    assert len(TUTORIAL) == 26
    assert places == {(rank, iteration): 2 for rank in (0, 1) for iteration in TUTORIAL}
    for rank in (0, 1):
        folders = (tmp_path / "tree" / f"rank_{rank}" / "Digits" / "0").iterdir()
        assert {folder.name for folder in folders} == set(map(str, TUTORIAL))
    assert not (tmp_path / "tree" / "rank_2" / "Digits").exists()
    assert "support_device [0, 1, 2, 3, 4, 5, 6, 7] excludes this rank's device 8" in done.stderr

"""Jobs with several forward passes an iteration: losses, drops, and the pass of every record.

The ranks compute independently what each module reads and writes in each micro-batch, by a model
that runs in one piece: a record has the right number if it has these bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.data_dumps import write_data_dump

import rankdump
from rankdump._analysis.reader.tree import Entry
from rankdump.reader import status

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

SCHEDULES = {"gpipe": 2, "one_forward_one_backward": 2, "interleaved": 4}
"""Stages of each schedule, over all ranks."""
COMPILED = ("compiled_whole", "compiled_blocks")
OTHERS = ("gan", "accumulation", *COMPILED)
WORLD, MICROBATCHES, ITERATIONS, BLOCKS = 2, 4, 2, 4
RUN_S = 500
SIDES = {
    ("Default", "input"): "input",
    ("Default", "output"): "output",
    # The gradient of what a module wrote is what its backward reads.
    ("Gradients", "input"): "gradient of output",
    ("Gradients", "output"): "gradient of input",
}


def make_environment() -> dict[str, str]:
    """Return the environment without settings of gRPC: what `import rankdump` sets must do."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}


def run_command(folder: Path, tree: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder with an agent that has everything when the command returns."""
    script, *rest = words
    config = write_data_dump(folder, folder / tree, devices=range(WORLD), name=f"{tree}.json")
    command = [sys.executable, "-m", "rankdump", "run", "--config", config]
    command += ["--", sys.executable, Path(__file__).with_name(script), *rest]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=make_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class ScenarioRun:
    """What the ranks of a scenario computed, and what is in its tree."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[dict[str, Any]] = [
            json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(WORLD)
        ]
        self.tree = folder / "tree"
        self.dump = rankdump.open(self.tree)

    def list_operators(self, rank: int, iteration: int) -> list[Entry]:
        """Return the tensors of operators, without parameters and their gradients."""
        found = self.dump.tensors(rank=rank, iteration=iteration)
        return [entry for entry in found if entry.op_type != "Parameter"]


def find_module(entry: Entry) -> str:
    """Return the dotted name of the module whose tensor it is; empty for the whole part."""
    scope = entry.op_name.removeprefix("Gradients/").removeprefix("Recompute/")
    return ".".join(part.rpartition("-")[0] for part in scope.split("/")[2:-1])


def find_side(entry: Entry) -> str:
    return SIDES[entry.op_name.split("/")[0], entry.key.side.value]


def find_pass(entry: Entry) -> tuple[int | None, str]:
    assert entry.record is not None
    return entry.record.microbatch, entry.record.phase


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScenarioRun]:
    folder = tmp_path_factory.mktemp("runs")
    names = (*SCHEDULES, *OTHERS)
    run_command(folder, "unused", "pipeline_job.py", str(WORLD), str(folder), *names)
    return {name: ScenarioRun(folder / name) for name in names}


@pytest.mark.parametrize("name", [*SCHEDULES, *OTHERS])
def test_losses_are_bit_identical_and_nothing_is_dropped(runs, name):
    run = runs[name]
    losses = [report["plain"] for report in run.reports]
    assert [report["dumped"] for report in run.reports] == losses
    assert any(losses)
    found = status(run.tree).iterations
    assert len(found) == WORLD * ITERATIONS
    assert all(each.complete and each.is_balanced and not each.dropped for each in found)


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("iteration", range(ITERATIONS))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_record_of_a_stage_has_the_number_of_its_chunk(runs, name, iteration, rank):
    """Law: a number belongs to the bytes that the whole model has in that micro-batch."""
    run, size = runs[name], BLOCKS // SCHEDULES[name]
    reference = run.reports[rank]["digests"][str(iteration)]
    own = {f"block{b}" for b in range(BLOCKS) if b // size % WORLD == rank}
    expected = Counter(
        (module, side, number, digest)
        for module, sides in reference.items()
        if module.split(".")[0] in own
        for side, digests in sides.items()
        for number, digest in enumerate(digests)
    )
    found = Counter(
        (find_module(entry), find_side(entry), find_pass(entry)[0], digest_of(run, entry))
        for entry in run.list_operators(rank, iteration)
        if find_pass(entry)[0] is not None and find_module(entry)
    )
    assert found == expected
    assert {number for _, _, number, _ in found} == set(range(MICROBATCHES))


def digest_of(run: ScenarioRun, entry: Entry) -> str:
    return hashlib.sha256(run.dump.load(entry).tobytes()).hexdigest()


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_the_trial_run_of_a_schedule_has_no_number(runs, name):
    """In its first step torch runs each stage once with made-up data, to learn the shapes."""
    for rank in range(WORLD):
        first, second = (runs[name].list_operators(rank, i) for i in range(ITERATIONS))
        unnumbered = [entry for entry in first if find_pass(entry)[0] is None]
        assert unnumbered
        assert {entry.op_name.rpartition("-op")[2] for entry in unnumbered} == {"0"}
        assert {find_pass(entry)[0] for entry in second} == set(range(MICROBATCHES))
        assert {find_pass(entry)[1] for entry in (*first, *second)} == {""}


@pytest.mark.parametrize("name", [*SCHEDULES, *OTHERS])
def test_parameters_and_their_gradients_have_no_number(runs, name):
    found = [e for e in runs[name].dump.tensors() if e.op_type == "Parameter"]
    assert {find_pass(entry) for entry in found} == {(None, "")}


def test_accumulation_under_no_sync_is_numbered_with_its_last_pass(runs):
    for rank in range(WORLD):
        for iteration in range(ITERATIONS):
            found = runs["accumulation"].list_operators(rank, iteration)
            numbered = [e for e in found if "network-" in e.op_name]
            assert numbered
            for entry in numbered:
                call = int(entry.op_name.rpartition("-op")[2])
                assert find_pass(entry) == (call, ""), entry.op_name
            assert {find_pass(entry)[0] for entry in numbered} == set(range(MICROBATCHES))


def test_several_passes_of_a_gan_are_no_microbatches(runs):
    """Law: call numbers tell the passes apart, as they always did; an evaluation has its phase."""
    run = runs["gan"]
    passes: dict[str, set[tuple[int | None, str]]] = {}
    for entry in run.dump.tensors():
        if re.search("Sequential-op[0-9]+$", entry.op_name):
            key = f"{entry.key.graph} {entry.op_name.rpartition('-')[2]}"
            passes.setdefault(key, set()).add(find_pass(entry))
    trains, evaluates = {(None, "")}, {(None, "eval")}
    assert passes == {"0 op0": trains, "0 op1": evaluates} | {f"1 op{n}": trains for n in range(3)}


@pytest.mark.parametrize("name", COMPILED)
def test_boundaries_of_compiled_regions_have_the_declared_number(runs, name):
    for iteration in range(ITERATIONS):
        found = runs[name].list_operators(0, iteration)
        types = {entry.op_type for entry in found}
        assert types == ({"Part"} if name == "compiled_whole" else {"Part", "Block"})
        for entry in found:
            assert find_pass(entry) == (int(entry.op_name.rpartition("-op")[2]), "")
        assert {find_pass(entry)[0] for entry in found} == set(range(MICROBATCHES))


# -- workers of a data loader


@pytest.fixture(scope="module")
def plain_losses() -> list[str]:
    """What the job with a data loader prints without a dump, however its workers start."""
    script = Path(__file__).with_name("loader_job.py")
    plain = subprocess.run(
        [sys.executable, script, "fork", "ends"],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env=make_environment(),
        check=True,
    )
    assert plain.stderr == ""
    return plain.stdout.splitlines()


@pytest.mark.parametrize(
    ("start", "stays"), [("fork", "ends"), ("fork", "stays"), ("spawn", "stays")]
)
def test_workers_of_a_data_loader_print_nothing_and_dump_nothing(
    tmp_path, plain_losses, start, stays
):
    """Law: no line of gRPC, and the session of the parent is the only one."""
    done = run_command(tmp_path, "tree", "loader_job.py", start, stays)
    assert re.findall("loss .*", done.stdout) == plain_losses
    unexpected = [
        line
        for line in done.stderr.splitlines()
        if not re.match(r"rankdump: (tree )?/|rank  iterations|  *(\d+|all)  ", line)
    ]
    assert unexpected == []
    found = status(tmp_path / "tree").iterations
    assert {each.rank for each in found} == {0}
    assert len(found) == 8
    assert all(each.complete and each.is_balanced and not each.dropped for each in found)

"""Jobs on a real accelerator, in processes of their own: what is in the tree is what the job itself
saw, and the job computes what it computes without rankdump.

`make test-cuda`. With TEST_DEVICE=cpu, what needs no accelerator can be tried without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data_dumps import write_data_dump

import rankdump
from rankdump import reader

JOB = Path(__file__).parent / "jobs" / "device_job.py"
DEVICE = os.environ.get("TEST_DEVICE", "cuda")
RUN_S = 300
BAD_STEP = 12

Journal = dict[str, Any]
Run = Callable[..., tuple[Journal, reader.Dump]]


def start(scenario: str, folder: Path, *through: object) -> tuple[Journal, str]:
    """Run a scenario to its end; return what it saw and what it said."""
    folder.mkdir(exist_ok=True)
    command = [*through, sys.executable, JOB, DEVICE, scenario, folder]
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "journal.json").read_text()), done.stdout


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a scenario under `rankdump run`; return what it saw and its dump."""

    def ran(
        scenario: str, own: dict[str, object] | None = None, mode: str = "host", **common: Any
    ) -> tuple[Journal, reader.Dump]:
        tree = tmp_path / f"tree-{scenario}-{mode}"
        config = write_data_dump(tmp_path, tree, devices=[0], own=own, **common)
        body = json.loads(config.read_text())
        body["e2e_dump_settings"]["stat_calc_mode"] = mode
        config.write_text(json.dumps(body))
        command = (sys.executable, "-m", "rankdump", "run", "--config", config, "--")
        journal, said = start(scenario, tmp_path / scenario, *command)
        (tmp_path / "said").write_text(said)
        return journal, rankdump.open(tree)

    return ran


def digests(dump: reader.Dump, iteration: int) -> dict[str, str]:
    """Return a digest of each output that is no gradient or parameter, by the name in the dump."""
    found = dump.where(iteration=iteration).tensors(side="output")
    return {
        entry.key.op_name: hashlib.sha256(dump.load(entry).tobytes()).hexdigest()
        for entry in found
        if "op" in entry.key.op_name and not entry.key.op_name.startswith("Gradients")
    }


@pytest.mark.parametrize("scenario", ["train", "autocast"])
def test_tree_has_what_the_job_computed_and_the_job_what_it_computes_alone(run, tmp_path, scenario):
    journal, dump = run(scenario)
    plain, _ = start(scenario, tmp_path / "plain")
    assert journal == plain
    for iteration in range(4):
        found = digests(dump, iteration)
        for module, expected in journal["outputs"].items():
            (name,) = (each for each in found if f"_{module}-" in each)
            assert found[name] == expected[iteration], (name, iteration)
    (first, *_) = dump.cards
    assert first.card.versions.get("cuda") or DEVICE == "cpu"
    assert {"batch.0", "random.cpu"} <= first.card.digests.keys()
    assert len(first.card.parameters) == 9


def test_tensors_are_copied_as_they_are_when_they_are_handed_over(run):
    """An empty tensor has no elements to dump."""
    journal, dump = run("overwrite", own={"buffer_bytes": 512 << 20, "block_timeout_s": 600})
    found = digests(dump, 0)
    outputs = {name: each for name, each in journal["outputs"].items() if name != "empty-op0"}
    assert [name for name, each in outputs.items() if found.get(name) != each] == []


def test_statistics_of_the_device_are_those_of_the_host(run):
    """Of the same bits; sums are made in another order."""
    categories = ["max", "min", "avg", "l2norm"]
    rows: list[dict[tuple[object, ...], dict[str, float]]] = []
    for mode in ("host", "device"):
        _, dump = run("train", mode=mode, saved_data="statistic", statistic_category=categories)
        found = dump.where(iteration=0).statistics()
        rows.append(
            {
                (row.op_name, row.key.side, row.key.slot): {
                    name: row.number(name) for name in categories
                }
                for row in found
            }
        )
    host, device = rows
    assert host.keys() == device.keys()
    assert len(host) > 40
    for key, numbers in host.items():
        assert device[key] == pytest.approx(numbers, rel=1e-4, abs=1e-6), key


def test_captured_calls_are_counted_and_the_graph_computes_the_same(run, tmp_path):
    journal, dump = run("graph")
    assert journal["same"]
    assert len(digests(dump, 0)) == 9
    assert digests(dump, 1) == {}
    listed = ask("ls", dump.root)
    assert "a CUDA graph was being captured" in listed


def ask(*arguments: object) -> str:
    command = [sys.executable, "-m", "rankdump", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_black_box_names_the_first_operator_that_is_not_finite(tmp_path):
    black_box = {"max_overhead": 1, "post_steps": 1}
    config = tmp_path / "black_box.json"
    own = {"path": str(tmp_path / "tree"), "blackbox": black_box}
    config.write_text(json.dumps({"rankdump": own}))
    command = (sys.executable, "-m", "rankdump", "run", "--config", config, "--")
    journal, said = start("black_box", tmp_path / "box", *command)
    plain, _ = start("black_box", tmp_path / "plain")
    assert journal == plain
    assert "the black box was frozen: " in said
    report = json.loads(ask("faults", tmp_path / "tree", "--json"))
    bad = report["first_bad_value"]
    assert (bad["rank"], bad["iteration"]) == (0, BAD_STEP)
    assert bad["tensor"]["op_name"] == "Default/network-Net/scale-Scale/Scale-op0"
    assert JOB.read_text().splitlines()[int(bad["source"].rpartition(":")[2]) - 1].count("scale(")


def test_replay_finds_nothing_in_a_step_that_repeats(run):
    journal, _ = run("replay", iteration="0|2")
    assert journal["same"] == [True] * 4, journal["texts"]
    assert min(journal["compared"]) > 20
    assert journal["losses"] == journal["plain"]


def test_replay_names_the_operator_that_adds_in_no_fixed_order(run):
    journal, _ = run("scatter")
    assert not journal["same"]
    assert "ScatterSum" in journal["text"]


def test_operators_inside_a_compiled_model_are_dumped(run, tmp_path):
    journal, dump = run("compiled")
    names = {entry.key.op_name for entry in dump.where(iteration=2).tensors()}
    for module in ("embed", "norm", "expand", "contract", "head"):
        assert any(f"_{module}-" in each for each in names), (module, sorted(names))
    plain, _ = start("compiled", tmp_path / "plain")
    assert journal["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def test_collectives_of_nccl_are_in_the_order(run):
    _, dump = run("nccl")
    order = ask("order", dump.root, "--limit", "0")
    assert order.count("AllReduce") == order.count("AllGather") == 4, order

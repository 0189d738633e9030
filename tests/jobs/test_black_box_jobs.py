"""Black boxes of jobs of several ranks that select no tensor, and in which something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import run_in_process

import rankdump

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).parent / "black_box_job.py"
STEPS = 60
BAD_STEP = 37


@pytest.fixture
def run(tmp_path: Path, socket_folder: Path) -> Callable[..., dict[str, Any]]:
    """Run scenarios with an agent of their own; return the report of the fault."""

    def ran(scenarios: str, world: int, *, code: int = 0, **more: object) -> dict[str, Any]:
        # A step of so small a model takes less than measuring it.
        black_box = {"max_overhead": 1, "post_steps": 1, **more}
        own = {"path": str(tmp_path / "tree"), "blackbox": black_box}
        config = tmp_path / "black_box.json"
        config.write_text(json.dumps({"rankdump": own}))
        job = [sys.executable, JOB, str(world), tmp_path, *scenarios.split()]
        command = [sys.executable, "-m", "rankdump", "run", "--config", config, "--", *job]
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"TMPDIR": str(socket_folder)},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "the black box was frozen: " in done.stderr
        (tmp_path / "log").write_text(done.stderr)
        return json.loads(ask("faults", tmp_path / "tree", "--json"))

    return ran


def ask(*arguments: object) -> str:
    done = run_in_process(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_nan_of_all_ranks_is_named(run, tmp_path):
    """With rank, operator and source; the losses are bit by bit those without rankdump."""
    report = run("plain nan", 4)
    bad = report["first_bad_value"]
    assert (bad["rank"], bad["iteration"]) == (2, BAD_STEP)
    assert bad["tensor"]["op_name"] == "Default/network-Net/scale-Scale/Scale-op0"
    file, _, line = bad["source"].rpartition(":")
    assert file == str(JOB)
    assert "self.scale(" in JOB.read_text().splitlines()[int(line) - 1]
    assert bad["tensor"]["finite_before"] == 1
    assert {cause["kind"] for cause in (report["cause"], *report["later_causes"])} == {"non_finite"}
    assert not report["absent"]
    before = next(each for each in report["steps"] if each["iteration"] == BAD_STEP - 1)
    assert (before["ranks"], before["nonfinite"]) == (4, 0)
    assert float(before["loss"]) > 0
    check_frozen_tree(Path(report["root"]), ranks=4)
    check_tensors_in_full(Path(report["root"]))
    for rank in range(4):
        losses = (tmp_path / "nan" / f"losses_{rank}.txt").read_text()
        assert losses.count("\n") == STEPS
        assert losses == (tmp_path / "plain" / f"losses_{rank}.txt").read_text()


def check_frozen_tree(root: Path, *, ranks: int) -> None:
    """The frozen tree is read like any other."""
    assert root.parent.name == "blackbox"
    listed = json.loads(ask("stats", root, "--json", "--iteration", str(BAD_STEP - 1)))
    # Three modules and four gradients of each rank.
    assert (listed["tensor_count"], listed["nonfinite_count"]) == (7 * ranks, 0)
    assert "no problem found" in ask("fsck", root)
    status = json.loads(ask("status", root, "--json"))
    assert {each["rank"] for each in status["iterations"]} == set(range(ranks))


def check_tensors_in_full(root: Path) -> None:
    """The bad tensor, its input, and with this budget those of the steps before are in the tree."""
    dump = rankdump.open(root)
    bad = dump.where(rank=2, iteration=BAD_STEP, operator="*scale-Scale*")
    found = {entry.key.side.value: dump.load(entry) for entry in bad.tensors()}
    assert sorted(found) == ["input", "output"]
    assert np.isnan(found["output"]).all()
    assert (np.abs(found["input"]) <= 1).all()
    [record] = root.glob(".rankdump/black_box.*.json")
    ranks = json.loads(record.read_text())["ranks"]
    before = dump.where(iteration=BAD_STEP - 1)
    steps = [step for rank in ranks for step in rank["steps"]]
    counts = [step["full_tensors"] for step in steps if step["iteration"] == BAD_STEP - 1]
    assert sum(counts) == len(before.tensors()) > 0
    rows = {(row.key.rank, row.op_name): row for row in before.statistics()}
    for entry in before.tensors():
        maximum = rows[entry.key.rank, entry.op_name].number("max")
        assert float(dump.load(entry).max()) == pytest.approx(maximum, rel=1e-5)
    assert not any(rank["dropped_tensors"] for rank in ranks)


def test_killed_rank_is_the_cause(run):
    report = run("kill", 2, code=signal.SIGKILL)
    causes = [report["cause"], *report["later_causes"]]
    (lost,) = [cause for cause in causes if cause["kind"] == "lost_rank"]
    assert lost["rank"] == 0
    assert lost["text"].startswith("rank 0 ended without the end of its session")
    assert 0 <= lost["iteration"] < BAD_STEP
    assert report["first_bad_value"] is None


def test_error_of_a_rank_is_the_cause(run):
    report = run("raise", 2, code=1)
    causes = [report["cause"], *report["later_causes"]]
    texts = [cause["text"] for cause in causes if cause["rank"] == 0]
    assert "the job raised RuntimeError: the loader has no more samples" in texts


def test_watch_rules_of_a_configuration_freeze_note_and_dump(run, tmp_path):
    watch = [
        {"when": "too_large", "operators": ["scale"], "value": 50, "do": "freeze"},
        {"when": "too_large", "operators": ["Gradients/first.*"], "value": 50},
        {"when": "zero", "operators": ["second.*"]},
        {"when": "too_large", "operators": ["Scale"], "value": 50, "do": "dump", "iterations": 2},
    ]
    report = run("grow", 2, watch=watch)
    causes = [report["cause"], *report["later_causes"]]
    (cause,) = [cause for cause in causes if cause["kind"] == "watch"]
    assert (cause["rank"], cause["iteration"]) == (0, BAD_STEP)
    assert cause["op_name"] == "Default/network-Net/scale-Scale/Scale-op0"
    assert cause["text"].startswith("rankdump.blackbox.watch[0] (too_large): its largest magnitude")
    assert cause["text"].endswith("the limit is 50")
    assert cause["source"].startswith(f"{JOB}:")
    [record] = Path(report["root"]).glob(".rankdump/black_box.*.json")
    steps = json.loads(record.read_text())["ranks"][0]["steps"]
    # With this budget all tensors whose size is known have fingerprints; on a crowded machine a
    # step that was held up leaves less time for the next ones.
    assert all(step["tensors"] == 7 for step in steps[2:-1])
    assert any(step["fingerprints"] == 7 for step in steps[2:-1])
    notes = [note for note in report["notes"] if note["iteration"] == BAD_STEP]
    assert any("watch[1] (too_large)" in note["text"] for note in notes)
    log = (tmp_path / "log").read_text()
    assert f"rank 0, iteration {BAD_STEP}: rankdump.blackbox.watch[1] (too_large)" in log
    unmatched = "rankdump.blackbox.watch[2] (zero) matched nothing: "
    assert unmatched in log
    sessions = json.loads(ask("status", tmp_path / "tree", "--json"))["sessions"]
    assert all(any(note.startswith(unmatched) for note in each["notes"]) for each in sessions)
    tensors = json.loads(ask("ls", tmp_path / "tree", "--json"))["tensors"]
    # Full tensors of the next two iterations, with the gradients of the operator.
    scale = "Default/network-Net/scale-Scale/Scale-op0"
    forward = [each for each in tensors if each["op_name"] == scale and each["side"] == "output"]
    assert [(each["rank"], each["iteration"]) for each in forward] == [
        (0, BAD_STEP + 1),
        (0, BAD_STEP + 2),
    ]
    assert {each["iteration"] for each in tensors} == {BAD_STEP + 1, BAD_STEP + 2}

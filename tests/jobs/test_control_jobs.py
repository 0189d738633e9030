"""A job of four ranks whose plan is changed while it runs, on all ranks from one iteration on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_in_process
from support.data_dumps import write_data_dump

from rankdump._analysis.black_box.freeze_files import read_freeze_records
from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._core.manifest import Manifest
from rankdump._layout.tree_paths import MANIFEST_FOLDER

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FOLDER = Path(__file__).parent
LAUNCHER = FOLDER.parent / "support" / "rank_launcher.py"
RANKS = tuple(range(4))
WAIT_S = 300.0


@dataclass(frozen=True)
class RunningJob:
    """The job, and its tree."""

    tree: Path
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def job_id(self) -> str:
        return read_tree_sessions(self.tree)[0].status.job_id

    @property
    def reached(self) -> int:
        """The iteration that runs, at least."""
        return int((self.folder / "reached").read_text() or 0)

    def control(self, *words: str) -> dict[str, Any]:
        """Change the job, once the coordinator knows it; return what the command says."""
        answers: list[subprocess.CompletedProcess[str]] = []

        def is_known() -> bool:
            answer = run_in_process("control", self.job_id, *words, "--tree", self.tree, "--json")
            answers.append(answer)
            return "has not reported" not in answer.stderr

        self.wait_until(is_known)
        done = answers[-1]
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def begin(self, *words: str, note: str = "") -> int:
        """Change the job on all ranks alike; return the first iteration with the change.

        All ranks have a note that begins so.
        """
        result = self.control(*words)
        begin = result["iteration"]
        ranks = [(each["rank"], each["iteration"], each["reason"]) for each in result["ranks"]]
        assert ranks == [(rank, begin, "") for rank in RANKS]
        assert not any(each["unconfirmed"] for each in result["ranks"])
        assert all(each["note"][: len(note) or None] == note for each in result["ranks"])
        return begin

    def find_manifests(self, rank: int) -> dict[int, Path]:
        """Return the manifests of a rank by iteration."""
        folder = self.tree / f"rank_{rank}" / MANIFEST_FOLDER
        return {int(each.name.split(".")[0].split("_")[1]): each for each in folder.glob("*.json")}

    def wait_for(self, iteration: int) -> None:
        """Wait until all ranks have dumped an iteration."""
        self.wait_until(lambda: all(iteration in self.find_manifests(rank) for rank in RANKS))

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_done():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline_s, (self.folder / "log").read_text()
            time.sleep(0.05)

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.process.wait(WAIT_S) == 0, (self.folder / "log").read_text()


@pytest.fixture
def job(tmp_path: Path, socket_folder: Path) -> Iterator[RunningJob]:
    """A job that dumps iteration 0."""
    config = write_data_dump(tmp_path, tmp_path / "dump", devices=RANKS, iteration="0")
    ranks = [sys.executable, LAUNCHER, len(RANKS), FOLDER / "control_job.py", tmp_path]
    command = [sys.executable, "-m", "rankdump", "run", "--config", config, "--", *ranks]
    environ = {"TMPDIR": str(socket_folder), "OMP_NUM_THREADS": "1", "RANKDUMP_BLACKBOX": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=os.environ | environ, stdout=log, stderr=log
        )
    yield RunningJob(tmp_path / "dump", tmp_path, process)
    if process.poll() is None:
        (tmp_path / "end").touch()
        process.wait(WAIT_S)


def read_names(path: Path) -> set[str]:
    """Return the layers whose tensors are in a manifest, parameters and gradients left out."""
    names = {record.op_name for record in Manifest.from_json(path.read_bytes()).records}
    parts = [name.split("/") for name in names if name.startswith("Default/network-")]
    return {each[2] for each in parts if len(each) > 3}


def test_job_is_retargeted_from_one_iteration_on_twice_and_not_after_its_end(job):
    job.wait_for(0)
    first = job.begin("iterations", f"0-{1 << 40}")
    job.wait_for(first + 1)
    second = job.begin(
        *("operators", "name-regex(.*/first-.*)", "absent"), note="'absent' matches none of the "
    )
    third = job.begin("saved-data", "full")
    assert first < second <= third
    job.wait_for(max(second, third) + 1)
    last = job.begin("stop")
    frozen = job.tree / "blackbox" / str(job.begin("freeze", "it looks odd"))
    job.wait_until(lambda: bool(list(frozen.glob(".rankdump/black_box.*.json"))))
    [record] = read_freeze_records(frozen)
    assert [rank.rank for rank in record.ranks] == [*RANKS]
    assert record.causes[0].text == "it looks odd"
    job.wait_until(lambda: job.reached > last)
    stopped = f"ranks 0-3: since iteration {last} it dumps nothing, for no iteration is selected\n"
    job.wait_until(lambda: stopped in run_in_process("status", job.tree).stdout)
    status = json.loads(run_in_process("status", job.tree, "--json").stdout)
    assert {each["rank"] for each in status["sessions"]} == set(RANKS)
    (shown,) = {
        (each["selected"], each["operators"], each["saved_data"], each["changed_in"])
        for each in status["sessions"]
    }
    assert shown == ("none", "absent, name-regex(.*/first-.*)", "full", last)
    job.end()
    for rank in RANKS:
        found = job.find_manifests(rank)
        assert sorted(found) == [0, *range(first, last)], rank
        assert read_names(found[second - 1]) == {"first-Linear", "last-Linear"}
        assert read_names(found[second]) == {"first-Linear"}
        folders = job.tree / f"rank_{rank}" / "Net" / "0"
        tables = {int(each.parent.name) for each in folders.glob("*/statistic.csv")}
        assert tables == set(range(third, last)), rank
        tensors = {int(each.parent.name) for each in folders.glob("*/*.npy*")}
        assert tensors == {0, *range(first, last)}
        assert all(Manifest.from_json(p.read_bytes()).status.is_balanced for p in found.values())
    assert "no problem found" in run_in_process("fsck", job.tree).stdout
    selected = json.loads(run_in_process("status", job.tree, "--json").stdout)["sessions"]
    assert {each["selected"] for each in selected} == {"none"}
    refuse_finished(job)


def refuse_finished(job: RunningJob) -> None:
    """A job that has ended cannot be changed."""
    done = run_in_process("control", job.job_id, "stop", "--tree", job.tree)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"no job {job.job_id!r} runs" in done.stderr

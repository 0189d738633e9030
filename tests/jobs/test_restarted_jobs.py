"""Jobs that are restarted: what the tree, the commands and the library tell of each attempt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs.restarted_job import CRASH_ITERATION, ITERATIONS, make_batch
from support.command_line import run_in_process
from support.data_dumps import write_data_dump

import rankdump
from rankdump import reader
from rankdump._core.tree_session import SESSIONS_FOLDER
from rankdump.errors import CorruptedError

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.torch]

HERE = Path(__file__).parent
FIRST_INPUT = "Default/network-Sequential/Sequential-op0"


@dataclass(frozen=True)
class DumpedJob:
    """A job that ran under `rankdump run`."""

    tree: Path
    log: str

    def run(self, *arguments: object, code: int = 0) -> str:
        """Return what a command prints about the tree."""
        command, *rest = arguments
        done = run_in_process(command, self.tree, *rest, columns=160)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run_json(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        """Return the JSON object that a command prints."""
        return json.loads(self.run(*arguments, "--json", code=code))


def run_job(folder: Path, *command: object, code: int = 0) -> DumpedJob:
    """Dump everything that a command does into a tree."""
    config = write_data_dump(folder, folder / "tree", saved_data="full")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rankdump", "run", "--config", str(config), "--"),
            *map(str, command),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return DumpedJob(folder / "tree", done.stderr)


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves space for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def job(short_folder) -> DumpedJob:
    """The job that torchrun restarts once."""
    folder = short_folder / "elastic"
    folder.mkdir()
    return run_job(
        folder,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", 1),
        *("--nproc-per-node", 2, HERE / "restarted_job.py", folder),
    )


@pytest.fixture(scope="module")
def rank(short_folder) -> DumpedJob:
    """The rank that is started again after a kill, under the same job id."""
    folder = short_folder / "plain"
    folder.mkdir()
    script = f"{sys.executable} {HERE / 'restarted_rank.py'}"
    return run_job(folder, "sh", "-c", f"{script} {folder}/tree 100 1; {script} {folder}/tree 200")


def tally(view: dict[str, Any], attempt: int) -> dict[str, int]:
    """Return the sums of an attempt's balances."""
    own = [each for each in view["iterations"] if each["attempt"] == attempt]
    return {name: sum(each[name] for each in own) for name in ("stored", "linked", "degraded")}


def test_status_shows_the_crash_and_the_balance_of_each_attempt(job):
    view = job.run_json("status")
    states = {(s["rank"], s["attempt"]): s["raised_in"] for s in view["sessions"]}
    assert states.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (states[1, 0], states[0, 1], states[1, 1]) == (CRASH_ITERATION, None, None)
    ended = {(i["rank"], i["attempt"], i["iteration"]) for i in view["iterations"] if i["complete"]}
    first = {(rank, 0, at) for rank in (0, 1) for at in range(CRASH_ITERATION)}
    assert ended == first | {(rank, 1, at) for rank in (0, 1) for at in range(ITERATIONS)}
    for attempt in (0, 1):
        one = job.run_json("status", "--attempt", attempt)
        assert {each["attempt"] for each in one["sessions"]} == {attempt}
        assert tally(one, attempt) == tally(view, attempt)
    kept = [sum(tally(view, attempt).values()) for attempt in (0, 1)]
    tensors = job.run_json("ls", "--limit", 0)["tensor_count"]
    assert sum(kept) == tensors
    text = job.run("status")
    assert "attempt 0 crashed in iteration 2" in text
    rows = [line.split()[:3] for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert rows == [
        ["0", "0", "crashed"],
        ["0", "1", "closed"],
        ["1", "0", "crashed"],
        ["1", "1", "closed"],
    ]
    assert "crashed" not in job.run("status", "--attempt", 1)


def test_run_prints_the_crash_although_the_next_attempt_completed(job):
    assert "attempt 0 crashed in iteration 2" in job.log
    assert "missing_member, attempt 0: iteration 2" in job.log


def test_ls_lists_the_tensors_of_each_attempt(job):
    every = job.run_json("ls")
    assert every["attempts"] == [0, 1]
    counts = [job.run_json("ls", "--attempt", attempt)["tensor_count"] for attempt in (0, 1)]
    assert sum(counts) == every["tensor_count"]
    places = {(t["attempt"], t["iteration"]) for t in every["tensors"]}
    assert {at for attempt, at in places if attempt == 0} == set(range(CRASH_ITERATION + 1))
    assert {at for attempt, at in places if attempt == 1} == set(range(ITERATIONS))
    overview = job.run("ls")
    rows = [line.split() for line in overview.splitlines() if line.endswith("complete")]
    assert [row[:3] for row in rows if row[-1] == "incomplete"] == [
        ["0", "0", "2"],
        ["1", "0", "2"],
    ]
    assert "the tree has no attempt 2; known: 0, 1" in job.run("ls", "--attempt", 2, code=1)


def test_order_merges_each_attempt_by_itself(job):
    order = job.run_json("order", "--limit", 0)
    entries = order["entries"]
    assert [entry["position"] for entry in entries] == list(range(len(entries)))
    for attempt in (0, 1):
        own = [entry for entry in entries if entry["attempt"] == attempt]
        assert job.run_json("order", "--limit", 0, "--attempt", attempt)["entries"] == own
        for number in (0, 1):
            reduced = [e for e in own if e["iteration"] == number and e["kind"] == "all_reduce"]
            assert [entry["ranks"] for entry in reduced] == [[0, 1]]
            operators = [e for e in own if e["iteration"] == number and e["kind"] == "operator"]
            names = [(*entry["ranks"], entry["name"]) for entry in operators]
            assert len(names) == len(set(names)) == 2 * 8
    found = {(finding["kind"], finding["attempt"]) for finding in order["findings"]}
    # torchrun may end rank 0, whose collective has failed, before that has ended its session.
    assert found - {("ended_rank", 0)} == {("missing_member", 0)}
    assert "missing_member, attempt 0: iteration 2: rank 1" in job.run("order")
    assert "the merge has no findings" in job.run("order", "--attempt", 1)


def test_order_keeps_the_traces_of_both_attempts(job):
    folder = job.tree / "global_execution_order"
    counts = [
        len(list((folder / f"execution_order_graph_0{attempt}.trace").iterdir()))
        for attempt in ("", "_attempt_1")
    ]
    assert counts == [CRASH_ITERATION + 1, ITERATIONS]


def test_stats_shows_the_values_of_an_attempt(job):
    for attempt in (0, 1):
        arguments = ("--attempt", attempt, "--rank", 1, "--iteration", 1, "--side", "input")
        rows = job.run_json("stats", *arguments)["tensors"]
        first = [row for row in rows if row["op_name"] == FIRST_INPUT]
        assert [row["max"] for row in first] == [float(make_batch(attempt, 1, 1).max())]
        assert {row["attempt"] for row in rows} == {attempt}


def test_load_takes_the_last_attempt_unless_one_is_given(job):
    dump = rankdump.open(job.tree)
    assert dump.attempts == (0, 1)
    entry = dump.tensors(rank=1, iteration=1, operator=FIRST_INPUT, side="input")[0]
    key = entry.key._replace(timestamp_us=0)
    expected = [make_batch(attempt, 1, 1).numpy() for attempt in (0, 1)]
    assert np.array_equal(dump.load(key), expected[1])
    for attempt in (0, 1):
        assert np.array_equal(dump.load(key, attempt=attempt), expected[attempt])
        (only,) = dump.tensors(
            rank=1, iteration=1, operator=FIRST_INPUT, side="input", attempt=attempt
        )
        assert np.array_equal(dump.load(only), expected[attempt])
    crashed = dump.where(attempt=0, rank=1, iteration=CRASH_ITERATION)
    values = [dump.load(each) for each in crashed.tensors(side="input")]
    assert any(np.array_equal(value, make_batch(0, 1, CRASH_ITERATION)) for value in values)
    with pytest.raises(CorruptedError, match="no attempt 5; known: 0, 1"):
        dump.tensors(attempt=5)


def test_diff_compares_last_attempts_unless_one_is_given(job):
    text = job.run("diff", job.tree)
    assert f"a: {job.tree} attempt 1 (the last of attempts 0-1)" in text
    between = ("--attempt-a", 0, "--attempt-b", 1)
    rows = job.run_json("diff", job.tree, *between, "--iteration", 1, code=1)
    assert rows["agrees"] is False
    dump = reader.open(job.tree)
    assert dump.where(attempt=0).iterations == tuple(range(CRASH_ITERATION + 1))


def test_attempts_of_a_rank_are_told_apart_by_its_processes(rank):
    dump = rankdump.open(rank.tree)
    assert dump.attempts == (0, 1)
    for attempt, value in ((0, 100), (1, 200)):
        values = [dump.load(entry)[0, 0] for entry in dump.tensors(attempt=attempt)]
        assert values == [value + at for at in range(2 if attempt == 0 else 3)]
    assert "attempt 0 crashed in iteration 1" in rank.run("status")
    assert "attempt 0 crashed in iteration 1" in rank.log
    states = [(s["attempt"], s["state"]) for s in rank.run_json("status")["sessions"]]
    assert states == [(0, "lost"), (1, "closed")]
    entries = rank.run_json("order")["entries"]
    # A killed rank may take events along, which must not make the next attempt incomplete.
    later = [entry["iteration"] for entry in entries if entry["attempt"]]
    assert later == [0, 1, 2]


def test_attempts_survive_lost_session_files(job, tmp_path):
    """Trees of tools and copies without hidden folders have none: manifests have the number."""
    tree = tmp_path / "tree"
    shutil.copytree(job.tree, tree)
    shutil.rmtree(tree / SESSIONS_FOLDER)
    status = reader.status(tree)
    assert {each.attempt for each in status.sessions} == {0, 1}
    complete = [each for each in status.iterations if each.complete]
    assert len(complete) == 2 * (CRASH_ITERATION + ITERATIONS)

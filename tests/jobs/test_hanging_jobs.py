"""Jobs that hang: what a person sees of them in the tree while they hang, and after their end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_in_process
from support.data_dumps import write_data_dump

from rankdump._analysis.reader.manifests import read_tree_sessions

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "hanging_job.py"
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
]
LAUNCHER = [sys.executable, str(SCRIPT.parents[1] / "support" / "rank_launcher.py"), "2"]
TIMEOUT_S = 120.0
ENDED = "(?:lost|crashed|killed by SIG[A-Z]+)"
"""State of a killed rank: since Linux 6.15 its signal is known. Its call fails if the other member
ends first."""


@dataclass(frozen=True)
class HangingJob:
    """A job that was started and does not end by itself."""

    tree: Path
    log: Path
    process: subprocess.Popen[bytes]
    environ: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Return what a command prints about the tree."""
        command, *rest = arguments
        done = run_in_process(command, self.tree, *rest, columns=160)
        return done.stdout + done.stderr

    def run_json(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON object that a command prints."""
        return json.loads(self.run(*arguments, "--json"))

    def wait_for(self, shows: Callable[[str], bool], *arguments: str) -> str:
        """Return what a command prints as soon as that is what is waited for."""
        return wait_until(lambda: self._run_beside(*arguments), shows, self.log)

    def _run_beside(self, *arguments: str) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return self.run(*arguments)

    def _read_log(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text()

    def wait_for_log(self, pattern: str) -> str:
        """Return the log of the job as soon as it has a match."""
        return wait_until(
            self._read_log, lambda text: re.search(pattern, text) is not None, self.log
        )

    def end(self) -> None:
        """End the job by its process id, and wait for it and for the daemon that it started."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(TIMEOUT_S)
        sockets = {each.agent.removeprefix("unix:") for each in read_tree_sessions(self.tree)}
        embedded = [each for each in sockets if "rankdump-of-" in each]
        wait_until(
            lambda: " ".join(filter(os.path.exists, embedded)), lambda left: not left, self.log
        )


def wait_until(read: Callable[[], str], shows: Callable[[str], bool], log: Path) -> str:
    """Read until it shows what is waited for."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not shows(text := read()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"not seen in time; last:\n{text}\nlog:\n{log.read_text()}")
        time.sleep(0.2)
    return text


@contextmanager
def start_job(folder: Path, case: str, *launcher: str, **environ: str) -> Generator[HangingJob]:
    """Start a job that dumps into a tree of that folder, and end it by its process id."""
    # A small slab is ready at once, also on a busy disk: a rank waits 2 s for it at most, and
    # without one its last events are missing when it is killed.
    config = write_data_dump(folder, folder / "tree", own={"buffer_bytes": 1 << 20})
    short = Path(tempfile.mkdtemp(prefix="rd-"))
    own = {
        **os.environ,
        "RANKDUMP_CONFIG": str(config),
        "TMPDIR": str(short),
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*launcher, str(SCRIPT), case],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=own,
        )
    job = HangingJob(folder / "tree", log, process, own)
    try:
        yield job
    finally:
        if process.poll() is None:
            job.end()
        shutil.rmtree(short, ignore_errors=True)


RUN = (sys.executable, "-m", "rankdump", "run", "--", *LAUNCHER)
DEADLOCK = (
    "iteration 2: deadlock: rank 0 waits in group '1' (all_reduce number 3, "
    "jobs/hanging_job.py:{first}) for rank 1, which waits in group '2' (all_reduce number 3, "
    "jobs/hanging_job.py:{first}) for rank 0; none of them can continue"
)


def find_line(text: str) -> int:
    """Return the number of the line of the job that contains a text."""
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_deadlock_over_two_groups_is_one_sentence_live_and_in_the_tree(tmp_path: Path) -> None:
    """Each command says which rank waits where for whom, and that no timeout cures it."""
    deadlock = DEADLOCK.format(first=find_line("group=first)"))
    with start_job(tmp_path, "groups", *RUN) as job:
        log = job.wait_for_log(re.escape("a longer timeout does not help"))
        status = job.wait_for(lambda text: "hangs" in text, "status")
        order, hints = job.run("order"), job.run("hints")
        view = job.run_json("status")
        job.end()
        log = job.log.read_text()
    first = next(line for line in log.splitlines() if line.startswith("rankdump: "))
    assert first.startswith(f"rankdump: tree {job.tree}, daemon at unix:")
    assert first.endswith(f"while it runs: rankdump status {job.tree}")
    assert log.count(f"rankdump: {deadlock}; a longer timeout does not help") == 1
    # The summary has the finding of the merge, and not the cause of the hint beside it.
    assert log.count(deadlock) == 2
    assert "timedelta" not in log

    assert len(re.findall(r"^ +[01] +hangs [0-9.]+ s ", status, re.MULTILINE)) == 2
    assert status.count(deadlock) == 1
    assert re.search(
        rf"rank 0 has waited since [0-9:]{{8}} \(.*\) in all_reduce number 3 of group '1' in "
        rf"iteration 2 at {SCRIPT}:\d+ for rank 1",
        status,
    )
    assert {(wait["rank"], wait["stuck"], *wait["absent"]) for wait in view["waits"]} == {
        (0, True, 1),
        (1, True, 0),
    }
    assert view["merges"][0]["unpublished"] == [2]
    assert {each["state"] for each in view["sessions"]} == {"open"}
    assert f"cycle, so far: {deadlock}" in order
    assert "iteration 2 is not published yet" in order
    assert "has no findings" not in order
    assert hints.count(f"a longer timeout does not help: {deadlock}") == 1
    assert "(waits)" in hints
    assert "timedelta" not in hints

    ended = re.findall(rf"^ +[01] +{ENDED} in iteration 2 ", job.run("status"), re.MULTILINE)
    assert len(ended) == 2
    assert f"cycle: {deadlock}" in job.run("order", "--findings")
    assert "(waits)" not in job.run("hints")


def test_mismatch_that_hangs_is_named_by_a_service_of_the_host(
    tmp_path: Path, socket_folder: Path
) -> None:
    """A daemon that outlives the job answers for the tree too; afterwards the tree does."""
    address = f"unix:{socket_folder / 'agent.sock'}"
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-m", "rankdumpd", "standalone"),
            *("--socket", str(socket_folder / "agent.sock")),
            *("--state-dir", str(tmp_path / "state")),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: str((socket_folder / "agent.sock").exists()),
            lambda text: text == "True",
            Path(os.devnull),
        )
        with start_job(tmp_path, "mismatch", *LAUNCHER, RANKDUMP_AGENT=address) as job:
            job.wait_for(lambda text: "hangs" in text, "status")
            log = job.wait_for_log("a longer timeout does not help")
            order = job.run("order", "--findings")
            job.end()
        after = wait_until(
            lambda: job.run("status"),
            lambda text: bool(re.search(f"{ENDED} in iteration 2", text)),
            job.log,
        )
        wait_until(
            lambda: job.run("order", "--findings"),
            lambda text: "operation_mismatch: iteration 2: " in text,
            job.log,
        )
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(TIMEOUT_S)
    assert "operation_mismatch, so far: iteration 2: members of" in order
    assert "broadcast on rank 0, scatter on rank 1" in order
    assert log.count("a longer timeout does not help") == 1
    assert not re.search(r"^ +[01] +closed", after, re.MULTILINE)
    assert "has waited" not in after
    assert re.search(r"^ +[0-9]+ +2 +0-1 +broadcast ", job.run("order"), re.MULTILINE)
    assert "operation_mismatch: iteration 2: " in job.run("order", "--findings")


def test_sleeping_rank_is_waited_for_and_no_deadlock_is_claimed(tmp_path: Path) -> None:
    """With plain torchrun the ranks bring the daemon along, and the tree names it too."""
    with start_job(tmp_path, "sleep", *TORCHRUN) as job:
        status = job.wait_for(lambda text: "waits" in text, "status")
        order, hints = job.run("order"), job.run("hints")
        job.end()
    assert re.search(r"^ +0 +waits [0-9.]+ s ", status, re.MULTILINE)
    assert re.search(r"^ +1 +open ", status, re.MULTILINE)
    line = find_line("all_reduce(torch.ones(8), group=groups[0])")
    assert f"in iteration 2 at {SCRIPT}:{line} for rank 1" in status
    assert "missing_member, so far: iteration 2: rank 1 has not arrived so far" in order
    assert "iteration 2 is not published yet" in order
    assert "rank 0 has waited" in hints
    for text in (status, order, hints, job.log.read_text()):
        assert "deadlock" not in text
        assert "does not help" not in text
    assert not re.search(r"^ +[01] +closed", job.run("status"), re.MULTILINE)


def test_wait_past_half_of_its_timeout_freezes_the_black_boxes(tmp_path: Path) -> None:
    """While the job hangs: the report names the collective, who is in it and who is not."""
    own = {"RANKDUMP_BLACKBOX": "1", "HANGING_JOB_TIMEOUT_S": "30"}
    with start_job(tmp_path, "sleep", *RUN, **own) as job:
        job.wait_for(lambda text: '"cause"' in text, "faults", "--json")
        report = job.run_json("faults")
        # The other rank sleeps as long as the timeout is, so the call has not failed.
        assert "Error" not in job.log.read_text()
        job.end()
    cause = report["cause"]
    assert (cause["kind"], cause["iteration"], cause["rank"]) == ("wait", 2, None)
    assert re.match(
        r"all_reduce '.*', number 3 of group '1', has waited 1[5-9][0-9.]* s since .* UTC; "
        r"arrived: rank 0; missing: rank 1; that is 5[0-9]% of the 30 s limit",
        cause["text"],
    )
    ends = {end["rank"]: end for end in report["ends"]}
    assert set(ends) == {0, 1}
    assert not report["absent"]
    [call] = report["standing_calls"]
    assert (call["kind"], call["group"], call["number"]) == ("all_reduce", "1", 3)
    assert (call["waiting"], call["missing"], call["unknown"]) == ([0], {"1": 3}, [])
    assert any("all_reduce" in stack for stack in ends[0]["stacks"])
    assert any("sleep_on_one_rank" in stack for stack in ends[1]["stacks"])

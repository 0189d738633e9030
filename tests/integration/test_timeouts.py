"""Ranks that wait for one another: hints before a timeout, and findings about absent ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from support.command_line import run_in_process

JOB = Path(__file__).parent / "jobs" / "four_ranks.py"
LAUNCHER = Path(__file__).parents[1] / "support" / "rank_launcher.py"
CONFIG = """{
  "common_dump_settings": {
    "dump_mode": 0, "path": "/tmp/unused", "net_name": "Four", "iteration": "1-3",
    "saved_data": "tensor", "input_output": 0, "kernels": [], "support_device": [0, 1, 2, 3]
  },
  "e2e_dump_settings": {"enable": true, "trans_flag": true}
}"""
PATIENCE_S = 90
HangingJob: TypeAlias = tuple[Path, "subprocess.Popen[str]"]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.serial]


@contextmanager
def running(
    case: str, folder: Path, *, timeout_s: float
) -> Generator[subprocess.Popen[str], None, None]:
    """Run the job under `rankdump run`, into folder/tree; its process group is killed
    afterwards.
    """
    config = folder / "data_dump.json"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "rankdump", "run", "--config", str(config)]
    command += ["--output", str(folder / "tree"), "--", sys.executable, str(LAUNCHER), "4"]
    command += [str(JOB), case, str(timeout_s), str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, text=True, start_new_session=True
        )
        try:
            yield job
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
                job.wait(PATIENCE_S)


def hints_of(tree: Path) -> list[dict[str, Any]]:
    """Return the hints in the file of a tree, as `rankdump hints` prints them."""
    done = run_in_process("hints", str(tree), "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)["hints"]


@pytest.mark.parametrize(("case", "culprit"), [("sleepy", 2), ("slow_dump", 1)])
def test_hint_names_the_late_rank_and_the_share_of_dumping(tmp_path: Path, case: str, culprit: int):
    """The dump does not cause the wait for a rank that sleeps, but that for a rank whose dump is
    slow.
    """
    with running(case, tmp_path, timeout_s=600) as job:
        assert job.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    hints = hints_of(tmp_path / "tree")
    late = next(h for h in hints if h["iteration"] == 2 and h["last_rank"] == culprit)
    assert late["backend"] == "gloo"
    assert late["spread_us"] >= 1_000_000
    caused = late["dump_us"] / late["spread_us"]
    assert caused < 0.2 if case == "sleepy" else caused > 0.8
    assert late["limit"]["limit_us"] == 600_000_000
    assert "group" in late["limit"]["source"]
    assert late["level"] == "ok"
    # The other members waited for it; nobody else was late by as much.
    assert late["first_rank"] != culprit


@pytest.fixture(scope="module")
def hanging(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, HangingJob]]:
    """Two jobs that mostly wait, started at once: folder and process by case.

    What is asked while a job hangs has to be asked first.
    """
    with ExitStack() as stack:
        found: dict[str, HangingJob] = {}
        for case, timeout_s in (("skips", 25), ("stuck_dump", 20)):
            folder = tmp_path_factory.mktemp(case)
            found[case] = folder, stack.enter_context(running(case, folder, timeout_s=timeout_s))
        yield found


def test_rank_that_skips_a_collective_is_named_while_others_hang(hanging: dict[str, HangingJob]):
    """The finding has rank, group, number, and the last operator that the rank executed."""
    folder, job = hanging["skips"]
    missing = named_while_hanging(folder, job)
    assert job.wait(PATIENCE_S) != 0
    check_missing(missing)
    assert missing["provisional"]
    final = run_in_process("order", str(folder / "tree"), "--findings", "--json")
    # In the end its launcher has ended the rank.
    ended = absence_in(final.stdout, "ended_rank")
    assert ended, (final.stdout, (folder / "log").read_text())
    check_missing(ended)
    said = run_in_process("order", str(folder / "tree"), "--findings")
    assert said.returncode == 1
    assert "ended_rank: iteration 2: the process of rank 3 ended after 'Default/" in said.stdout


def test_warning_is_logged_before_the_timeout(hanging: dict[str, HangingJob]):
    """When half of 20 s is used, waiting ranks log a warning with the line that sets the
    timeout.
    """
    folder, job = hanging["stuck_dump"]
    assert job.wait(PATIENCE_S) != 0
    log = (folder / "log").read_text()
    lines = log.splitlines()
    warned = [n for n, line in enumerate(lines) if "rank 1 is late" in line]
    struck = [n for n, line in enumerate(lines) if "timed out" in line.lower()]
    assert warned, log
    assert struck, log
    assert warned[0] < struck[0], log
    # All four ranks are told; one of them says it.
    assert len({lines[n] for n in warned}) == len(warned), log
    first = lines[warned[0]]
    assert "50% of the 20 s" in first
    assert "dumping causes most of it" in first
    assert "; set init_process_group(..., timeout=timedelta(seconds=" in first.replace(
        "new_group(", "init_process_group("
    )


def check_missing(finding: dict[str, Any]) -> None:
    assert finding["ranks"] == [3]
    assert finding["iteration"] == 2
    # Its own sub-group comes first; two calls of it were before.
    assert finding["sequence"] == 2
    assert finding["group"] not in ("", "0")
    assert "Linear-op" in finding["name"]
    for part in ("rank 3", finding["name"], f"{finding['group']!r}", "number 2"):
        assert part in finding["text"]


def absence_in(text: str, kind: str = "missing_member") -> dict[str, Any] | None:
    """Return the finding that rank 3 is absent from its sub-group, which keeps rank 2 from the next
    call.
    """
    for finding in json.loads(text)["findings"] if text else ():
        who = finding["kind"], finding["ranks"], finding["iteration"]
        if who == (kind, [3], 2) and finding["group"] != "0":
            return finding
    return None


def named_while_hanging(folder: Path, job: subprocess.Popen[str]) -> dict[str, Any]:
    """Ask the coordinator until it names the missing rank, while the job runs."""
    deadline = time.monotonic() + PATIENCE_S
    address = folder / "address_0"
    while time.monotonic() < deadline:
        assert job.poll() is None, (folder / "log").read_text()
        if address.exists() and address.read_text():
            asked = ("order", "--coordinator", address.read_text(), "--findings", "--json")
            found = absence_in(run_in_process(*asked).stdout)
            if found:
                return found
        time.sleep(0.5)
    raise AssertionError("nobody was named")

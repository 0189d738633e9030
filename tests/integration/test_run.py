"""`rankdump run` with a real daemon, real processes and real files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rankdump.reader import load, status, walk

JOB = Path(__file__).parent / "jobs" / "arrays.py"
BOTH_RANKS = f"{sys.executable} {JOB} 0 3 && {sys.executable} {JOB} 1 3"


@pytest.fixture
def config(tmp_path):
    """A configuration that selects the first two of three iterations."""
    return written(tmp_path / "data_dump.json")


def written(path: Path, **common) -> Path:
    settings = {
        "dump_mode": 0,
        "path": "/nowhere/unless/overridden",
        "net_name": "Net",
        "iteration": "0-1",
        "saved_data": "tensor",
        "input_output": 0,
        "kernels": [],
        "support_device": [0, 1],
    }
    e2e = {"enable": True, "trans_flag": True}
    body = {"common_dump_settings": settings | common, "e2e_dump_settings": e2e}
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def start(tmp_path, socket_folder):
    """Start `rankdump run` on a command, with a folder of its own for temporary files."""

    def started(config: Path, *command, **environ) -> subprocess.Popen[str]:
        arguments = ["run", "--config", config, "--output", tmp_path / "tree", "--", *command]
        return subprocess.Popen(
            [sys.executable, "-m", "rankdump", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(socket_folder), **environ},
        )

    return started


LONG_JOB = """
import pathlib, sys, time
import numpy as np
import rankdump
session = rankdump.Session.from_environment()
session.step(0)
session.dump("Op", "Default/Op-op0", "output", 0, np.ones(2))
session.step(1)
session.dump("Op", "Default/Op-op0", "output", 0, np.zeros(2))
ready, go = map(pathlib.Path, sys.argv[1:])
ready.touch()
while not go.exists():
    time.sleep(0.05)
"""


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


def test_run_dumps_all_selected_tensors(config, start, tmp_path, socket_folder):
    """The tree has the selected iterations of both ranks exactly; the output is the job's alone."""
    code, out, err = ended(start(config, "sh", "-c", BOTH_RANKS))
    assert code == 0, err
    assert out == "rank 0 is done\nrank 1 is done\n"
    tree = walk(tmp_path / "tree")
    places = [(e.key.rank, e.key.iteration, e.key.slot) for e in tree.entries]
    assert places == [(r, i, s) for r in (0, 1) for i in (0, 1) for s in (0, 1)]
    for entry, (rank, iteration, slot) in zip(tree.entries, places, strict=True):
        np.testing.assert_array_equal(load(entry), rank * 100 + iteration * 10 + slot)
    assert tree.problems == ()
    view = status(tmp_path / "tree")
    assert all(i.complete and i.is_balanced for i in view.iterations)
    assert view.findings == ()
    rows = [line.split() for line in err.splitlines()]
    assert ["0", "2/3", "4"] in [row[:3] for row in rows]
    assert ["all", "4/6", "8"] in [row[:3] for row in rows]
    assert str(tmp_path / "tree") in err
    assert list(socket_folder.iterdir()) == []


def test_run_returns_the_exit_code_of_the_job(config, start):
    """A failing job has the exit code that it has alone, and its dump is kept."""
    code, _, err = ended(start(config, sys.executable, JOB, 0, 1, 5))
    assert code == 5
    assert ["0", "1/1", "2"] in [line.split()[:3] for line in err.splitlines()]


@pytest.mark.parametrize(
    ("script", "code", "cause"),
    [
        ("pass", 0, "never opened a session (rankdump.attach, "),
        ("raise SystemExit(9)", 9, "code 9 before"),
    ],
)
def test_run_reports_the_likely_cause_of_an_empty_dump(config, start, script, code, cause):
    """The summary names the likely cause."""
    returned, _, err = ended(start(config, sys.executable, "-c", script))
    assert returned == code
    assert "no rank connected" in err
    assert cause in err


def test_run_names_the_cause_that_its_daemon_rejected_ranks_for(config, start):
    """And does not guess."""
    script = """
import os, rankdump
os.environ["RANKDUMP_OUTPUT"] = "/proc/tree"
for rank in "01":
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2"}
    session = rankdump.Session.from_environment()
    session.step(0)
    session.dump("Op", "Default/Op-op0", "output", 0, [1.0])
    session.close()
"""
    _, _, err = ended(start(config, sys.executable, "-c", script))
    start_of_cause = "no rank connected: ranks 0-1 were rejected: output root '/proc/tree' cannot "
    assert err.splitlines()[-1].startswith(start_of_cause)


@pytest.mark.parametrize("more", [(), ("--twice",)])
def test_run_does_not_start_a_job_whose_tree_cannot_be_written(config, start, tmp_path, more):
    """One line and the code of other configuration errors, instead of hours without a dump."""
    ran = tmp_path / "ran"
    body = json.loads(config.read_text())
    body["common_dump_settings"]["path"] = "/proc/tree"
    config.write_text(json.dumps(body))
    done = subprocess.run(
        [sys.executable, "-m", "rankdump", "run", "--config", config, *more, "--", "touch", ran],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("rankdump: tree /proc/tree")
    assert "cannot be written: /proc: " in line
    assert not ran.exists()


def test_excluded_rank_logs_the_setting_that_excludes_it(start, tmp_path):
    """The log of the rank names the setting."""
    config = written(tmp_path / "other.json", support_device=[5])
    code, _, err = ended(start(config, sys.executable, JOB, 0, 1))
    assert code == 0
    assert "rank 0: nothing dumped: support_device [5] excludes this rank's device 0" in err


def test_run_with_a_wrong_configuration_starts_no_job(start, tmp_path):
    """The exit code is 2, with one line."""
    config = written(tmp_path / "wrong.json", input_output=7)
    marker = tmp_path / "started"
    code, out, err = ended(start(config, "touch", marker))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "input_output: 7 is not allowed" in err
    assert not marker.exists()


@pytest.mark.parametrize(("command", "code"), [("no-such-command-here", 127), ("/dev/null", 126)])
def test_run_returns_shell_codes_for_commands_that_cannot_start(
    config, start, command, code, socket_folder
):
    """The codes are those of a shell, with one line that names the command."""
    returned, _, err = ended(start(config, command))
    assert returned == code
    assert f"rankdump: {command}: " in err
    assert list(socket_folder.iterdir()) == []


def test_run_returns_three_when_the_daemon_cannot_start(config, start, tmp_path):
    """The last line of its log is shown, the log is kept, and the job is not started."""
    marker = tmp_path / "started"
    process = start(config, "touch", marker, RANKDUMPD_AGENT__QUEUE_BYTES="many")
    code, _, err = ended(process)
    assert code == 3
    assert "QUEUE_BYTES" in err
    assert not marker.exists()
    (log,) = re.findall("log file of the daemon: (.*)", err)
    assert "QUEUE_BYTES" in Path(log).read_text()


def until(condition, timeout_s=60.0):
    """Wait until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def daemon_of(process: subprocess.Popen[str]) -> int:
    """Return the process id of the embedded daemon."""

    def found() -> int:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"rankdumpd" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        return 0

    return until(found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_run_stops_the_job_and_keeps_the_dump(config, start, tmp_path, number):
    """The signal reaches the job, its dump is in the tree, and no process remains."""
    ready = tmp_path / "ready"
    # The shell waits for its child, and leaves by a trap: its code shows that it heard.
    trap = "trap 'kill $child; exit 42' TERM INT"
    script = f"{trap}; {sys.executable} {JOB} 0 2; touch {ready}; sleep 60 & child=$!; wait $child"
    process = start(config, "sh", "-c", script)
    daemon = daemon_of(process)
    until(ready.exists)
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 42, err
    assert ["0", "2/2", "4"] in [line.split()[:3] for line in err.splitlines()]
    until(lambda: not alive(daemon))


def test_killed_daemon_does_not_fail_the_job(config, start, tmp_path):
    """The job ends as without it; the summary is read from the tree and says so."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    script = f"{sys.executable} {JOB} 0 2; touch {ready}; {wait}; echo the job ends"
    process = start(config, "sh", "-c", script)
    daemon = daemon_of(process)
    until(ready.exists)
    os.kill(daemon, signal.SIGKILL)
    until(lambda: not alive(daemon))
    go.touch()
    code, out, err = ended(process)
    assert code == 0
    assert out.endswith("the job ends\n")
    assert "read from the tree" in err
    assert "was ended by signal 9" in err
    assert ["0", "2/2", "4"] in [line.split()[:3] for line in err.splitlines()]


def test_killed_run_leaves_no_daemon_and_no_shared_memory(config, start, socket_folder):
    """`rankdump run` is killed while no rank of the job is connected."""
    process = start(config, "sleep", "600")
    until(lambda: list(socket_folder.glob("*/agent.sock")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(60)
    until(lambda: not list(socket_folder.iterdir()))
    for child in children:  # the job is the user's: only the daemon is ours to end
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGTERM)
    process.communicate(timeout=60)


def test_job_that_outlives_a_killed_run_is_dumped_to_its_end(
    config, start, tmp_path, socket_folder
):
    """The daemon continues until the last rank has left, then removes its folder."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    process = start(config, sys.executable, "-c", LONG_JOB, ready, go)
    until(ready.exists)
    process.kill()
    process.wait(60)
    assert list(socket_folder.iterdir())
    go.touch()
    process.communicate(timeout=60)
    until(lambda: not list(socket_folder.iterdir()))
    found = status(tmp_path / "tree")
    assert [(i.iteration, i.stored, i.complete) for i in found.iterations] == [
        (0, 1, True),
        (1, 1, True),
    ]


def test_run_warns_about_an_acl_file_that_enables_nothing(start, tmp_path):
    """It is no error, as in CANN; the warning is printed before the job and after it."""
    path = tmp_path / "acl.json"
    path.write_text('{"dump": {}}')
    code, _, err = ended(start(path, sys.executable, JOB, 0, 1))
    assert code == 0
    assert "rankdump: warning: dump: {} enables nothing" in err
    assert "no rank connected: the configuration enables no dump" in err


def test_run_removes_mindspores_own_dump_variable(config, start, tmp_path):
    """It is removed if it names rankdump's own file, because MindSpore would dump as well."""
    shown = "import os; print(os.environ.get('MINDSPORE_DUMP_CONFIG'))"
    other = tmp_path / "native.json"
    other.write_text(config.read_text().replace("/nowhere/unless/overridden", "/nowhere/else"))
    for named, expected in ((config, "None"), (other, str(other))):
        process = start(config, sys.executable, "-c", shown, MINDSPORE_DUMP_CONFIG=str(named))
        _, out, err = ended(process)
        assert out.strip() == expected
        assert ("MINDSPORE_DUMP_CONFIG is removed from the environment" in err) == (named == config)

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rankdump._cli import run
from rankdump._cli.run import exit_on_signals, run_job
from rankdump._core.status import StatusView


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (python("pass"), 0),
        (python("raise SystemExit(7)"), 7),
        (python("import os; os.kill(os.getpid(), 9)"), 137),
        (["rankdump-no-such-command"], 127),
        (["/dev/null"], 126),
    ],
)
def test_run_job_returns_the_code_of_the_command(command, code):
    """As a shell says it: the command's, 128 + n after a signal, 126 and 127 when not started."""
    assert run_job(command, os.environ) == code


def test_run_job_passes_environment_and_streams(capfd):
    """What it prints stays on its own streams."""
    code = "import os, sys; print(os.environ['X']); print('e', file=sys.stderr)"
    assert run_job(python(code), {**os.environ, "X": "armed"}) == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("armed\n", "e\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_job_forwards_signals(number, tmp_path):
    """Whoever stops rankdump stops the job; we live on to say what was collected."""
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)"
    )

    def send():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(number)
    # Not from a terminal: its own Ctrl-C reaches the job without us.
    assert run_job(python(code), os.environ) == 42
    sender.join()
    assert signal.getsignal(number) is before


def test_exit_on_signals_runs_every_finally(tmp_path):
    """SIGTERM while the daemon starts or drains runs every `finally`."""
    code = (
        "import os, signal\n"
        "from rankdump._cli.run import exit_on_signals\n"
        "with exit_on_signals():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
    )
    done = subprocess.run(python(code), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")


def test_handle_signals_keeps_ignored_signals():
    """A job under nohup is not ended by a hang-up."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_summary_names_ranks_that_never_connected(capsys):
    """The agent has forgotten their sessions, as nothing of them is in the tree."""
    absent = "rank 0 (process 7 on host a) opened its session and never connected"
    run._print_summary(StatusView(findings=(absent,)), None, 1, daemon_died=False)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("no rank connected: no configuration")
    assert second == absent

"""Worker process: start, drain, kill, and settings that prevent its start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rankdump.errors import UnavailableError
from rankdumpd.workers.worker_process import WorkerProcess

WAIT_S = 300


@pytest.fixture
def environ(socket_folder: Path) -> Mapping[str, str]:
    own = {"LISTEN": f"unix:{socket_folder}/a.sock", "STATE_DIR": f"{socket_folder}/state"}
    return {**os.environ, **{f"RANKDUMPD_AGENT__{key}": text for key, text in own.items()}}


@pytest.fixture
def worker(socket_folder: Path, environ) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(7, folder=socket_folder, environ=environ)
    yield worker
    worker.stop()
    worker.stop()


def test_worker_process_starts_and_drains(worker: WorkerProcess, socket_folder: Path):
    worker.start()
    worker.wait_ready()
    assert worker.address == f"unix:{socket_folder}/a.sock"
    assert worker.findings() == []
    worker.request_drain()
    assert worker.wait_drained(WAIT_S) == 0
    with pytest.raises(UnavailableError):
        _ = worker.address


def test_worker_process_that_cannot_start_raises(socket_folder: Path, environ):
    worker = WorkerProcess(
        0, folder=socket_folder, environ=environ | {"RANKDUMPD_AGENT__LISTEN": "x"}
    )
    worker.start()
    with pytest.raises(UnavailableError, match="worker 0 does not start: it ended with code 2"):
        worker.wait_ready()
    worker.stop()


def test_worker_process_that_cannot_run_reports_cause(socket_folder: Path, environ):
    worker = WorkerProcess(0, folder=socket_folder / "none", environ=environ)
    worker.start()
    with pytest.raises(UnavailableError, match="could not be run:"):
        worker.wait_ready()
    worker.stop()


def test_worker_process_killed_during_drain_counts_one_item(worker: WorkerProcess, monkeypatch):
    worker.start()
    worker.wait_ready()
    process = worker._process
    assert process is not None
    monkeypatch.setattr("rankdumpd.server.worker_pipe.request_drain", lambda _process: None)
    worker.request_drain()
    process.send_signal(signal.SIGKILL)
    assert worker.wait_drained(WAIT_S) == 1


def test_worker_process_that_hangs_is_killed(worker: WorkerProcess, monkeypatch):
    worker.start()
    worker.wait_ready()
    assert worker._process is not None
    worker._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("rankdumpd.workers.worker_process._KILL_AFTER_S", 0.1)
    worker.stop()
    assert worker.wait_drained(WAIT_S) == 1


def test_worker_process_stop_without_start(worker: WorkerProcess):
    """The fixture stops the worker, as a supervisor does that failed before it started workers."""

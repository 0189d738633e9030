"""Clients of workers that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.status import StatusView
from rankdump.errors import UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.workers.clients import WorkerClients
from rankdumpd.workers.worker_process import WorkerProcess


class RestartingWorker(WorkerProcess):
    """Worker that is being restarted."""

    @property
    def address(self) -> str:
        raise UnavailableError("worker 0 is being restarted: it ended with code 1")

    def wait_up(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def findings(self) -> list[str]:
        return ["worker 0 was restarted once; the last process ended with code 1"]


class UnreachableWorker(WorkerProcess):
    """Worker at whose address no server listens."""

    @property
    def address(self) -> str:
        return f"unix:{self._folder}/nobody"

    def wait_up(self, timeout_s: float) -> None:
        assert timeout_s > 0


@pytest.fixture
def restarting(socket_folder: Path) -> RestartingWorker:
    return RestartingWorker(0, folder=socket_folder, environ={})


@pytest.fixture
def unreachable(socket_folder: Path) -> UnreachableWorker:
    return UnreachableWorker(1, folder=socket_folder, environ={})


def test_view_has_finding_for_worker_without_answer(restarting, unreachable):
    view = WorkerClients([restarting, unreachable]).collect_view()
    assert view == StatusView(findings=view.findings)
    history, restarts, unanswered = view.findings
    assert history == "worker 0 was restarted once; the last process ended with code 1"
    assert restarts.startswith(
        "worker 0 does not answer, and this status lacks its ranks: worker 0 is being restarted"
    )
    assert unanswered.startswith("worker 1 does not answer, and this status lacks its ranks: ")


def test_drain_counts_worker_without_answer_as_unfinished(restarting, unreachable):
    assert WorkerClients([restarting, unreachable]).drain_workers(0.2) == 2


def test_pin_fails_for_worker_without_answer(unreachable):
    with pytest.raises(UnavailableError):
        WorkerClients([unreachable]).pin_job(agent_pb2.Pin(job_id="job", pinned=True))

"""Asking workers of which some do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.status import StatusView
from rankdump.errors import UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.workers.clients import WorkerClients


class Away:
    """A worker that is being started again."""

    index = 0

    @property
    def address(self) -> str:
        raise UnavailableError("worker 0 is being restarted: it ended with code 1")

    def wait_up(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def findings(self) -> list[str]:
        return ["worker 0 was restarted once; the last process ended with code 1"]


class Deaf:
    """A worker at whose address nobody answers."""

    index = 1

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/nobody"

    def wait_up(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def findings(self) -> list[str]:
        return []


def test_view_has_finding_for_worker_without_answer(socket_folder: Path):
    view = WorkerClients([Away(), Deaf(socket_folder)]).collect_view()
    assert view == StatusView(findings=view.findings)
    history, away, deaf = view.findings
    assert history == "worker 0 was restarted once; the last process ended with code 1"
    assert away.startswith(
        "worker 0 does not answer, and this status lacks its ranks: worker 0 is being restarted"
    )
    assert deaf.startswith("worker 1 does not answer, and this status lacks its ranks: ")


def test_drain_counts_worker_without_answer_as_unfinished(socket_folder: Path):
    assert WorkerClients([Away(), Deaf(socket_folder)]).drain_workers(0.2) == 2


def test_pin_fails_for_worker_without_answer(socket_folder: Path):
    with pytest.raises(UnavailableError):
        WorkerClients([Deaf(socket_folder)]).pin_job(agent_pb2.Pin(job_id="job", pinned=True))

"""Order on a full disk: it is published once there is space, and nothing is lost."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
from support.slab_agents import wait_until

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.status import EventSource, IterationStatus, SessionState, SessionStatus
from rankdumpd.coordinator.fleet_views import AgentReport
from rankdumpd.coordinator.publish import tree_files
from rankdumpd.coordinator.service import coordinator as service
from rankdumpd.coordinator.service import publication
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.settings import CoordinatorSettings


def report(number: int, job: str, iteration: int, root: Path) -> AgentReport:
    """Return a complete iteration of the only rank of a job."""
    who = SessionStatus(job, f"s-{job}", 0, 1, 0, "here", 1, SessionState.OPEN)
    event = RankEvent(0, iteration, 0, 0, f"Default/op{iteration}", EventKind.OPERATOR, 1, 2)
    source = EventSource(job, 0, f"s-{job}")
    return AgentReport(
        agent_id=f"agent-{job}",
        sequence=number,
        host="here",
        roots={job: str(root)},
        sessions=(who,),
        iterations=(IterationStatus(job, f"s-{job}", 0, iteration, True),),
        events=((source, EventColumns.from_events([event])),),
    )


@pytest.fixture
def disk(monkeypatch):
    """An error of the disk of the first job's tree; waiting work is tried again at once."""
    faults: dict[str, int] = {}
    real = os.open

    def opened(path, flags, *args, **named):
        for folder, code in faults.items():
            if flags & (os.O_CREAT | os.O_RDWR) and os.fspath(path).startswith(folder):
                raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **named)

    monkeypatch.setattr(publication, "MIN_PUBLISH_RETRY_S", 0.01)
    monkeypatch.setattr(os, "open", opened)
    return faults


@pytest.fixture
def coordinator(tmp_path):
    settings = CoordinatorSettings(listen="127.0.0.1:0", state_dir=str(tmp_path / "state"))
    coordinator = JobCoordinator(settings)
    coordinator.start()
    yield coordinator
    coordinator.stop()


def names(root: Path) -> list[str]:
    path = root / "global_execution_order" / "execution_order_graph_0.csv"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [name for line in lines for name in line.split(",") if name.startswith("Default/")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_order_waits_for_its_full_disk_alone(coordinator, disk, tmp_path, code):
    full, free = tmp_path / "full", tmp_path / "free"
    disk[str(full)] = code
    coordinator.add_report(report(3, "a", 0, full))
    coordinator.add_report(report(6, "a", 1, full))
    coordinator.add_report(report(3, "b", 0, free))
    wait_until(lambda: names(free) == ["Default/op0"])
    wait_until(lambda: coordinator.problem)
    assert coordinator.problem.startswith("job a: its order cannot be written and is tried again")
    assert os.strerror(code) in coordinator.problem
    assert coordinator.add_report(AgentReport("agent-a", 0)).acknowledged == 0
    assert coordinator.drain(0) == 2
    disk.clear()
    wait_until(lambda: names(full) == ["Default/op0", "Default/op1"])
    wait_until(lambda: not coordinator.problem)
    wait_until(lambda: coordinator.add_report(AgentReport("agent-a", 0)).acknowledged == 6)
    assert list(coordinator.iter_findings("a")) == []
    assert coordinator.drain(0) == 0


def test_reports_do_not_wait_for_a_full_disk(coordinator, disk, tmp_path, monkeypatch):
    """States and other jobs follow in the same stream as the events that cannot be written."""
    disk[str(tmp_path)] = errno.ENOSPC
    monkeypatch.setattr(service, "_REPORT_ANSWER_TIMEOUT_S", math.inf)
    coordinator.add_report(report(3, "a", 0, tmp_path))
    wait_until(lambda: coordinator.problem)
    for number in range(1, 4):
        coordinator.add_report(report(3 * number + 3, "a", number, tmp_path))
    (job,) = coordinator.build_fleet_view().jobs.values()
    assert [balance.iteration for balance in job.iterations] == [0, 1, 2, 3]
    assert coordinator.add_report(AgentReport("agent-a", 0)).acknowledged == 0


def test_permanent_disk_error_loses_the_order_and_is_reported(coordinator, disk, tmp_path):
    disk[str(tmp_path / "closed")] = errno.EACCES
    coordinator.add_report(report(3, "a", 0, tmp_path / "closed"))
    wait_until(lambda: list(coordinator.iter_findings("a")))
    assert coordinator.problem == ""


def test_published_file_is_never_shorter_than_the_state(tmp_path, monkeypatch):
    """After a power loss a file has at least the size that the state records."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append(os.fstat(opened).st_size))
    assert tree_files.append_chunks(tmp_path / "f", [b"one", b"two"], size_bytes=0) == 6
    assert synced == [6]

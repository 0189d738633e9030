"""A real coordinator on a Unix socket, spoken to by agents that are only their messages."""

from __future__ import annotations

import csv
import queue
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.order import FINDINGS_FILE, ORDER_FILE, ORDER_FOLDER
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.wire.events import events_to_wire
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rankdump.wire.views import (
    entry_from_wire,
    hint_from_wire,
    iteration_to_wire,
    session_to_wire,
    view_from_wire,
)
from rankdumpd.coordinator import service
from rankdumpd.coordinator.service import Coordinator

Parts: TypeAlias = dict[str, Any]
WORLD = ProcessGroup("world", (0, 1))
PATIENCE_S = 60.0


class FakeAgent:
    """One agent's report stream: says one report, waits for its acknowledgement."""

    def __init__(self, stub: CoordinatorServiceStub, agent_id: str) -> None:
        self.agent_id = agent_id
        self.sequence = 0
        self._outbox: queue.Queue[pb.ReportRequest | None] = queue.Queue()
        self.stream = stub.Report(iter(self._outbox.get, None), timeout=PATIENCE_S)

    def report(self, *, sequence: int | None = None, **parts: Any) -> int:
        self.sequence = self.sequence + 1 if sequence is None else sequence
        self._outbox.put(pb.ReportRequest(agent_id=self.agent_id, sequence=self.sequence, **parts))
        return next(self.stream).acknowledged_sequence

    def close(self) -> None:
        self._outbox.put(None)


@pytest.fixture
def socket() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="rd-")
    yield f"unix:{folder}/c.sock"
    shutil.rmtree(folder)


@pytest.fixture
def served(socket) -> Iterator[tuple[Coordinator, CoordinatorServiceStub]]:
    coordinator = Coordinator(deadline_s=3600.0)
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        coordinator.register(server)
        server.add_insecure_port(socket)
        coordinator.start()
        server.start()
        with grpc.insecure_channel(socket) as channel:
            yield coordinator, CoordinatorServiceStub(channel)
        server.stop(None).wait()
    coordinator.stop()
    coordinator.stop()


def program(rank: int, iteration: int, *, calls: int = 1, delay_us: int = 0) -> EventColumns:
    events = [Event(0, iteration, 1, 1, "Default/Add-op1", EventKind.OPERATOR, 10, 20)]
    for at in range(2, calls + 2):
        start = 100 * at + delay_us
        events.append(
            Event(0, iteration, at, at, "AllReduce", EventKind.ALL_REDUCE, start, start + 5,
                  group="world", sequence=at, element_count=8, dtype="float32")
        )  # fmt: skip
    return EventColumns.of(events, (WORLD,))


def parts(rank: int, iteration: int, columns: EventColumns, root: Path, job: str = "job") -> Parts:
    session = SessionStatus(job, f"s{rank}", rank, 2, rank, "host", 1, SessionState.OPEN)
    done = IterationStatus(job, f"s{rank}", rank, iteration, True, expected=3, stored=3)
    events = pb.RankEvents(job_id=job, rank=rank, columns=events_to_wire(columns))
    return {
        "sessions": [session_to_wire(session)],
        "iterations": [iteration_to_wire(done)],
        "events": [events],
        "roots": {job: str(root)},
    }


def rows(root: Path) -> list[dict[str, str]]:
    with (root / ORDER_FOLDER / ORDER_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


def ordered(stub: CoordinatorServiceStub, **request):
    pages = list(stub.Order(pb.OrderRequest(**request), timeout=PATIENCE_S))
    assert all(len(page.entries) <= 1000 for page in pages)
    entries = [entry_from_wire(entry) for page in pages for entry in page.entries]
    return entries, [finding.text for page in pages for finding in page.findings]


def wait_until(true) -> None:
    """Return once something has become true; the test's own time limit ends it otherwise."""
    while not true():
        threading.Event().wait(0.02)


def test_two_agents_become_one_order(served, tmp_path) -> None:
    """Order, status and hints answer over gRPC, and the same order stands on disk."""
    coordinator, stub = served
    assert coordinator.service_names == ("rankdump.wire.v1.CoordinatorService",)
    one, two = FakeAgent(stub, "one"), FakeAgent(stub, "two")
    assert one.report(**parts(0, 4, program(0, 4), tmp_path)) == 1

    entries, findings = ordered(stub)
    assert [entry.ranks for entry in entries] == [(0,), (0,)]  # gathered, not yet published
    assert findings == []
    assert not (tmp_path / ORDER_FOLDER).exists()

    late = parts(1, 4, program(1, 4, delay_us=2500), tmp_path)
    assert two.report(**late) == 1
    wait_until(lambda: coordinator.fleet().jobs["job"].hints)
    assert [(row["position"], row["ranks"], row["kind"]) for row in rows(tmp_path)] == [
        ("0", "0", "OPERATOR"),
        ("1", "1", "OPERATOR"),
        ("2", "0 1", "ALL_REDUCE"),
    ]
    entries, findings = ordered(stub, job_id="job")
    assert [entry.ranks for entry in entries] == [(0,), (1,), (0, 1)]
    assert findings == []
    assert not (tmp_path / ORDER_FOLDER / FINDINGS_FILE).exists()

    (hint,) = stub.Hints(pb.HintsRequest(), timeout=PATIENCE_S).hints
    assert (hint.spread_us, hint.first_rank, hint.last_rank) == (2500, 0, 1)
    assert "2.500 ms" in hint_from_wire(hint).reason

    status = stub.Status(pb.CoordinatorStatusRequest(), timeout=PATIENCE_S)
    view = view_from_wire(status.view)
    assert {session.rank for session in view.sessions} == {0, 1}
    assert sum(balance.stored for balance in view.iterations) == 6
    assert (view.roots, view.findings) == ((str(tmp_path),), ())
    one.close()
    two.close()


def test_a_report_sent_again_is_taken_once(served, tmp_path) -> None:
    """After a reconnect the agent repeats itself: acknowledged, and nothing is double."""
    _, stub = served
    first = FakeAgent(stub, "one")
    message = parts(0, 0, program(0, 0), tmp_path)
    assert first.report(**message) == 1
    first.stream.cancel()
    second = FakeAgent(stub, "one")
    assert second.report(sequence=1, **message) == 1
    assert second.report(sequence=2) == 2
    assert len(ordered(stub)[0]) == 2
    second.close()


def test_a_malformed_report_ends_its_own_stream_only(served, tmp_path) -> None:
    """INVALID_ARGUMENT with the fault for one agent; the other does not notice."""
    _, stub = served
    good, bad = FakeAgent(stub, "good"), FakeAgent(stub, "bad")
    assert good.report(**parts(0, 0, program(0, 0), tmp_path)) == 1
    message = parts(1, 0, program(1, 0), tmp_path)
    message["events"][0].columns.count = 9
    with pytest.raises(grpc.RpcError) as caught:
        bad.report(**message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes of positions" in str(caught.value.details())
    assert good.report() == 2
    view = stub.Status(pb.CoordinatorStatusRequest(), timeout=PATIENCE_S).view
    assert [session.rank for session in view.sessions] == [0]  # nothing of the bad one was taken
    good.close()
    bad.close()


def test_jobs_are_apart_and_an_unknown_one_is_refused(served, tmp_path) -> None:
    """The order asked for without a job is that of the job that reported last."""
    _, stub = served
    calls = (
        lambda job: list(stub.Order(pb.OrderRequest(job_id=job), timeout=PATIENCE_S)),
        lambda job: stub.Hints(pb.HintsRequest(job_id=job), timeout=PATIENCE_S),
        lambda job: stub.Status(pb.CoordinatorStatusRequest(job_id=job), timeout=PATIENCE_S),
    )
    with pytest.raises(grpc.RpcError) as caught:
        ordered(stub)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    agent = FakeAgent(stub, "one")
    agent.report(**parts(0, 3, program(0, 3), tmp_path / "a", job="a"))
    agent.report(**parts(0, 5, program(0, 5), tmp_path / "b", job="b"))
    assert {entry.iteration for entry in ordered(stub)[0]} == {5}
    assert {entry.iteration for entry in ordered(stub, job_id="a")[0]} == {3}
    for call in calls:
        call("a")
        with pytest.raises(grpc.RpcError) as caught:
            call("nobody")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "'nobody'" in str(caught.value.details())
    agent.close()


def test_a_long_order_comes_in_pages_and_one_graph_can_be_chosen(served, tmp_path) -> None:
    """Positions run on over pages; another graph's entries are left out when asked."""
    _, stub = served
    agent = FakeAgent(stub, "one")
    agent.report(**parts(0, 0, program(0, 0, calls=2500), tmp_path))
    entries, _ = ordered(stub)
    assert [entry.position for entry in entries] == list(range(2501))
    assert ordered(stub, graph=1)[0] == []
    agent.close()


def test_drain_publishes_what_is_gathered_and_says_who_was_missing(served, tmp_path) -> None:
    """At the end half an iteration is better than none, and marked as such."""
    coordinator, stub = served
    agent = FakeAgent(stub, "one")
    agent.report(**parts(0, 8, program(0, 8), tmp_path))
    assert coordinator.drain(PATIENCE_S) == 0
    assert [row["missing"] for row in rows(tmp_path)] == ["", "1"]
    findings = (tmp_path / ORDER_FOLDER / FINDINGS_FILE).read_text().splitlines()
    assert any("merged before rank 1 had finished it" in finding for finding in findings)
    assert any("rank 1 reported nothing" in finding for finding in findings)
    assert ordered(stub)[1] == findings
    assert coordinator.drain(PATIENCE_S) == 0
    agent.close()


def test_what_cannot_be_published_is_counted_and_said(served, tmp_path) -> None:
    """A tree that cannot be written costs its own job only."""
    coordinator, stub = served
    (tmp_path / "file").write_text("")
    agent = FakeAgent(stub, "one")
    agent.report(**parts(0, 0, program(0, 0), tmp_path / "file", job="bad"))
    agent.report(**parts(0, 0, program(0, 0), tmp_path / "fine", job="good"))
    assert coordinator.drain(PATIENCE_S) == 1
    assert len(rows(tmp_path / "fine")) == 2
    view = stub.Status(pb.CoordinatorStatusRequest(job_id="bad")).view
    assert any("2 entries could not be published" in finding for finding in view.findings)
    agent.close()


def test_an_iteration_that_breaks_the_merge_does_not_take_others_along(
    served, tmp_path, monkeypatch
) -> None:
    """A fault in the merge itself loses one iteration, counted and said; the next one is fine."""
    coordinator, stub = served
    real = service.merge

    def broken_for_one(view):
        if view.iteration == 1:
            raise IndexError("a bug")
        return real(view)

    monkeypatch.setattr(service, "merge", broken_for_one)
    agent = FakeAgent(stub, "one")
    agent.report(**parts(0, 1, program(0, 1), tmp_path))
    agent.report(**parts(0, 2, program(0, 2), tmp_path))
    assert coordinator.drain(PATIENCE_S) == 1
    assert {row["iteration"] for row in rows(tmp_path)} == {"2"}
    assert any("iteration 1: its events are lost" in found for found in ordered(stub)[1])
    agent.close()


def test_a_coordinator_that_never_started_can_be_drained_and_stopped() -> None:
    """stop is safe without start, and twice."""
    coordinator = Coordinator(deadline_s=1.0)
    assert coordinator.drain(0.0) == 0
    coordinator.stop()
    coordinator.stop()

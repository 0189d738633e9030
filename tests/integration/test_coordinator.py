"""Coordinator on a Unix socket, with simulated agents."""

from __future__ import annotations

import csv
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.coordinator_host import CoordinatorHost
from support.event_lists import list_events
from support.reporting_agent import PATIENCE_S, ReportedJob, ReportingAgent

from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumns,
    EventKind,
    FindingKind,
    RankEvent,
)
from rankdump._core.execution_order import GLOBAL_ORDER_FOLDER
from rankdump._core.status import SessionState
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump.errors import UnavailableError
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rankdumpd.coordinator.publish.publisher import OrderPublisher
from rankdumpd.coordinator.service import publication
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.settings import CoordinatorSettings, DaemonSettings


@pytest.fixture
def make_host(socket_folder) -> Iterator[Callable[..., CoordinatorHost]]:
    made: list[CoordinatorHost] = []

    def make(**settings) -> CoordinatorHost:
        made.append(CoordinatorHost(socket_folder, **settings))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def host(make_host) -> CoordinatorHost:
    return make_host()


def rows(root: str) -> list[dict[str, str]]:
    """Return every line of a job's order files, in order."""
    found: list[dict[str, str]] = []
    for path in (Path(root) / GLOBAL_ORDER_FOLDER).glob("*.csv"):
        with path.open(newline="") as file:
            found += csv.DictReader(file)
    return sorted(found, key=lambda row: int(row["position"]))


MANY_NOTES = tuple(f"{n} {'x' * 4000}" for n in range(100))
"""As much as a session may say, some 400 kB."""


def wait_until(true: Callable[[], object]) -> None:
    """Return once a condition is true; otherwise the time limit of the test ends the wait."""
    while not true():
        threading.Event().wait(0.02)


def published(host: CoordinatorHost, job_id: str) -> int:
    (merge,) = host.status(job_id).merges
    return merge.published_iterations


def hint(job_id: str, reason: str, *, waiting: bool = False) -> TimeoutHint:
    return TimeoutHint(
        job_id=job_id, group="world", backend="gloo", level=HintLevel.WARNING, waiting=waiting,
        kind="all_reduce", name="AllReduce", iteration=0, sequence=1, first_rank=0, last_rank=1,
        spread_us=5, dump_us=2, limit=None, limits=(), projected_us=5, projected_iteration=-1,
        settings=(), reason=reason,
    )  # fmt: skip


def test_reports_of_two_agents_become_one_order(host, tmp_path) -> None:
    """The order is available before it is published, and on disk afterwards."""
    assert host.coordinator.service_names == ("rankdump.wire.v1.CoordinatorService",)
    job = ReportedJob("job", str(tmp_path), 2, operators=1, collectives=1)
    one, two = host.agent("one"), host.agent("two")
    one.session(job.session(0), job.root)
    one.iteration(job, 0, 4)
    two.session(job.session(1), job.root)
    one.send()
    two.send()
    entries, _ = host.order()
    assert [entry.ranks for entry in entries] == [(0,), (0,)]
    assert not (tmp_path / GLOBAL_ORDER_FOLDER).exists()

    two.iteration(job, 1, 4)
    two.send()
    wait_until(lambda: published(host, "job"))
    assert [(row["position"], row["ranks"], row["kind"]) for row in rows(job.root)] == [
        ("0", "0", "OPERATOR"),
        ("1", "1", "OPERATOR"),
        ("2", "0 1", "ALL_REDUCE"),
    ]
    entries, findings = host.order(job_id="job")
    assert [entry.ranks for entry in entries] == [(0,), (1,), (0, 1)]
    assert findings == []
    for agent in (one, two):
        wait_until(agent.acknowledged)
        agent.close()

    wait_until(lambda: not any(agent.connected for agent in host.status().agents))
    view = host.status()
    assert {session.rank for session in view.sessions} == {0, 1}
    assert sum(balance.stored for balance in view.iterations) == 6
    assert (view.roots, view.findings) == ((job.root,), ())
    (merge,) = view.merges
    assert (merge.published_events, merge.pending_events, merge.lag_s) == (4, 0, 0.0)


def test_reload_changes_the_folders_that_trees_may_be_in(make_host, tmp_path, caplog) -> None:
    """Orders and pages follow; what was refused before is not written later."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    host = make_host(roots=str(inside))
    job = ReportedJob("job", str(outside), 1)
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    agent.iteration(job, 0, 0)
    agent.send()
    wait_until(lambda: "is outside of" in caplog.text)
    assert host.coordinator.list_trees() == ()
    own = dataclasses.replace(host.settings, roots=f"{inside}:{outside}")
    host.coordinator.reload(DaemonSettings(coordinator=own))
    assert host.coordinator.list_trees() == (job.root,)
    agent.iteration(job, 0, 1)
    agent.send()
    wait_until(lambda: rows(job.root))
    agent.close()


def test_stream_answer_names_stored_and_published_numbers(host, tmp_path) -> None:
    """States are stored once they are committed, events not before their iteration is published."""
    job = ReportedJob("job", str(tmp_path), 2)
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    agent.iteration(job, 0, 0)
    agent.send()
    assert (agent.answer.received_sequence, agent.answer.acknowledged_sequence <= 1) == (3, True)
    wait_until(lambda: agent.exchange().acknowledged_sequence == 1)
    again = ReportingAgent("one")
    again.items = agent.items
    again.connect(host.stub)
    assert again.first_answer.acknowledged_sequence == 1
    assert len(host.order()[0]) == 8  # nothing is double
    agent.close()
    again.close()


def test_times_are_converted_to_the_coordinators_clock(host, tmp_path) -> None:
    """The events of an agent whose clock is a second behind get a time that is a second later."""
    before_us = time.time_ns() // 1000
    clock = host.stub.Clock(pb.ClockRequest(), timeout=PATIENCE_S)
    assert before_us <= clock.received_us <= clock.sent_us <= time.time_ns() // 1000
    job = ReportedJob("job", str(tmp_path), 1, operators=1, collectives=0)
    agent = host.agent("one")
    agent.events(job, 0, job.events(0, 0))
    ahead = pb.ClockEstimate(offset_us=1_000_000, error_us=10, steps=1, known=True)
    agent.exchange(agent.items[0], sequence=1, clock=ahead)
    (event,) = list_events(job.events(0, 0))
    (entry,) = host.order()[0]
    assert entry.start_us == event.start_us + 1_000_000
    (status,) = host.status().agents
    assert (status.clock.offset_us, status.clock.steps) == (1_000_000, 1)
    agent.close()


def test_hostile_stream_ends_alone(host, tmp_path) -> None:
    """The agent gets INVALID_ARGUMENT with the fault; the other agent is not affected."""
    job = ReportedJob("job", str(tmp_path), 2)
    good, bad = host.agent("good"), host.agent("bad")
    good.session(job.session(0), job.root)
    good.send()
    bad.session(job.session(1), job.root)
    bad.events(job, 1, job.events(1, 0))
    bad.items[-1].events[0].columns.count = 9
    bad.items[-1].sessions.extend(bad.items[0].sessions)
    del bad.items[0]
    with pytest.raises(grpc.RpcError) as caught:
        bad.send()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes of positions" in str(caught.value.details())
    good.balance(job.balance(0, 0))
    good.send()
    assert [session.rank for session in host.status().sessions] == [0]
    assert good.exchange().received_sequence == 2
    good.close()


def test_jobs_are_separate_and_unknown_ones_rejected(host, tmp_path) -> None:
    """The order without a job is that of the job with the latest report."""
    calls = (
        lambda job: host.order(job_id=job),
        lambda job: host.stub.Hints(pb.HintsRequest(job_id=job), timeout=PATIENCE_S),
        lambda job: host.status(job),
    )
    with pytest.raises(grpc.RpcError) as caught:
        host.order()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    agent = host.agent("one")
    jobs = [ReportedJob(name, str(tmp_path / name), 1) for name in "ab"]
    for iteration in range(3):
        for job in jobs:
            agent.session(job.session(0), job.root)
            agent.iteration(job, 0, iteration)
    agent.send()
    wait_until(agent.acknowledged)
    for job in jobs:
        assert published(host, job.job_id) == 3
        assert len(rows(job.root)) == 24
        assert {entry.iteration for entry in host.order(job_id=job.job_id)[0]} == {0, 1, 2}
    agent.iteration(jobs[0], 0, 7)
    agent.send()
    assert max(entry.iteration for entry in host.order()[0]) == 7
    for call in calls:
        call("a")
        with pytest.raises(grpc.RpcError) as caught:
            call("nobody")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "'nobody'" in str(caught.value.details())
    agent.close()


def test_order_is_paged_and_selected_by_graph(host, tmp_path) -> None:
    """Positions continue over pages; with a graph, the entries of others are left out."""
    job = ReportedJob("job", str(tmp_path), 2, operators=2500)
    agent = host.agent("one")
    agent.events(job, 0, job.events(0, 0))
    agent.send()
    entries, _ = host.order()
    assert [entry.position for entry in entries] == list(range(2502))
    assert len(host.order(graph=0, one_graph=True)[0]) == 2502
    assert host.order(graph=1, one_graph=True)[0] == []
    assert len(host.order(graph=1)[0]) == 2502
    agent.close()


def test_findings_of_running_iterations_are_provisional(host, tmp_path) -> None:
    """Findings alone come without entries, and none of them is kept."""
    job = ReportedJob("job", str(tmp_path), 2)
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    agent.events(job, 0, job.events(0, 0))
    agent.send()
    entries, findings = host.order(findings_only=True)
    assert entries == []
    assert findings
    assert all(finding.provisional for finding in findings)
    assert host.order()[1] == findings
    assert host.status().order_findings == ()
    agent.close()


def test_overdue_iteration_is_published_as_partial(make_host, tmp_path) -> None:
    """A finding names the missing ranks; later events are counted as late and not published."""
    host = make_host(deadline_s=0.5)
    job = ReportedJob("job", str(tmp_path), 2)
    agent = host.agent("one")
    for rank in (0, 1):
        agent.session(job.session(rank), job.root)
    agent.iteration(job, 0, 0)
    agent.send()
    wait_until(lambda: published(host, "job"))
    agent.iteration(job, 1, 0)
    agent.send()
    wait_until(agent.acknowledged)
    entries, findings = host.order()
    assert len(entries) == len(rows(job.root)) == 8
    kinds = {finding.kind: finding for finding in findings}
    assert kinds[FindingKind.PARTIAL].ranks == (1,)
    assert "8 events of rank 1 arrived after its publication" in kinds[FindingKind.LATE].text
    agent.close()


def test_drain_leaves_incomplete_iterations_to_the_next_process(make_host, tmp_path) -> None:
    """If the job ends with this process, half an iteration is published rather than none."""
    job = ReportedJob("job", str(tmp_path), 2)
    host = make_host()
    agent = host.agent("one")
    for rank in (0, 1):
        agent.session(job.session(rank), job.root)
    agent.iteration(job, 0, 8)
    agent.send()
    assert host.coordinator.drain(PATIENCE_S) == 1
    assert not (tmp_path / GLOBAL_ORDER_FOLDER).exists()
    agent.close()
    host.close()
    last = make_host(ends_with_job=True)
    agent.connect(last.stub)
    assert last.coordinator.drain(PATIENCE_S) == 0
    assert len(rows(job.root)) == 8
    assert FindingKind.PARTIAL in {finding.kind for finding in last.order()[1]}
    assert last.coordinator.drain(PATIENCE_S) == 0
    agent.close()


def test_drain_does_not_wait_until_the_thread_has_published_all(host, tmp_path, monkeypatch):
    """The thread hands over after the iteration that it writes, so the deadline is kept."""
    write, writing, may_write = OrderPublisher.append, threading.Event(), threading.Event()

    def append_later(*args, **kwargs):
        writing.set()
        assert may_write.wait(PATIENCE_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(OrderPublisher, "append", append_later)
    job, agent = ReportedJob("job", str(tmp_path), 1), host.agent("one")
    agent.session(job.session(0), job.root)
    for iteration in range(5):
        agent.iteration(job, 0, iteration)
    agent.send()
    assert writing.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(host.coordinator.drain, 0.0)
        wait_until(lambda: host.coordinator._is_draining)
        may_write.set()
        assert left.result(PATIENCE_S) == 3
    assert host.coordinator.count_finished() == 2
    agent.close()


def test_unpublishable_iteration_is_counted_and_reported(host, tmp_path) -> None:
    """A tree that cannot be written affects its own job only."""
    (tmp_path / "file").write_text("")
    bad, good = (ReportedJob(name, str(tmp_path / name), 1) for name in ("file", "fine"))
    agent = host.agent("one")
    for job in (bad, good):
        agent.session(job.session(0), job.root)
        agent.iteration(job, 0, 0)
    agent.send()
    wait_until(agent.acknowledged)
    assert len(rows(good.root)) == 8
    assert published(host, "file") == 0
    found = host.status("file").order_findings
    assert {finding.kind for finding in found} == {FindingKind.UNPUBLISHED}
    assert any("8 entries of the order could not be published" in finding.text for finding in found)
    agent.close()


def test_merge_failure_loses_only_its_iteration(host, tmp_path, monkeypatch) -> None:
    """The loss is counted and reported; the next iteration is published."""
    real = publication.merge_iteration

    def broken_for_one(view):
        if view.iteration == 1:
            raise IndexError("a bug")
        return real(view)

    monkeypatch.setattr(publication, "merge_iteration", broken_for_one)
    job = ReportedJob("job", str(tmp_path), 1)
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    for iteration in (1, 2):
        agent.iteration(job, 0, iteration)
    agent.send()
    wait_until(agent.acknowledged)
    assert {row["iteration"] for row in rows(job.root)} == {"2"}
    (found,) = host.order()[1]
    assert found.kind is FindingKind.UNPUBLISHED
    assert "iteration 1: its order could not be made and its events are lost" in found.text
    agent.close()


def test_hints_are_returned_logged_and_stored(make_host, tmp_path, monkeypatch) -> None:
    """Hints cover published iterations and present waits; every answer has warnings."""
    job = ReportedJob("job", str(tmp_path), 2)
    settled = hint("job", "rank 1 was late")
    live = hint("job", "rank 1 is awaited", waiting=True)
    monkeypatch.setattr(publication, "build_hints", lambda state, facts: (settled,))
    monkeypatch.setattr(publication, "find_open_waits", lambda view, facts, now_us, state: (live,))
    monkeypatch.setattr(
        publication,
        "build_warnings",
        lambda hints, said, causes: {each.reason: each.reason for each in hints},
    )
    host = make_host()
    agent = host.agent("one")
    for rank in (0, 1):
        agent.session(job.session(rank), job.root)
        agent.iteration(job, rank, 0)
    barrier = RankEvent(
        0, 1, 90, OPEN_END_POSITION, "Barrier", EventKind.BARRIER, 5, 5, group="world"
    )
    agent.events(job, 0, EventColumns.from_events([barrier], (job.group(),)))
    agent.send()
    wait_until(lambda: len(agent.exchange().warnings) == 2)
    assert [warning.text for warning in agent.answer.warnings] == [settled.reason, live.reason]
    hints = host.stub.Hints(pb.HintsRequest(), timeout=PATIENCE_S).hints
    assert [each.reason for each in hints] == [settled.reason, live.reason]
    assert host.status("job").hints == (settled, live)

    agent.iteration(job, 1, 1)
    agent.balance(job.balance(0, 1))
    agent.send()
    wait_until(lambda: len(agent.exchange().warnings) == 1)
    agent.close()
    host.close()
    again = make_host()
    assert again.status("job").hints == (settled,)


def test_full_state_disk_acknowledges_nothing(host, tmp_path) -> None:
    """The status reports it, the write is tried again, and nothing is lost meanwhile."""
    job = ReportedJob("job", str(tmp_path), 1)
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    agent.send()
    wait_until(agent.acknowledged)
    with host.coordinator._publishing_lock:
        base = host.coordinator._state._connection
        (pages,) = base.execute("PRAGMA page_count").fetchone()
        base.execute(f"PRAGMA max_page_count = {pages}")
    agent.session(job.session(0, notes=("x" * 100_000,)), job.root)
    agent.iteration(job, 0, 0)
    agent.send()
    wait_until(lambda: any("full" in text for text in host.status().findings))
    wait_until(lambda: published(host, "job"))
    assert agent.exchange().acknowledged_sequence == 1
    with host.coordinator._publishing_lock:
        base.execute("PRAGMA max_page_count = 100000")
    wait_until(agent.acknowledged)
    assert host.status().findings == ()
    assert len(rows(job.root)) == 8
    agent.close()


def test_old_jobs_are_removed_and_their_trees_kept(make_host, tmp_path) -> None:
    """All ended jobs are removed by age, the oldest by size; a running job is kept."""
    host = make_host()
    agent = host.agent("one")
    jobs = [ReportedJob(name, str(tmp_path / name), 1) for name in ("first", "second", "runs")]
    for job in jobs:
        agent.session(job.session(0, notes=MANY_NOTES), job.root)
        agent.iteration(job, 0, 0)
        if job.job_id != "runs":
            state = SessionState.CLOSED
            agent.session(job.session(0, state, notes=MANY_NOTES))
        agent.send()
    wait_until(agent.acknowledged)
    agent.close()
    host.close()
    kept = {job.job_id: rows(job.root) for job in jobs}

    smaller = make_host(keep_bytes=1 << 20)
    wait_until(lambda: len(smaller.status().merges) == 2)
    assert {merge.job_id for merge in smaller.status().merges} == {"second", "runs"}
    smaller.close()
    younger = make_host(keep_days=0.0)
    wait_until(lambda: len(younger.status().merges) == 1)
    assert [merge.job_id for merge in younger.status().merges] == ["runs"]
    assert {job.job_id: rows(job.root) for job in jobs} == kept
    younger.close()
    assert [merge.job_id for merge in make_host().status().merges] == ["runs"]


def test_128_open_streams_become_one_order(host, tmp_path) -> None:
    """All streams are open at once and end in one order; the status does not grow."""
    agents, iterations = 128, 2
    job = ReportedJob("job", str(tmp_path), agents, operators=3, collectives=1)

    def work(rank: int) -> ReportingAgent:
        with grpc.insecure_channel(host.address, [("grpc.use_local_subchannel_pool", 1)]) as own:
            agent = ReportingAgent(f"agent{rank}", f"host{rank}")
            agent.connect(CoordinatorServiceStub(own))
            together.wait(PATIENCE_S)
            agent.session(job.session(rank, host=agent.host), job.root)
            for iteration in range(iterations):
                agent.iteration(job, rank, iteration)
            agent.send()
            together.wait(PATIENCE_S)
            wait_until(agent.acknowledged)
            # Not before all were seen to be connected.
            together.wait(PATIENCE_S)
            agent.close()
            return agent

    together = threading.Barrier(agents + 1)
    with ThreadPoolExecutor(agents) as threads:
        working = [threads.submit(work, rank) for rank in range(agents)]
        together.wait(PATIENCE_S)
        together.wait(PATIENCE_S)
        view = host.status()
        together.wait(PATIENCE_S)
        assert sum(agent.connected for agent in view.agents) == agents
        for each in working:
            each.result(PATIENCE_S)
    assert len(rows(job.root)) == iterations * (agents * 3 + 1)
    assert host.order()[1] == []


def test_status_stays_within_the_message_limit(host, tmp_path) -> None:
    """For 1,024 ranks it has the newest balances, and the number of older ones."""
    world, iterations = 1024, 24
    agent = host.agent("one")
    job = ReportedJob("job", str(tmp_path), world)
    for rank in range(world):
        agent.session(job.session(rank), job.root)
    for iteration in range(iterations):
        for rank in range(world):
            agent.balance(job.balance(rank, iteration))
    message = pb.ReportRequest()
    for item in agent.items:
        message.MergeFrom(item)
    agent.exchange(message, sequence=len(agent.items))
    view = host.status()
    assert len(view.sessions) == world
    assert view.findings == ("4576 older balances are not in this answer",)
    assert view.iterations[-1].iteration == iterations - 1
    agent.close()


def test_coordinator_that_never_started_can_be_stopped(tmp_path) -> None:
    """`stop` is permitted without `start`, and twice; two coordinators cannot share one state."""
    settings = dataclasses.replace(CoordinatorSettings(), state_dir=str(tmp_path))
    coordinator = JobCoordinator(settings)
    assert coordinator.drain(0.0) == 0
    coordinator.stop()
    coordinator.stop()
    other = JobCoordinator(settings)
    other.start()
    with pytest.raises(UnavailableError):
        JobCoordinator(settings).start()
    other.stop()


def test_failing_hints_do_not_prevent_publication(make_host, tmp_path, monkeypatch) -> None:
    """An error in the hints affects neither an iteration, nor the status, nor the next start."""

    def broken(*_args: object) -> None:
        raise IndexError("a bug")

    job = ReportedJob("job", str(tmp_path), 1)
    host = make_host()
    agent = host.agent("one")
    agent.session(job.session(0), job.root)
    for iteration, fault in enumerate(("nothing", "build_hints", "update_hint_state")):
        if fault != "nothing":
            monkeypatch.setattr(publication, fault, broken)
        agent.iteration(job, 0, iteration)
        agent.send()
        wait_until(agent.acknowledged)
    agent.close()
    host.close()
    assert published(make_host(), "job") == 3
    assert len(rows(job.root)) == 24

"""Reports of an agent to a coordinator that starts late, disappears, rejects or loses its state."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.event_lists import list_events
from support.stub_coordinator import StubCoordinator

from rankdump._core.black_box import FaultKind, RankStep
from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.freeze_record import FrozenCause, JobFreeze, RelayedFreeze
from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump._core.session_protocol import IterationEnd, SessionRequest
from rankdump._core.status import AgentLoad, IterationStatus, SessionState, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdump._wire.black_box_messages import relayed_freeze_to_wire
from rankdump._wire.frames import make_metadata_frame
from rankdumpd.agent.ledger import report_log
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.records import FrameId, MetadataFrame, QuietRank
from rankdumpd.agent.report import report_stream, reporter
from rankdumpd.agent.report.report_stream import ReporterTimes
from rankdumpd.agent.report.reporter import BlackBoxReports, CoordinatorReporter
from rankdumpd.agent.session.order_relay import OrderRelay

WAIT_S = 300
SESSION = SessionStatus("job", "s", 3, 4, 3, "here", 1, SessionState.OPEN)
REQUEST = SessionRequest(
    "job",
    "s",
    3,
    4,
    3,
    "here",
    1,
    "none 0",
    "CPU",
    plan_to_json(DumpPlan(OutputSettings("/dump"))),
    b"",
)
TIMES = ReporterTimes(heartbeat_s=0.05, first_retry_s=0.01, last_retry_s=0.05)


def events(first: int, count: int, iteration: int = 0) -> EventColumns:
    found = [
        RankEvent(0, iteration, n, n, f"op{n % 1000}", EventKind.OPERATOR, n, n + 1)
        if n % 3
        else RankEvent(
            0, iteration, n, n, "sync", EventKind.BARRIER, n, n + 1, group=f"g{n % 2}", sequence=n
        )
        for n in range(first, first + count)
    ]
    return EventColumns.from_events(found)


class ReportingAgentRig:
    """Ledger and reporter of an agent, with frames to commit."""

    def __init__(self, folder: Path, address: str, report_bytes: int) -> None:
        self.folder, self.address, self.report_bytes = folder, address, report_bytes
        self.sequence = 0
        self.warned: list[tuple[str, str]] = []
        self.quiet: list[QuietRank] = []
        self.freezes: list[JobFreeze] = []
        self.steps: list[RankStep] = []
        self.joined: list[RelayedFreeze] = []
        self.begin()
        self.ledger.open_session(REQUEST)

    def begin(self) -> None:
        self.ledger = AgentLedger(self.folder / "state", report_bytes=self.report_bytes)
        self.reporter = CoordinatorReporter(
            self.address,
            self.ledger.log,
            load=lambda: AgentLoad(queued_records=7),
            warn=lambda job, text: self.warned.append((job, text)),
            on_forgotten=self.tell_again,
            quiet=lambda: self.quiet,
            orders=OrderRelay(lambda: (), lambda: None, find_newest=lambda session: ""),
            black_box=BlackBoxReports(
                lambda: self.freezes,
                lambda: [self.steps.pop()] if self.steps else [],
                self.joined.append,
            ),
            times=TIMES,
        )

    def tell_again(self) -> None:
        self.reporter.session(SESSION, "/dump")
        self.ledger.log.reenter_timeouts("s")

    def take(self, *declarations) -> None:
        first = self.sequence + 1
        self.sequence += len(declarations)
        frames = [
            MetadataFrame(FrameId("s", n), each, make_metadata_frame(n, each).SerializeToString())
            for n, each in enumerate(declarations, first)
        ]
        self.ledger.commit((), (), frames, {"s": self.sequence}, synced=False)
        for frame in frames:
            if isinstance(frame.declaration, IterationEnd):
                end = frame.declaration
                status = IterationStatus("job", "s", 3, end.iteration, True, stall_us=end.stall_us)
                self.ledger.enter_iteration_end(frame.frame_id, end, (), status)
            elif isinstance(frame.declaration, RankTimeouts):
                self.ledger.mark_applied_and_keep(frame.frame_id)
        self.reporter.wake()

    def bodies(self) -> int:
        """Return how many frames of events are kept."""
        query = "SELECT COUNT(*) FROM declarations WHERE kind = 'EventColumns' AND body <> x''"
        ((count,),) = self.ledger._select(query)
        return count

    def close(self) -> None:
        self.reporter.stop()
        self.reporter.stop()
        self.ledger.close()


@pytest.fixture
def coordinator(short_dir: Path) -> Iterator[StubCoordinator]:
    coordinator = StubCoordinator(short_dir)
    yield coordinator
    coordinator.stop()


@pytest.fixture
def make_agent(
    coordinator: StubCoordinator, tmp_path: Path
) -> Iterator[Callable[..., ReportingAgentRig]]:
    with contextlib.ExitStack() as stack:

        def make(
            address: str = coordinator.address, report_bytes: int = 1 << 30
        ) -> ReportingAgentRig:
            agent = ReportingAgentRig(tmp_path, address, report_bytes)
            stack.callback(agent.close)
            agent.reporter.start()
            return agent

        yield make


@pytest.fixture
def agent(make_agent) -> ReportingAgentRig:
    return make_agent()


def forgotten(agent: ReportingAgentRig, coordinator: StubCoordinator) -> None:
    """Wait until the report log is empty, after the answer to a heartbeat."""
    coordinator.wait(lambda: agent.ledger.log.waiting(0)[0] == 0)


def test_items_before_the_first_connection_arrive_in_order(agent, coordinator):
    """A coordinator that starts late receives everything, events before the balance of their
    iteration.
    """
    agent.reporter.session(SESSION, "/dump")
    agent.take(RankTimeouts({"HCCL_EXEC_TIMEOUT": "1800"}))
    for n in range(11):
        agent.take(events(4096 * n, 4096))
    agent.take(IterationEnd(0, 0, stall_us=5))
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    reports = coordinator.reports
    numbers = [r.sequence for r in reports]
    sizes = [len(r.sessions) + len(r.timeouts) + len(r.events) + len(r.iterations) for r in reports]
    assert [b - a for a, b in zip([0, *numbers], numbers, strict=False)] == sizes
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 14
    assert {r.agent_id for r in [*reports, *coordinator.greetings]} == {agent.ledger.log.agent_id()}
    assert reports[0].sessions[0].session_id == "s"
    assert dict(reports[0].roots) == {"job": "/dump"}
    assert reports[0].load.queued_records == 7
    assert reports[0].host
    (timeouts,) = (each for r in reports for each in r.timeouts)
    assert (timeouts.rank, timeouts.timeouts.variables["HCCL_EXEC_TIMEOUT"]) == (3, "1800")
    assert coordinator.positions("s") == list(range(11 * 4096))
    (first, *_) = coordinator.columns
    assert list_events(first[2])[:5] == list_events(events(0, 5))
    assert all(len(r.SerializeToString()) < 4 << 20 for r in reports)
    balances = [r for r in reports if r.iterations]
    assert [b.iterations[0].stall_us for b in balances] == [5]
    assert balances[0].sequence == 14


def test_state_of_a_quiet_rank_is_reported_repeatedly(agent, coordinator):
    """The state is repeated behind the items that were sent already."""
    coordinator.start()
    agent.take(events(0, 100))
    agent.quiet = [QuietRank("job", 3, "s", 1)]
    before_us = time.time_ns() // 1000
    coordinator.wait(lambda: any(us > before_us - 2_000_000 for _, us in coordinator.heard))
    assert coordinator.positions("s") == list(range(100))
    assert {session for session, _ in coordinator.heard} == {"s"}
    agent.quiet = []
    said = len(coordinator.heard)
    asked = coordinator.asked
    coordinator.wait(lambda: coordinator.asked > asked + 5)
    assert len(coordinator.heard) <= said + 1


def test_names_are_sent_once_a_stream(agent, coordinator, monkeypatch):
    """A name is sent once; a table of names that grows too large is begun again."""
    monkeypatch.setattr(report_stream, "MAX_TEXTS", 1_500)
    coordinator.start()
    for n in range(6):
        agent.take(events(1200 * n, 1200))
        assert agent.reporter.flush(WAIT_S) == 0
    said = [t for r in coordinator.reports for t in r.texts.texts]
    assert len(said) == len(set(said)) == 1003
    named = EventColumns.from_events(
        [RankEvent(0, 1, n, n, f"other{n}", EventKind.OPERATOR, n, n) for n in range(900)]
    )
    agent.take(named)
    assert agent.reporter.flush(WAIT_S) == 0
    agent.take(events(0, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    *_, before, last = coordinator.reports
    assert before.texts.first > 0
    assert last.texts.first == 0
    assert [e.name for e in list_events(coordinator.columns[-2][2])] == [
        f"other{n}" for n in range(900)
    ]
    assert list_events(coordinator.columns[-1][2]) == list_events(events(0, 10))


def test_items_are_kept_and_resent_until_stored(agent, coordinator):
    """Frames of events are kept until the coordinator has stored them, even if their iteration
    ended.
    """
    coordinator.holds_back = True
    coordinator.start()
    agent.take(events(0, 100), IterationEnd(0, 0), events(100, 100))
    assert agent.reporter.flush(WAIT_S) == 0
    assert agent.bodies() == 2
    coordinator.stop()
    coordinator.forget()
    agent.take(IterationEnd(1, 0))
    coordinator.holds_back = False
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(200))
    forgotten(agent, coordinator)
    assert agent.bodies() == 0
    agent.take(events(200, 100))
    assert agent.reporter.flush(WAIT_S) == 0
    forgotten(agent, coordinator)
    # Safe there, and still needed here: its iteration runs.
    assert agent.bodies() == 1
    assert agent.ledger.unapplied("s") != []
    agent.take(IterationEnd(2, 0))
    assert agent.bodies() == 0
    assert agent.ledger.unapplied("s") == []


def test_resent_items_are_not_merged_with_new_ones(agent, coordinator):
    """An item that has arrived is never sent in one batch with a new one, or it would
    count twice.
    """
    coordinator.holds_back = True
    coordinator.start()
    for n in range(3):
        agent.take(events(10 * n, 10))
        assert agent.reporter.flush(WAIT_S) == 0
    coordinator.stop()
    for n in range(3, 6):
        agent.take(events(10 * n, 10))
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(60))
    assert coordinator.acknowledged == {}


def test_restarted_agent_continues_its_numbers(agent, coordinator):
    """Log, numbers and the name of the agent remain after a restart."""
    coordinator.holds_back = True
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    agent.take(events(0, 100))
    assert agent.reporter.flush(WAIT_S) == 0
    agent.close()
    agent.begin()
    agent.reporter.start()
    agent.take(events(100, 100))
    coordinator.holds_back = False
    agent.take(IterationEnd(0, 0))
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(200))
    assert len({r.agent_id for r in coordinator.reports}) == 1
    assert max(r.sequence for r in coordinator.reports) == report_log.NUMBER_GAP + 4


def test_sessions_are_reported_again_to_a_coordinator_without_state(agent, coordinator):
    """A coordinator that lost its state receives sessions and timeouts again."""
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    agent.take(RankTimeouts({"A": "1"}), RankTimeouts({"A": "2"}))
    assert agent.reporter.flush(WAIT_S) == 0
    forgotten(agent, coordinator)
    coordinator.stop()
    coordinator.forget()
    coordinator.start()
    coordinator.wait(lambda: any(r.timeouts for r in coordinator.reports))
    assert [s.session_id for r in coordinator.reports for s in r.sessions] == ["s"]
    (told,) = (each for r in coordinator.reports for each in r.timeouts)
    assert dict(told.timeouts.variables) == {"A": "2"}


def test_only_the_rejected_item_is_lost(agent, coordinator, caplog):
    """The rejected one of many items under way is found and counted; all others arrive."""
    agent.take(*(events(10 * n, 10) for n in range(30)))
    agent.take(IterationEnd(0, 0))

    def fault(request) -> grpc.StatusCode | None:
        for each in request.events:
            first = int.from_bytes(each.columns.position[:8], "little")
            if first == 170:
                return grpc.StatusCode.INVALID_ARGUMENT
        return None

    coordinator.fault = fault
    with caplog.at_level(logging.WARNING, "rankdumpd.agent.report.reporter"):
        coordinator.start()
        assert agent.reporter.flush(WAIT_S) == 0
    expected = [n for n in range(300) if not 170 <= n < 180]
    assert sorted(set(coordinator.positions("s"))) == expected
    assert coordinator.positions("s") == expected
    assert agent.reporter.findings() == ["10 events never reached the coordinator"]
    refusals = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert 1 <= len(refusals) <= 2
    agent.close()
    agent.begin()
    assert agent.reporter.findings() == ["10 events never reached the coordinator"]
    agent.reporter.start()
    coordinator.wait(lambda: coordinator.reports[-1].lost_events == 10 or agent.take() is None)


@pytest.mark.parametrize("body", [b"\xff", b"text"])
def test_only_the_damaged_item_is_lost(agent, coordinator, caplog, body):
    """A frame that is damaged on the disk is counted; all others arrive without delay."""
    agent.take(*(events(10 * n, 10) for n in range(30)))
    agent.take(IterationEnd(0, 0))
    with agent.ledger._transaction() as base:
        base.execute("UPDATE declarations SET body = ? WHERE sequence = 18", (body,))
    with caplog.at_level(logging.WARNING):
        coordinator.start()
        assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == [n for n in range(300) if not 170 <= n < 180]
    assert agent.reporter.findings() == ["10 events never reached the coordinator"]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert 1 <= len(said) <= 2
    assert all("of the report log cannot be read" in each for each in said)


def test_broken_connection_loses_nothing(agent, coordinator):
    """After each break of the connection items are resent, and no event is lost."""
    breaks = iter([True, False, True, False, False, True] + [False] * 10_000)

    def fault(request) -> grpc.StatusCode | None:
        return grpc.StatusCode.UNAVAILABLE if request.sequence and next(breaks) else None

    coordinator.fault = fault
    coordinator.start()
    for n in range(20):
        agent.take(events(10 * n, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(200))
    assert agent.reporter.findings() == []


def test_at_most_eight_requests_await_an_answer(agent, coordinator, monkeypatch):
    """Several reports are under way at once, at most as many as agreed."""
    monkeypatch.setattr(report_stream, "MAX_REQUEST_EVENTS", 10)
    coordinator.silent = True
    sent = 0

    class Counting(report_stream.ReportMessages):
        def of(self, items):
            nonlocal sent
            sent += bool(items)
            with coordinator.changed:
                coordinator.changed.notify_all()
            return super().of(items)

    monkeypatch.setattr(report_stream, "ReportMessages", Counting)
    agent.take(*(events(10 * n, 10) for n in range(40)))
    coordinator.start()
    coordinator.wait(lambda: sent == 8)
    assert agent.reporter.flush(0.3) == 40
    assert sent == 8
    coordinator.silent = False
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(400))


def test_report_log_is_bounded_while_the_coordinator_is_absent(make_agent, coordinator):
    """Beyond the limit the oldest events are removed and counted; balances and new events stay."""
    agent = make_agent(report_bytes=200_000)
    for n in range(50):
        agent.take(events(1000 * n, 1000, iteration=n), IterationEnd(n, 0))
    ((kept,),) = agent.ledger._select("SELECT SUM(bytes) FROM log")
    assert kept <= 200_000
    # An outage of some seconds, on a slow machine, is a finding before it.
    *_, said = agent.reporter.findings()
    lost = int(said.split()[0])
    assert said == f"{lost} events never reached the coordinator"
    assert lost > 0
    assert lost % 1000 == 0
    assert agent.bodies() == 50 - lost // 1000
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(lost, 50_000))
    assert [i.iteration for r in coordinator.reports for i in r.iterations] == list(range(50))
    assert coordinator.reports[-1].lost_events == lost


def test_report_log_keeps_first_and_last_state_of_a_session(agent, coordinator):
    """A session that ended meanwhile needs no more space than an open one."""
    for pid in range(100):
        agent.reporter.session(
            SessionStatus(*("job", "s", 3, 4, 3, "h", pid), SessionState.OPEN), ""
        )
    assert agent.ledger.log.waiting(0)[0] == 2
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert [s.pid for r in coordinator.reports for s in r.sessions] == [0, 99]


def test_heartbeat_answers_carry_clock_and_warnings(agent, coordinator):
    """An agent without reports still learns the offset of its clock, and warnings for its ranks."""
    coordinator.ahead_us = 5_000_000
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    assert agent.reporter.flush(WAIT_S) == 0
    coordinator.warnings = [("job", "half of it is used")] * 2
    coordinator.wait(lambda: agent.warned)
    asked = coordinator.asked
    assert asked >= 8
    coordinator.wait(lambda: coordinator.asked > asked + 2)
    assert agent.warned == [("job", "half of it is used")]
    assert agent.reporter.warnings("job") == ["half of it is used"]
    assert agent.reporter.warnings("other") == []
    agent.take(events(0, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    clock = coordinator.reports[-1].clock
    assert clock.known
    assert abs(clock.offset_us - 5_000_000) <= clock.error_us
    assert clock.steps == 0


def test_silent_coordinator_is_reconnected(agent, coordinator, monkeypatch):
    """If answers are missing for too long, the stream is begun again."""
    coordinator.silent = True
    coordinator.start()
    monkeypatch.setattr(agent.reporter, "_times", ReporterTimes(0.05, 0.01, 0.05, answer_s=0.2))
    agent.take(events(0, 10))
    coordinator.wait(lambda: len(coordinator.greetings) >= 3)
    coordinator.silent = False
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(10))


def test_agent_without_coordinator_keeps_no_reports(make_agent):
    """Without an address there is no thread and no log, and events are removed with their
    iteration.
    """
    agent = make_agent(address="", report_bytes=0)
    agent.reporter.session(SESSION, "/dump")
    agent.take(events(0, 10), RankTimeouts({"A": "1"}))
    assert agent.bodies() == 1
    agent.take(IterationEnd(0, 0))
    assert agent.reporter.flush(0) == 0
    assert agent.ledger.log.waiting(0) == (0, 0)
    assert agent.bodies() == 0


def test_waiting_items_are_read_in_small_batches(agent, coordinator, monkeypatch):
    """The memory in use does not depend on how many items wait."""
    monkeypatch.setattr(report_log, "MAX_READ_BYTES", 10_000)
    agent.take(*(events(100 * n, 100) for n in range(50)))
    assert 1 < len(agent.ledger.log.items(0)) < 10
    coordinator.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert coordinator.positions("s") == list(range(5000))


def test_report_numbers_lost_by_power_failure_are_not_reused(agent, coordinator, tmp_path):
    """Items that are committed later arrive, although the coordinator received others under lost
    numbers.
    """
    coordinator.start()
    agent.take(events(0, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    agent.close()
    agent.begin()
    # What is on the disk for sure: what the process entered when it began, and no commit since.
    state = tmp_path / "state"
    safe = {path: path.read_bytes() for path in state.iterdir() if "shm" not in path.name}
    agent.reporter.start()
    agent.take(events(10, 10), events(20, 10), events(30, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    agent.close()
    for path, data in safe.items():
        path.write_bytes(data)
    agent.sequence = 1
    agent.begin()
    # The rank sends again what was not acknowledged, and goes on: more than what was lost.
    agent.take(events(10, 10), *(events(n, 10) for n in range(40, 90, 10)))
    agent.reporter.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert set(coordinator.positions("s")) == set(range(90))


def test_restored_ledger_continues_after_the_coordinators_number(agent, coordinator, tmp_path):
    """If an old copy of the state folder has fewer items than the coordinator, all are reported
    again.
    """
    coordinator.start()
    agent.take(events(0, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    agent.close()
    before = (tmp_path / "state" / "ledger.sqlite").read_bytes()
    agent.begin()
    agent.reporter.start()
    agent.take(events(10, 10), events(20, 10), events(30, 10))
    assert agent.reporter.flush(WAIT_S) == 0
    agent.close()
    (tmp_path / "state" / "ledger.sqlite").write_bytes(before)
    agent.sequence = 1
    agent.begin()
    agent.take(events(10, 10), events(40, 10))
    agent.reporter.start()
    assert agent.reporter.flush(WAIT_S) == 0
    assert set(coordinator.positions("s")) == set(range(50))


def test_absent_coordinator_is_a_finding_until_it_connects(agent, coordinator, caplog):
    """The finding is there before any report, and waiting for the coordinator ends after another
    attempt.
    """
    caplog.set_level(logging.INFO, "rankdumpd.agent.report.reporter")
    said = f"coordinator {coordinator.address} has been unreachable since 20"
    eventually(lambda: agent.reporter.findings())
    assert agent.reporter.findings()[0].startswith(said)
    assert agent.reporter.findings()[0].endswith("; no messages are waiting")
    agent.take(events(0, 10))
    begun_s = time.monotonic()
    assert agent.reporter.flush(WAIT_S) == 1
    assert time.monotonic() - begun_s < WAIT_S / 2
    assert agent.reporter.findings()[0].endswith("; messages waiting: 1, with events: 10")
    agent.reporter.leave("/var/lib/rankdump")
    assert caplog.messages[-1].endswith(
        "messages waiting: 1, with events: 10; they stay in /var/lib/rankdump until an agent "
        "starts there again"
    )
    coordinator.start()
    coordinator.wait(lambda: coordinator.positions("s") == list(range(10)))
    eventually(lambda: not agent.reporter.findings())
    assert sum(message.startswith(said) for message in caplog.messages) == 2
    assert any("accepts reports again after " in message for message in caplog.messages)


def test_ledger_that_cannot_be_written_is_one_line_and_one_when_it_can(
    agent, coordinator, caplog, monkeypatch
):
    """It is tried again every few seconds, and a traceback for each would fill the log."""
    caplog.set_level(logging.INFO, "rankdumpd.agent.report.reporter")
    monkeypatch.setattr(reporter, "WARN_AFTER_S", 0.0)
    real, attempts = agent.ledger.log.acknowledged, []

    def fail(number: int) -> None:
        attempts.append(number)
        raise sqlite3.OperationalError("database or disk is full")

    agent.ledger.log.acknowledged = fail
    agent.take(events(0, 10))
    coordinator.start()
    eventually(lambda: len(attempts) > 3)
    assert agent.reporter.findings()[0].startswith(
        f"coordinator {coordinator.address} has been sent the same messages again"
    )
    agent.ledger.log.acknowledged = real
    forgotten(agent, coordinator)
    eventually(lambda: not agent.reporter.findings())
    lines = [each for each in caplog.records if "ledger" in each.getMessage()]
    assert [each.levelname for each in lines] == ["WARNING", "INFO"]
    assert "database or disk is full" in lines[0].getMessage()
    assert lines[1].getMessage().startswith("the ledger can be written again after ")
    assert not any(each.exc_info for each in caplog.records)


def eventually(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


FREEZE = JobFreeze("job", 0, 3, FrozenCause(FaultKind.JUMP, 3, "it jumped", 7, 2))


def test_freezes_are_in_every_request_and_steps_in_one_heartbeat(agent, coordinator):
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    forgotten(agent, coordinator)
    agent.steps.append(RankStep("job", 3, 0, 8, {"loss": 1.5}))
    agent.freezes.append(FREEZE)
    coordinator.wait(lambda: len(coordinator.reported) >= 4)
    assert all(
        [freeze.iteration for freeze in request.freezes] == [3]
        for request in coordinator.reported
        if not request.steps
    )
    [steps] = [request.steps for request in coordinator.reported if request.steps]
    assert [(step.rank, step.numbers["loss"]) for step in steps] == [(3, 1.5)]


def test_freeze_is_reported_without_waiting_for_the_heartbeat(make_agent, coordinator, monkeypatch):
    slow = ReporterTimes(heartbeat_s=WAIT_S, first_retry_s=0.01, last_retry_s=0.05)
    monkeypatch.setitem(globals(), "TIMES", slow)
    agent = make_agent()
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    forgotten(agent, coordinator)
    agent.freezes.append(FREEZE)
    agent.reporter.report_soon()
    coordinator.wait(lambda: coordinator.reported)


def test_freezes_of_the_coordinator_are_handed_on_but_for_unknown_kinds(agent, coordinator):
    later = relayed_freeze_to_wire(RelayedFreeze(FREEZE))
    later.freeze.cause.kind = "cosmic_ray"
    coordinator.freezes = [later, relayed_freeze_to_wire(RelayedFreeze(FREEZE))]
    coordinator.start()
    agent.reporter.session(SESSION, "/dump")
    coordinator.wait(lambda: len(agent.joined) >= 2)
    assert set(agent.joined) == {RelayedFreeze(FREEZE)}
    assert agent.ledger.log.lost() == (0, 0)

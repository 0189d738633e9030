"""State file of the coordinator: rows, versions, damage and full disks."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.timeouts import GroupTimeout, RankTimeouts
from rankdump.errors import ConfigError, CorruptedError, UnavailableError
from rankdumpd.coordinator.fleet_views import PublishedOffsets
from rankdumpd.coordinator.service.coordinator import JobCoordinator
from rankdumpd.coordinator.state import (
    AgentRow,
    BalanceRow,
    CoordinatorState,
    FindingRow,
    JobResultRow,
    JobRow,
    LateEventsRow,
    PublishedIterationRow,
    RankTimeoutsRow,
    SessionStatusRow,
    StateRow,
)
from rankdumpd.settings import CoordinatorSettings

LARGEST = (1 << 63) - 1


def session(name: str, job: str = "j", **more) -> SessionStatusRow:
    state = more.pop("state", SessionState.LOST)
    status = SessionStatus(job, name, 0, 2, 0, "h", 1, state, notes=("é\n",), **more)
    return SessionStatusRow(status, "a", LARGEST, 5)


def rows_of(job: str) -> list[StateRow]:
    status = IterationStatus(
        job, f"s{job}", 0, LARGEST, True, dropped={"full": 2}, stall_us=1 << 64
    )
    limits = RankTimeouts({"HCCL_EXEC_TIMEOUT": "68"}, (GroupTimeout("g", "gloo", 5),), {"l": 1.5})
    finding = Finding(FindingKind.GAP, 4, "a sentence", ranks=(1, 2), group="g", provisional=True)
    return [
        AgentRow("a", "h", 3, 5),
        JobRow(job, ("/t", "/u"), 1, 2),
        PublishedIterationRow(job, 0, 4, 10, None, {}),
        PublishedIterationRow(job, 1, 4, 10, (0, 1), {3: 99}, 1, {3: 2}),
        LateEventsRow(job, 0, 5, 3, 7),
        session(f"s{job}", job),
        BalanceRow(status, "a", 3),
        RankTimeoutsRow(job, 0, limits),
        FindingRow(job, 0, finding),
        JobResultRow(job, PublishedOffsets("/t", {"a.csv": 5}, 7), '{"x": 1}', 0),
    ]


@pytest.fixture
def state(tmp_path):
    state = CoordinatorState(tmp_path)
    yield state
    state.close()


def test_state_file_round_trips_every_kind_of_row(state, tmp_path) -> None:
    """A row that is written twice exists once, also for another process."""
    state.write(rows_of("j"))
    state.write(rows_of("j"))
    state.write(())
    assert list(state.rows()) == rows_of("j")
    state.close()
    state.close()
    again = CoordinatorState(tmp_path)
    assert list(again.rows()) == rows_of("j")
    again.close()


def test_later_row_replaces_earlier_one_in_place(state) -> None:
    """Sessions stay in the order in which they began."""
    state.write([session("b"), session("a")])
    closed = session("b", state=SessionState.CLOSED)
    state.write([closed, JobResultRow("j", None, "", 1)])
    state.write([JobResultRow("j", PublishedOffsets("/t", {}, 0), "x", 2)])
    assert list(state.rows()) == [
        closed,
        session("a"),
        JobResultRow("j", PublishedOffsets("/t", {}, 0), "x", 2),
    ]


def test_forgotten_job_leaves_no_rows_and_frees_disk_space(state, tmp_path) -> None:
    """The rows of another job are kept."""
    large = FindingRow("j", 1, Finding(FindingKind.GAP, 4, "x" * 1_000_000))
    state.write([*rows_of("k"), *rows_of("j"), large])
    assert state.size_bytes > 1_000_000
    state.forget("j")
    assert list(state.rows()) == rows_of("k")
    assert state.size_bytes < 500_000
    assert (tmp_path / "coordinator.sqlite").stat().st_size < 500_000
    state.forget_agents(["a", "nobody"])
    assert list(state.rows()) == rows_of("k")[1:]


def test_write_commits_all_rows_or_none(state) -> None:
    """After a write to a full disk failed, the next one succeeds."""
    state.write(rows_of("j"))
    base = state._connection
    (pages,) = base.execute("PRAGMA page_count").fetchone()
    base.execute(f"PRAGMA max_page_count = {pages}")
    large = FindingRow("j", 1, Finding(FindingKind.GAP, 4, "x" * 1_000_000))
    with pytest.raises(UnavailableError, match="full"):
        state.write([AgentRow("a", "h", 9, 9), large])
    assert list(state.rows()) == rows_of("j")
    base.execute("PRAGMA max_page_count = 100000")
    state.write([AgentRow("a", "h", 9, 9)])
    assert next(state.rows()) == AgentRow("a", "h", 9, 9)


def test_errors_of_state_file_have_its_path(state, tmp_path) -> None:
    path = tmp_path / "coordinator.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("DROP TABLE jobs")
    base.close()
    with pytest.raises(CorruptedError, match=f"^{path} cannot be read: "):
        list(state.rows())
    with pytest.raises(UnavailableError, match=f"^{path} cannot be written: "):
        state.write(rows_of("j"))


def test_state_file_has_one_owner_and_a_version(state, tmp_path) -> None:
    """A second process, a later version and a missing folder are each an error in one line."""
    with pytest.raises(UnavailableError, match="used by another coordinator"):
        CoordinatorState(tmp_path)
    state.close()
    with sqlite3.connect(tmp_path / "coordinator.sqlite") as base:
        base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(ConfigError, match="user_version"):
        CoordinatorState(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"coordinator\.state_dir"):
        CoordinatorState(Path(tmp_path / "file" / "folder"))
    (tmp_path / "coordinator.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptedError, match=r"coordinator\.state_dir"):
        CoordinatorState(tmp_path)


def test_state_file_of_earlier_version_is_migrated(tmp_path) -> None:
    """Starts get the number of their run; of a session only the last report was known."""
    row = PublishedIterationRow("j", 2, 4, 10, None, {})
    state = CoordinatorState(tmp_path)
    state.write([row, session("s")])
    state._connection.executescript(
        "ALTER TABLE published DROP COLUMN start; ALTER TABLE published DROP COLUMN starts;"
        "ALTER TABLE sessions DROP COLUMN first; PRAGMA user_version = 1"
    )
    state.close()
    for _ in range(2):
        again = CoordinatorState(tmp_path)
        begun = dataclasses.replace(session("s"), first=LARGEST)
        assert list(again.rows()) == [dataclasses.replace(row, start=2), begun]
        again.close()


def test_damaged_row_is_an_error_in_one_line(state) -> None:
    """Ignoring it would publish an order twice."""
    state.write(rows_of("j"))
    state._connection.execute("UPDATE settled SET book = 'torn'")
    with pytest.raises(CorruptedError, match=r"coordinator\.sqlite cannot be read"):
        list(state.rows())


@pytest.mark.parametrize(
    "change",
    [
        "jobs SET job_id = 'another'",
        "jobs SET heard_us = 'x'",
        "agents SET acknowledged = x'ff'",
        "balances SET status = json_set(status, '$.rank', 'x')",
        "balances SET status = '7'",
        "sessions SET status = json_set(status, '$.host', 7)",
        "published SET positions = '[]'",
        "late SET events = 'x'",
        "settled SET more_findings = x'ff'",
    ],
)
def test_coordinator_with_damaged_state_fails_at_start(state, tmp_path, change) -> None:
    state.write([row for row in rows_of("j") if not isinstance(row, BalanceRow)])
    state.write([BalanceRow(IterationStatus("j", "sj", 0, 3, True), "a", 3)])
    state._connection.execute(f"UPDATE {change}")
    state.close()
    coordinator = JobCoordinator(CoordinatorSettings(state_dir=str(tmp_path)))
    try:
        with pytest.raises(CorruptedError, match=r"^/.*coordinator\.sqlite "):
            coordinator.start()
    finally:
        coordinator.stop()

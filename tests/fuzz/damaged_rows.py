"""Targets for rows of databases with arbitrary values in any column, as read by the next process.

The input is pieces, each a column, a kind of value and the value: bytes, or a text of them.
"""

from __future__ import annotations

import atexit
import contextlib
import sqlite3
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import samples
from fuzz.input_pieces import pieces
from fuzz.streams import PLANS, SESSION

from rankdump._core.plan import plan_to_json
from rankdump._core.record import StatisticRows
from rankdump._core.status import StatusView
from rankdump._wire.frames import make_metadata_frame
from rankdump._wire.status_messages import view_to_wire
from rankdumpd.agent.declarations import reread_metadata_frame
from rankdumpd.agent.ledger import database
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import IterationRemoval
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.records import (
    FrameId,
    MetadataFrame,
    RecordOutcome,
    RecordStatus,
    StatisticRowsResult,
    make_drop_outcome,
)
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.coordinator.fleet_views import PublishedOffsets
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import StateWriter, build_status_view
from rankdumpd.coordinator.service.fleet_status import select_jobs as chosen_jobs
from rankdumpd.coordinator.state import (
    JOB_TABLES,
    STATE_SCHEMA,
    STATE_TABLES_VERSION,
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
)
from rankdumpd.server.metrics import MetricCounters
from rankdumpd.settings import CoordinatorSettings

OTHER = "session-2"
_DROPPED = {"disk_low": (0,)}
_STATE_TABLES = ("agents", *JOB_TABLES)


class _DatabaseTarget:
    """A database whose rows an input changes; they are restored for the next input."""

    def __init__(self, path: Path, where: str, found: Sequence[str]) -> None:
        """Change columns of some tables in the rows of which `where` is true."""
        self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        atexit.register(self._base.close)
        self._base.execute("PRAGMA synchronous = OFF")
        self._where, self._tables = where, found
        self.columns = [
            (table, column)
            for table in found
            for _, column, *_ in self._base.execute(f"PRAGMA table_info({table})")
        ]
        for table in found:
            self._base.execute(f"CREATE TEMP TABLE kept_{table} AS SELECT * FROM {table}")

    @contextmanager
    def changed(self, data: bytes) -> Generator[None]:
        """Change what an input says, until the end."""
        for piece in pieces(data):
            if len(piece) > 1:
                self._change(self.columns[piece[0] % len(self.columns)], piece[1], piece[2:])
        try:
            yield
        finally:
            with self._base:
                self._base.execute("BEGIN")
                for table in self._tables:
                    self._base.execute(f"DELETE FROM main.{table}")
                    self._base.execute(f"INSERT INTO main.{table} SELECT * FROM kept_{table}")
                self._base.execute("COMMIT")

    def _change(self, place: tuple[str, str], kind: int, value: bytes) -> None:
        table, column = place
        values: tuple[tuple[str, Any], ...] = (
            ("CAST(? AS TEXT)", value),
            ("?", value),
            ("?", int.from_bytes(value[:8], "little", signed=True)),
            ("?", float(int.from_bytes(value[:8], "little")) / 7),
            ("?", None),
        )
        term, bound = values[kind % len(values)]
        # Of a key that there is already the row stays as it was.
        statement = f"UPDATE OR IGNORE main.{table} SET {column} = {term} WHERE {self._where}"
        with contextlib.suppress(sqlite3.IntegrityError):
            self._base.execute(statement, (bound,))


def _folder() -> Path:
    held = tempfile.TemporaryDirectory(prefix="rankdump-fuzz-")
    atexit.register(held.cleanup)
    return Path(held.name)


def _loosely(path: Path, script: str, version: int) -> None:
    """Make tables that take nothing in the place of a value, as a damaged page may have it."""
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.executescript(f"{script.replace(' NOT NULL', '')} PRAGMA user_version = {version};")


@cache
def ledger_base() -> tuple[AgentLedger, _DatabaseTarget]:
    """Return a ledger with two sessions, each of which has a row in every table."""
    folder = _folder()
    _loosely(folder / "ledger.sqlite", database.SCHEMA, database.SCHEMA_VERSION)
    ledger = AgentLedger(folder, report_bytes=1 << 20)
    atexit.register(ledger.close)
    for session_id in (SESSION, OTHER):
        _fill(ledger, session_id)
    found = ("sessions", "records", "figures", "declarations", "iterations", "tallies", "retired")
    return ledger, _DatabaseTarget(folder / "ledger.sqlite", f"session_id = '{SESSION}'", found)


def _fill(ledger: AgentLedger, session_id: str) -> None:
    plan = plan_to_json(PLANS[1])
    ledger.open_session(replace(samples.REQUEST, session_id=session_id, plan_json=plan))
    declared, judged = list[MetadataFrame](), list[StatisticRowsResult]()
    for sequence, each in enumerate(samples.DECLARATIONS, 3):
        raw = make_metadata_frame(sequence, each).SerializeToString()
        if isinstance(each, StatisticRows):
            judged.append(StatisticRowsResult(FrameId(session_id, sequence), each, _DROPPED, raw))
        else:
            declared.append(reread_metadata_frame(raw, session_id))
    outcomes = [
        make_drop_outcome(FrameId(session_id, 1), samples.HEAD, "disk_low"),
        RecordOutcome(
            FrameId(session_id, 2), samples.HEAD, RecordStatus.STORED, path="a.npy", bytes_stored=9
        ),
    ]
    ledger.commit(outcomes, judged, declared, {session_id: 10}, synced=False)
    about = {"job": "job", "why": "age"}
    ledger.retention.begin_removals([IterationRemoval(session_id, 1, 9, samples.STAMP, about)])


def sessions(data: bytes) -> None:
    """Rows of one session: the next agent starts, has the other one, and can tell of all it has."""
    ledger, base = ledger_base()
    with base.changed(data):
        retention, usage = ledger.retention, DumpUsage()
        usage.restore(retention.list_usage(), retention.counts())
        assert all(isinstance(job_id, str) for job_id, *_ in usage.jobs())
        retention.unfinished()
        registry = SessionRegistry(
            ledger,
            max_record_bytes=1,
            capacity_fault=lambda _: "",
            counters=MetricCounters(),
        )
        found = registry.recover()
        assert OTHER in {session.request.session_id for session in found}
        views = tuple(status for session in found for status in session.iterations())
        said = [sentence for session in found for sentence in session.findings()]
        view = StatusView(tuple(session.status() for session in found), views)
        view_to_wire(replace(view, findings=(*said, *registry.findings())))
        for session in found:
            assert session.acknowledged <= session.watermark


@cache
def state_base() -> tuple[CoordinatorState, _DatabaseTarget]:
    """Return the state of a coordinator that has a row of every kind."""
    folder = _folder()
    _loosely(folder / "coordinator.sqlite", STATE_SCHEMA, STATE_TABLES_VERSION)
    state = CoordinatorState(folder)
    atexit.register(state.close)
    state.write(
        [
            AgentRow("agent", "host", 7, samples.STAMP),
            JobRow("job", ("/trees/a",), samples.STAMP, samples.STAMP),
            PublishedIterationRow("job", 0, 3, 2, (0,), {1: 4}, 0, {1: 2}),
            LateEventsRow("job", 0, 3, 1, 5),
            SessionStatusRow(samples.SESSION_STATUS, "agent", 5, 4),
            BalanceRow(samples.BALANCE, "agent", 6),
            RankTimeoutsRow("job", 0, samples.TIMEOUTS),
            FindingRow("job", 0, samples.FINDING),
            JobResultRow("job", PublishedOffsets("/trees/a", {"a.csv": 3}, 4), "", 1),
        ]
    )
    return state, _DatabaseTarget(folder / "coordinator.sqlite", "1", _STATE_TABLES)


def states(data: bytes) -> None:
    """Rows of a coordinator's state: it starts and can tell of all it has, or says why not."""
    state, base = state_base()
    with base.changed(data):
        gather = ReportStore(deadline_s=1.0)
        StateWriter(gather, state, CoordinatorSettings()).restore_store()
        fleet = gather.build_fleet_view(now_s=1e6)
        view_to_wire(build_status_view(fleet, chosen_jobs(fleet, ""), ""))

"""Tests of AgentLedger: commits, repetitions, rereading after a restart, and migrations."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support.tensor_layouts import shard_rows

from rankdump._core.graph import GraphPart, OperatorGraph
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.record import StatisticRows, TensorSide
from rankdump._core.session_protocol import ChangedPlan, IterationEnd, SessionEnd
from rankdump._core.status import IterationStatus, SessionState
from rankdump._layout.tree_paths import FilePlace
from rankdump.errors import ConfigError, UnavailableError
from rankdumpd.agent.ledger import database, reader
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import (
    OutcomeCountRow,
    StoredRecord,
    StoredStatisticRows,
)
from rankdumpd.agent.records import (
    BaselineMatch,
    BaselineVerdict,
    BinTensor,
    FrameId,
    JoinedMember,
    MetadataFrame,
    OperatorMembership,
    RecordOutcome,
    RecordStatus,
    StatisticRowsResult,
    StatisticTableRow,
    TreeFile,
    make_drop_outcome,
)
from rankdumpd.agent.session.rank_session import CommitProgress

FIRST_TABLES = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, request TEXT NOT NULL, plan BLOB NOT NULL, state TEXT NOT NULL,
    watermark INTEGER NOT NULL, iterations_seen INTEGER NOT NULL, notes TEXT NOT NULL,
    graphs TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE records (
    session_id TEXT NOT NULL, sequence INTEGER NOT NULL, graph INTEGER NOT NULL,
    iteration INTEGER NOT NULL, fate TEXT NOT NULL, reason TEXT NOT NULL, path TEXT NOT NULL,
    op_type TEXT NOT NULL, op_name TEXT NOT NULL, argument TEXT NOT NULL, dtype TEXT NOT NULL,
    shape TEXT NOT NULL, bytes_in INTEGER NOT NULL, bytes_stored INTEGER NOT NULL,
    digest TEXT NOT NULL, PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE iterations (
    session_id TEXT NOT NULL, sequence INTEGER NOT NULL, iteration INTEGER NOT NULL,
    expected INTEGER NOT NULL, dropped TEXT NOT NULL, PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
"""
"""The tables that the first release made, as far as they have changed since."""

BALANCE = IterationStatus("job", "session", 0, 0, True)


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = AgentLedger(tmp_path / "state")
    yield ledger
    ledger.close()


@pytest.fixture
def stored(make_head):
    def make(sequence: int, **fields) -> RecordOutcome:
        return RecordOutcome(
            FrameId("session", sequence),
            make_head(**fields),
            RecordStatus.STORED,
            path=f"p{sequence}",
            digest="d",
            bytes_stored=9,
        )

    return make


@pytest.fixture
def make_judged(make_kind):
    def make(
        sequence: int, count: int, refused=None, iteration: int = 0, **fields
    ) -> StatisticRowsResult:
        columns = (make_kind(),) * count, tuple(range(count)), ("1",) * count
        rows = StatisticRows(iteration, *columns, **fields)
        return StatisticRowsResult(
            FrameId("session", sequence), rows, refused or {}, f"raw{sequence}".encode()
        )

    return make


def rowed(outcome: RecordOutcome) -> RecordOutcome:
    row = StatisticTableRow(
        FilePlace("folder", "statistic.csv"), f"row {outcome.frame_id.sequence}"
    )
    return outcome._replace(row=row)


def declared(sequence: int, declaration) -> MetadataFrame:
    return MetadataFrame(FrameId("session", sequence), declaration, f"raw{sequence}".encode())


def commit(
    ledger: AgentLedger, outcomes=(), declarations=(), judged=(), watermark: int = 0
) -> None:
    ledger.commit(outcomes, judged, declarations, {"session": watermark}, synced=False)


def test_ledger_resumes_at_first_gap(ledger, make_request, stored):
    """After a restart the watermark and the committed numbers above it are known."""
    ledger.open_session(make_request())
    commit(ledger, [stored(n) for n in (1, 2, 5)], [declared(3, IterationEnd(0, 2))], watermark=1)
    row = ledger.find("session")
    assert row is not None
    beyond = ledger.committed_beyond("session", row.watermark)
    progress = CommitProgress(row.watermark, beyond)
    assert progress.watermark == 3
    assert 5 in progress
    assert 4 not in progress


def unpacked(outcome: RecordOutcome, cause: str = "rank_waits") -> RecordOutcome:
    return outcome._replace(unpacked=cause)


def test_unpacked_files_are_kept_in_the_order_of_commits(ledger, make_request, stored, tmp_path):
    """By iteration, over a restart, until their sizes are entered."""
    ledger.open_session(make_request())
    commit(ledger, [unpacked(stored(3, iteration=1)), stored(4, iteration=1)])
    commit(ledger, [unpacked(stored(2)), unpacked(stored(1)), unpacked(stored(5, iteration=1))])
    assert ledger.unpacked.sums == (4, 36)
    ledger.close()
    again = AgentLedger(tmp_path / "state")
    files = again.unpacked.list_next(10)
    assert [(file.iteration, file.sequence, file.path) for file in files] == [
        (1, 3, "p3"),
        (1, 5, "p5"),
    ]
    assert again.unpacked.list_next(1) == files[:1]
    assert again.unpacked.count("session", 1) == 2
    again.unpacked.enter_packed([(file, 5) for file in files], synced=False)
    assert again.unpacked.sums == (2, 18)
    assert not again.unpacked.has(files[0])
    kept = [each for each in again.kept("session", 1) if isinstance(each, StoredRecord)]
    assert [each.record.bytes_stored for each in kept] == [5, 9, 5]
    assert [file.sequence for file in again.unpacked.list_next(10)] == [1, 2]
    again.close()


def test_unpacked_files_are_counted_once(ledger, make_request, stored):
    """A known number, and a transaction that fails, change nothing."""
    ledger.open_session(make_request())
    assert ledger.unpacked.sums == (0, 0)
    for _ in range(2):
        commit(ledger, [unpacked(stored(1))])
        assert ledger.unpacked.sums == (1, 9)
    broken = unpacked(stored(2))._replace(path=cast("str", object()))
    with pytest.raises(sqlite3.Error):
        commit(ledger, [unpacked(stored(3)), broken])
    assert ledger.unpacked.sums == (1, 9)


def test_rows_are_not_folded_while_a_file_is_unpacked(ledger, make_request, stored):
    """Its size is yet to be entered."""
    ledger.open_session(make_request())
    commit(ledger, [unpacked(stored(1))], [declared(2, IterationEnd(0, 1))], watermark=2)
    ledger.enter_iteration_end(FrameId("session", 2), IterationEnd(0, 1), (), BALANCE)
    ledger._now_us = lambda: 1
    ledger.note_departed_sessions(["session"])
    ledger._now_us = lambda: int(86_401e6)
    assert not ledger.fold_some()
    ledger.unpacked.enter_packed([(ledger.unpacked.list_next(1)[0], 4)], synced=False)
    assert ledger.fold_some()
    assert [row.bytes_stored for row in ledger.counts("session")] == [4]


def test_commit_of_known_frame_changes_nothing(ledger, make_request, make_head, stored):
    """A number in the ledger keeps its first outcome."""
    ledger.open_session(make_request())
    for _ in range(2):
        commit(ledger, [stored(1)], [declared(2, IterationEnd(0, 1))])
    commit(ledger, [make_drop_outcome(FrameId("session", 1), make_head(), "disk_full")])
    assert ledger.counts("session") == [OutcomeCountRow(0, RecordStatus.STORED, "", 1, 16, 9)]
    assert ledger.unapplied("session") == [b"raw2"]


def test_counts_are_limited_to_63_bits(ledger, make_request, make_head):
    """Otherwise a rank that declares huge sizes would keep its agent from starting."""
    ledger.open_session(make_request())
    lost = [
        make_drop_outcome(FrameId("session", n), make_head(byte_count=1 << 62), "torn")
        for n in (1, 2, 3)
    ]
    commit(ledger, lost)
    assert ledger.counts("session") == [
        OutcomeCountRow(0, RecordStatus.DROPPED, "torn", 3, (1 << 63) - 1, 0)
    ]


def test_rows_survive_reopening(ledger, make_request, make_head, stored, tmp_path):
    request = make_request(rank=3, world_size=8, host="h\u00e9te")
    ledger.open_session(request)
    commit(
        ledger, [stored(1), make_drop_outcome(FrameId("session", 2), make_head(iteration=1), "why")]
    )
    end = IterationEnd(0, 4, {"full": 3}, stall_us=5, first_position=6, last_position=7)
    ledger.enter_iteration_end(FrameId("session", 3), end, [2, 1], BALANCE)
    ledger.close()
    again = AgentLedger(tmp_path / "state")
    assert again.unfinished() == ["session"]
    row = again.find("session")
    assert row is not None
    assert row.request == replace(request, config_source=b"")
    assert (row.state, row.ordered_graphs) == (SessionState.OPEN, (1, 2))
    assert again.ends("session") == [IterationEnd(0, 4, {"full": 3}, 5, 6, 7)]
    assert len(again.counts("session")) == 2
    (kept,) = again.kept("session", 0)
    assert isinstance(kept, StoredRecord)
    record = kept.record
    assert (kept.graph, record.path, record.shape, record.bytes_in) == (0, "p1", (4,), 16)
    assert (kept.sequence, record.timestamp_us) == (1, 1)
    again.close()


def test_unfinished_sessions_are_ordered_by_opening(tmp_path, make_request):
    """To open one again changes nothing of that."""
    now_us = iter(range(100, 200))
    ledger = AgentLedger(tmp_path / "other", now_us=lambda: next(now_us))
    for name in ("c", "a", "b", "c"):
        ledger.open_session(make_request(session_id=name))
    assert ledger.unfinished() == ["c", "a", "b"]
    ledger.close()


def test_applied_session_end_closes_session(ledger, make_request):
    ledger.open_session(make_request())
    goodbye = SessionEnd(7, ("never matched: x",))
    commit(ledger, (), [declared(1, goodbye)])
    assert ledger.unfinished() == ["session"]
    ledger.enter_session_end(FrameId("session", 1), goodbye)
    assert ledger.unfinished() == []
    row = ledger.find("session")
    assert row is not None
    assert (row.state, row.iterations_seen) == (SessionState.CLOSED, 7)
    assert row.notes == ("never matched: x",)


def test_table_rows_are_read_in_batches_by_number(
    ledger, make_request, make_judged, stored, monkeypatch
):
    """Whatever order frames were committed in, their rows come by number, some at a time."""
    monkeypatch.setattr(reader, "MAX_READ_ROWS", 2)
    ledger.open_session(make_request())
    commit(ledger, [rowed(stored(5)), rowed(stored(2))], judged=[make_judged(3, 2)])
    commit(ledger, [rowed(stored(4)), stored(1), rowed(stored(6))])
    table = FilePlace("folder", "statistic.csv")
    first = [StatisticTableRow(table, "row 2"), StoredStatisticRows(3, b"raw3", {})]
    assert ledger.table_rows("session", after=0, up_to=5) == (first, 3)
    second = [StatisticTableRow(table, "row 4"), StatisticTableRow(table, "row 5")]
    assert ledger.table_rows("session", after=3, up_to=5) == (second, 5)
    assert ledger.table_rows("session", after=6, up_to=9) == ([], 9)


class TestStatisticRows:
    """Frames of statistics, with the outcome of each row."""

    def test_counts_rows_by_outcome_and_reason(self, ledger, make_request, make_judged, stored):
        """Rows count like records, without bytes."""
        ledger.open_session(make_request())
        refused = {"disk_low": [0, 2], "side_excluded": (1,)}
        judged = [
            make_judged(2, 4, refused),
            make_judged(3, 5),
            make_judged(4, 1, degraded="step_overhead"),
        ]
        for _ in range(2):
            commit(ledger, [stored(1)], judged=[*judged, make_judged(5, 2, {"why": range(2)})])
        assert sorted(ledger.counts("session"), key=str) == [
            OutcomeCountRow(0, RecordStatus.DEGRADED, "step_overhead", 1, 0, 0),
            OutcomeCountRow(0, RecordStatus.DROPPED, "disk_low", 2, 0, 0),
            OutcomeCountRow(0, RecordStatus.DROPPED, "side_excluded", 1, 0, 0),
            OutcomeCountRow(0, RecordStatus.DROPPED, "why", 2, 0, 0),
            OutcomeCountRow(0, RecordStatus.STORED, "", 1, 16, 9),
            OutcomeCountRow(0, RecordStatus.STORED, "", 6, 0, 0),
        ]
        assert ledger.committed_beyond("session", 1) == [2, 3, 4, 5]

    def test_kept_returns_tensors_by_number(self, ledger, make_request, make_judged, stored):
        """Beside records; a frame of which nothing was kept is not given out."""
        ledger.open_session(make_request())
        judged = [make_judged(2, 3, {"why": [1]}), make_judged(4, 1, {"why": [0]})]
        commit(ledger, [stored(3), stored(1)], judged=judged)
        commit(ledger, judged=[make_judged(5, 1, iteration=1)])
        first, frame, third = ledger.kept("session", 0)
        assert (first.sequence, third.sequence) == (1, 3)
        assert frame == StoredStatisticRows(2, b"raw2", {"why": [1]})
        assert ledger.table_rows("session", after=0, up_to=4) == ([frame], 4)


def test_applied_metadata_is_not_returned_again(ledger, make_request):
    """Parts of a graph that is in the tree are not given out again, and its order is known."""
    ledger.open_session(make_request())
    part = GraphPart(OperatorGraph(3, ()), first=True, last=True)
    commit(ledger, (), [declared(1, part), declared(2, part), declared(3, part)])
    ledger.mark_applied([FrameId("session", 1), FrameId("session", 2)], [3])
    assert ledger.unapplied("session") == [b"raw3"]
    row = ledger.find("session")
    assert row is not None
    assert row.ordered_graphs == (3,)
    assert ledger.last_end("session") == 0


def test_migration_from_version_3_keeps_table_of_rows(tmp_path, make_request):
    """They knew the folder of their table only; a record without a row has none."""
    folder = tmp_path / "state"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        base.executescript(FIRST_TABLES + database.MIGRATIONS[0] + database.MIGRATIONS[2])
        base.execute("PRAGMA user_version = 3")
        for sequence, row in ((1, "a row"), (2, "")):
            base.execute(
                "INSERT INTO records VALUES ('session', ?1, 0, 0, 'stored', '', 'p', 'T', 'a', '',"
                " 'float32', '[4]', 16, 9, 'd', 7, 'rank_0/Net/0/0', ?2)",
                (sequence, row),
            )
        base.commit()
    ledger = AgentLedger(folder)
    ledger.open_session(make_request())
    table = FilePlace("rank_0/Net/0/0", "statistic.csv")
    found = [StatisticTableRow(table, "a row")]
    assert ledger.table_rows("session", after=0, up_to=9) == (found, 9)
    paths = [
        each.record.path for each in ledger.kept("session", 0) if isinstance(each, StoredRecord)
    ]
    assert paths == ["p", "p"]
    assert ledger.members("session", 0, before=9) == []
    ledger.close()


def test_ledger_keeps_each_layout_once(tmp_path, make_request, stored):
    """Records have it back with micro-batch and phase; a start removes layouts without records."""
    ledger = AgentLedger(tmp_path / "state")
    ledger.open_session(make_request())
    fields = {"layout": shard_rows(1, 2, (4,)), "microbatch": 0, "phase": "eval"}
    sent = [stored(number) for number in (1, 2, 3)]
    sent[:2] = [
        each._replace(head=each.head._replace(kind=each.head.kind._replace(**fields)))
        for each in sent[:2]
    ]
    commit(ledger, sent)
    kept = [each.record for each in ledger.kept("session", 0) if isinstance(each, StoredRecord)]
    assert [(each.layout, each.microbatch, each.phase) for each in kept] == [
        (fields["layout"], 0, "eval"),
        (fields["layout"], 0, "eval"),
        (None, None, ""),
    ]
    ledger.close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as base:
        assert base.execute("SELECT count(*) FROM layouts").fetchone() == (1,)
        base.execute("DELETE FROM records")
        base.commit()
    AgentLedger(tmp_path / "state").close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as base:
        assert base.execute("SELECT count(*) FROM layouts").fetchone() == (0,)


def test_members_have_operator_file_once_joined(ledger, make_request, stored):
    """Then the manifest names the operator's file, and their share of it."""
    ledger.open_session(make_request())
    whole = FilePlace("5/Net/0", "123.zst", "long.name.zst")
    sent = [
        stored(n, slot=n)._replace(
            membership=OperatorMembership(f"output.{n}", whole, head_bytes=5)
        )
        for n in (1, 2)
    ]
    commit(ledger, [*sent, stored(3)])
    first, second = ledger.members("session", 0, before=9)
    assert (first.whole, first.head_bytes, first.joined) == (whole, 5, False)
    assert second.tensor == BinTensor(TensorSide.OUTPUT, 2, "float32", (4,), 16)
    ledger.mark_joined("session", [JoinedMember(1, 6), JoinedMember(2, 4)], synced=True)
    assert [each.joined for each in ledger.members("session", 0, before=9)] == [True, True]
    records = [each.record for each in ledger.kept("session", 0) if isinstance(each, StoredRecord)]
    kept = [(record.path, record.member) for record in records]
    assert kept == [(whole.path, "output.1"), (whole.path, "output.2"), ("p3", "")]
    (counts,) = ledger.counts("session")
    assert counts.bytes_stored == 6 + 4 + 9
    assert [each.sequence for each in ledger.members("session", 0, before=2)] == [1]


def test_migration_from_version_0_keeps_rows(tmp_path, make_request, make_judged, stored):
    """Committed rows of an earlier release are read, and new rows are added."""
    folder = tmp_path / "state"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        base.executescript(FIRST_TABLES)
        base.execute(
            "INSERT INTO records VALUES"
            " ('session', 1, 0, 0, 'stored', '', 'p1', 'T', 'a', '', 'float32', '[4]', 16, 9, 'd')"
        )
        base.execute("INSERT INTO iterations VALUES ('session', 9, 0, 4, '{}')")
        base.commit()
    for _ in range(2):
        ledger = AgentLedger(folder)
        ledger.open_session(make_request())
        commit(ledger, [rowed(stored(2))], judged=[make_judged(3, 1)])
        first, second, frame = ledger.kept("session", 0)
        assert isinstance(first, StoredRecord)
        assert isinstance(second, StoredRecord)
        assert [first.record.path, second.record.path] == ["p1", "p2"]
        assert [first.record.timestamp_us, second.record.timestamp_us] == [0, 1]
        row = StatisticTableRow(FilePlace("folder", "statistic.csv"), "row 2")
        assert ledger.table_rows("session", after=0, up_to=9) == ([row, frame], 9)
        assert frame.sequence == 3
        assert ledger.ends("session") == [IterationEnd(0, 4, {})]
        ledger.close()


def test_migration_from_version_7_knows_why_tensors_were_degraded(tmp_path, make_request):
    """Until then there was one reason."""
    folder = tmp_path / "state"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        base.executescript(database.SCHEMA)
        base.execute("ALTER TABLE figures DROP COLUMN reason")
        for column in ("fingerprint", "baseline", "same_as"):
            base.execute(f"ALTER TABLE records DROP COLUMN {column}")
        base.execute("PRAGMA user_version = 7")
        for sequence, fate in ((1, "degraded"), (2, "stored")):
            base.execute(
                "INSERT INTO figures VALUES ('session', ?, 0, ?, 3, '{}', x'')", (sequence, fate)
            )
        base.execute("INSERT INTO tallies VALUES ('session', 1, 'degraded', '', 2, 0, 0)")
        base.commit()
    ledger = AgentLedger(folder)
    ledger.open_session(make_request())
    assert sorted(ledger.counts("session"), key=str) == [
        OutcomeCountRow(0, RecordStatus.DEGRADED, "buffer_full", 3, 0, 0),
        OutcomeCountRow(0, RecordStatus.STORED, "", 3, 0, 0),
        OutcomeCountRow(1, RecordStatus.DEGRADED, "buffer_full", 2, 0, 0),
    ]
    ledger.close()


def test_migration_from_version_10_keeps_records(tmp_path, make_request, stored):
    """Records of that version have no baseline."""
    folder = tmp_path / "state"
    ledger = AgentLedger(folder)
    ledger.open_session(make_request())
    commit(ledger, [stored(1)])
    ledger.close()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        for column in ("baseline", "same_as"):
            base.execute(f"ALTER TABLE records DROP COLUMN {column}")
        base.execute("PRAGMA user_version = 10")
        base.commit()
    ledger = AgentLedger(folder)
    file = TreeFile("/data/first", "rank_0/x.npy")
    match = BaselineMatch(BaselineVerdict.SAME, file)
    commit(ledger, [stored(2)._replace(status=RecordStatus.SAME_AS_BASELINE, baseline=match)])
    found = ledger.kept("session", 0)
    ledger.close()
    records = [each.record for each in found if isinstance(each, StoredRecord)]
    assert [TreeFile(each.baseline, each.same_as) for each in records] == [TreeFile("", ""), file]


def test_ledger_of_later_version_is_rejected(tmp_path):
    """An older agent rejects unknown tables and leaves the folder unlocked."""
    folder = tmp_path / "state"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as base:
        base.execute("PRAGMA user_version = 99")
    for _ in range(2):
        with pytest.raises(ConfigError, match="user_version: 99 is not allowed"):
            AgentLedger(folder)


def test_second_agent_on_ledger_is_rejected(ledger, tmp_path):
    """Two agents on one state folder would acknowledge for each other."""
    with pytest.raises(UnavailableError, match="used by another agent"):
        AgentLedger(tmp_path / "state")


def test_ledger_close_may_be_repeated(ledger):
    """Closing twice is closing once."""
    ledger.close()
    ledger.close()


def test_changed_plans_are_kept_as_long_as_their_session(ledger, make_request, stored, tmp_path):
    """Also when all other rows of a session that ended are folded: its rank may resend frames."""
    plan = DumpPlan(OutputSettings("/x"))
    ledger.open_session(make_request())
    frames = [declared(2, ChangedPlan(1, plan)), declared(3, IterationEnd(0, 1))]
    commit(ledger, [stored(1)], frames, watermark=3)
    assert ledger.unapplied("session") == [b"raw2", b"raw3"]
    ledger.mark_applied_and_keep(FrameId("session", 2))
    ledger.enter_iteration_end(FrameId("session", 3), IterationEnd(0, 1), (), BALANCE)
    ledger.enter_session_end(FrameId("session", 4), SessionEnd(1))
    ledger.close()
    later = AgentLedger(tmp_path / "state", now_us=lambda: 1 << 60)
    while later.fold_some():
        pass
    assert later.changed_plans("session") == [b"raw2"]
    assert later.unapplied("session") == []
    later.close()

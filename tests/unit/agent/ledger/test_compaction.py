"""Tests of folding in the ledger: removed rows of ended sessions, and the sums that are kept."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from rankdump._core.events import EventColumns, EventKind, RankEvent
from rankdump._core.record import StatisticRows
from rankdump._core.session_protocol import IterationEnd, SessionEnd
from rankdump._core.status import IterationStatus, SessionState
from rankdump.errors import CorruptedError, ExhaustedError
from rankdumpd.agent.ledger import retention
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import OutcomeCountRow
from rankdumpd.agent.records import (
    FrameId,
    MetadataFrame,
    RecordOutcome,
    RecordStatus,
    StatisticRowsResult,
    make_drop_outcome,
)
from rankdumpd.agent.session.rank_session import CommitProgress

DAY_US = 86_400 * 10**6
BALANCE = IterationStatus("job", "session", 0, 0, True)


class SettableClock:
    """Microseconds since the epoch, set by the test."""

    now_us = 10 * DAY_US

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: SettableClock):
    ledger = AgentLedger(tmp_path / "state", now_us=clock)
    yield ledger
    ledger.close()


@pytest.fixture
def dump(ledger: AgentLedger, make_request, make_head, make_kind):
    """Enters a session of two iterations that ended and one that did not."""

    def entered(session_id: str = "session", *, closed: bool = True) -> None:
        ledger.open_session(make_request(session_id=session_id))
        number = 0
        for iteration in range(3):
            heads = [make_head(iteration=iteration, slot=slot) for slot in range(4)]
            tickets = [FrameId(session_id, number + n) for n in range(1, 7)]
            outcomes = [
                *(
                    RecordOutcome(t, h, RecordStatus.STORED, bytes_stored=9)
                    for t, h in zip(tickets[:2], heads[:2], strict=True)
                ),
                RecordOutcome(tickets[2], heads[2], RecordStatus.LINKED),
                make_drop_outcome(tickets[3], heads[3], "disk_full"),
            ]
            columns = (make_kind(),) * 5, tuple(range(5)), ("1",) * 5
            rows = StatisticRows(iteration, *columns, degraded="buffer_full")
            judged = StatisticRowsResult(tickets[4], rows, {"disk_low": [0, 3]}, b"rows")
            ended = IterationEnd(iteration, 9)
            end = MetadataFrame(tickets[5], ended, b"end")
            ends = [end] if iteration < 2 else []
            # As the committer has it: the watermark is that of the batch before.
            ledger.commit(outcomes, [judged], ends, {session_id: number}, synced=False)
            if ends:
                ledger.enter_iteration_end(end.frame_id, ended, (), BALANCE)
            number += 6
        if closed:
            left = SessionEnd(3)
            bye = MetadataFrame(FrameId(session_id, number), left, b"bye")
            ledger.commit((), (), [bye], {session_id: number - 1}, synced=False)
            ledger.enter_session_end(bye.frame_id, left)

    return entered


def tidied(ledger: AgentLedger) -> None:
    while ledger.fold_some():
        pass


def rows_of(ledger: AgentLedger, table: str) -> int:
    ((count,),) = ledger._select(f"SELECT COUNT(*) FROM {table}")
    return count


def sums(ledger: AgentLedger) -> Counter:
    found: Counter = Counter()
    for row in ledger.counts("session"):
        assert isinstance(row, OutcomeCountRow)
        for name in ("records", "bytes_in", "bytes_stored"):
            found[row.iteration, row.status, row.reason, name] += getattr(row, name)
    return found


def known(ledger: AgentLedger) -> set[int]:
    row = ledger.find("session")
    assert row is not None
    progress = CommitProgress(row.watermark, ledger.committed_beyond("session", row.watermark))
    return {number for number in range(1, 30) if number in progress}


@pytest.mark.parametrize("at_once", [4096, 3])
def test_rows_of_closed_session_are_folded_into_sums_after_a_day(
    ledger, dump, clock, monkeypatch, at_once
):
    """Balances, ends and known numbers do not change; rows of open iterations stay."""
    monkeypatch.setattr(retention, "MAX_FOLDED_ROWS", at_once)
    dump()
    before, ends, numbers = sums(ledger), ledger.ends("session"), known(ledger)
    clock.now_us += DAY_US - 1
    tidied(ledger)
    assert rows_of(ledger, "records") == 12
    clock.now_us += 1
    tidied(ledger)
    assert (sums(ledger), ledger.ends("session"), known(ledger)) == (before, ends, numbers)
    assert rows_of(ledger, "records") == 4
    assert rows_of(ledger, "figures") == 1
    assert rows_of(ledger, "declarations") == 1
    assert ledger.kept("session", 0) == []
    assert not ledger.fold_some()


@pytest.mark.parametrize(
    "change",
    [
        "figures SET refused = '{\"a'",
        'figures SET refused = \'{"disk_low": "x"}\'',
        "figures SET refused = x'ff'",
        "figures SET kept = 'x'",
        "records SET bytes_in = 9223372036854775807",
        "records SET bytes_stored = 9223372036854775807",
    ],
)
def test_damaged_rows_do_not_block_folding(ledger, dump, clock, change):
    """Their readable columns are summed up, and rows of all other sessions are folded."""
    dump("damaged")
    dump()
    with ledger._transaction() as base:
        base.execute(f"UPDATE {change} WHERE session_id = 'damaged'")
    before = sums(ledger)
    clock.now_us += DAY_US
    tidied(ledger)
    assert sums(ledger) == before
    assert rows_of(ledger, "records") == 2 * 4
    assert rows_of(ledger, "figures") == 2 * 1


def test_unreported_items_are_not_folded(tmp_path, make_request, clock):
    """A frame whose events are not reported yet is kept after a day."""
    ledger = AgentLedger(tmp_path / "state", report_bytes=1 << 20, now_us=clock)
    ledger.open_session(make_request())
    columns = EventColumns.from_events([RankEvent(0, 0, 0, 0, "op", EventKind.OPERATOR, 1, 2)])
    events = MetadataFrame(FrameId("session", 1), columns, b"events")
    end = MetadataFrame(FrameId("session", 2), IterationEnd(0, 0), b"end")
    ledger.commit((), (), [events, end], {"session": 2}, synced=False)
    ledger.enter_iteration_end(end.frame_id, IterationEnd(0, 0), (), BALANCE)
    ledger.enter_session_end(FrameId("session", 3), SessionEnd(1))
    clock.now_us += 2 * DAY_US
    tidied(ledger)
    told, balance = ledger.log.items(0)
    assert told.body == b"events"
    ledger.log.acknowledged(balance.number)
    ledger.open_session(make_request())
    ledger.note_departed_sessions(["session"])
    clock.now_us += 2 * DAY_US
    tidied(ledger)
    assert rows_of(ledger, "declarations") == 0
    ledger.close()


def test_forget_folds_one_iteration(ledger, dump):
    """An iteration whose files went is folded at once; its neighbours keep their rows."""
    dump(closed=False)
    before, numbers = sums(ledger), known(ledger)
    ledger.forget("session", 0)
    ledger.forget("session", 0)
    ledger.forget("session", 2)
    assert (sums(ledger), known(ledger)) == (before, numbers)
    assert ledger.kept("session", 0) == []
    assert len(ledger.kept("session", 1)) == len(ledger.kept("session", 2)) == 4


def test_folded_number_is_not_entered_again(ledger, dump, make_head, clock):
    """A frame that is resent after folding changes nothing."""
    dump()
    clock.now_us += DAY_US
    tidied(ledger)
    assert known(ledger) >= set(range(1, 13))


def test_session_of_lost_rank_is_not_restored(ledger, dump, make_request, clock, tmp_path):
    """It is expected for a day; if it returns later, its session is found and expected again."""
    dump(closed=False)
    ledger.note_departed_sessions(["session"])
    assert ledger.unfinished() == ["session"]
    clock.now_us += DAY_US
    assert ledger.unfinished() == []
    ledger.close()
    again = AgentLedger(tmp_path / "state", now_us=clock)
    assert again.unfinished() == []
    row = again.find("session")
    assert row is not None
    assert row.state is SessionState.OPEN
    again.open_session(make_request())
    assert len(again.unfinished()) == 1
    again.close()


def test_session_of_lost_rank_with_pending_metadata_is_restored(ledger, make_request, clock):
    """Frames that wait for a disk are kept for any time."""
    ledger.open_session(make_request())
    end = MetadataFrame(FrameId("session", 1), IterationEnd(0, 0), b"end")
    ledger.commit((), (), [end], {"session": 1}, synced=False)
    ledger.note_departed_sessions(["session"])
    clock.now_us += 9 * DAY_US
    tidied(ledger)
    assert len(ledger.unfinished()) == 1
    assert ledger.unapplied("session") == [b"end"]


def test_ledger_on_full_disk_raises_exhausted_error(tmp_path, monkeypatch):
    """It is a fault that passes, with an exit status of its own, and no mistake in a setting."""
    real = sqlite3.connect

    class Full(sqlite3.Connection):
        def executescript(self, *_):
            raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **k, factory=Full))
        with pytest.raises(ExhaustedError, match=r"agent.state_dir: .* has no space: .*full"):
            AgentLedger(tmp_path / "state")
    AgentLedger(tmp_path / "state").close()


@pytest.mark.parametrize("keeps", [0, 4096])
def test_damaged_ledger_raises_one_line_error(ledger, dump, tmp_path, keeps):
    """Neither a header nor a page that is not SQLite's is taken for a setting that is wrong."""
    dump()
    ledger.close()
    path = tmp_path / "state" / "ledger.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[:keeps] + b"\xff" * (len(data) - keeps))
    for _ in range(2):
        with pytest.raises(CorruptedError, match=r"ledger\.sqlite is damaged|damaged database"):
            AgentLedger(tmp_path / "state")

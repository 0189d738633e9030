"""What the ledger remembers, and what entering it twice changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rankdump.contract.errors import ConfigError
from rankdump.contract.exchange import IterationEnd, SessionEnd
from rankdump.contract.status import SessionState
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.progress import Progress
from rankdumpd.agent.values import CountRow, Declared, EndRow, Fate, Outcome, Ticket, dropped


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger(tmp_path / "state")
    yield ledger
    ledger.close()


@pytest.fixture
def stored(make_head):
    def make(sequence: int, **fields) -> Outcome:
        return Outcome(
            Ticket("session", sequence),
            make_head(**fields),
            Fate.STORED,
            path=f"p{sequence}",
            digest="d",
            bytes_stored=9,
        )

    return make


def declared(sequence: int, declaration) -> Declared:
    return Declared(Ticket("session", sequence), declaration, f"raw{sequence}".encode())


def commit(ledger: Ledger, outcomes=(), declarations=(), watermark: int = 0) -> None:
    ledger.commit(outcomes, declarations, {"session": watermark}, synced=False)


def test_resume_point_is_the_first_gap(ledger, make_request, stored):
    """After a restart everything up to the first missing number is known, and what lies beyond."""
    ledger.open_session(make_request())
    commit(ledger, [stored(n) for n in (1, 2, 5)], [declared(3, IterationEnd(0, 2))], watermark=1)
    row = ledger.find("session")
    assert row is not None
    beyond = ledger.committed_beyond("session", row.watermark)
    progress = Progress(row.watermark, beyond)
    assert progress.watermark == 3
    assert 5 in progress
    assert 4 not in progress


def test_entering_twice_changes_nothing(ledger, make_request, make_head, stored):
    """A number that stands in the ledger keeps its first outcome."""
    ledger.open_session(make_request())
    for _ in range(2):
        commit(ledger, [stored(1)], [declared(2, IterationEnd(0, 1))])
    commit(ledger, [dropped(Ticket("session", 1), make_head(), "disk_full")])
    assert ledger.counts("session") == [CountRow(0, Fate.STORED, "", 1, 16, 9)]
    assert ledger.unapplied("session") == [b"raw2"]


def test_rows_survive_another_process(ledger, make_request, make_head, stored, tmp_path):
    """What one ledger committed the next one on the same folder knows."""
    request = make_request(rank=3, world_size=8, host="h\u00e9te")
    ledger.open_session(request)
    commit(ledger, [stored(1), dropped(Ticket("session", 2), make_head(iteration=1), "why")])
    ledger.iteration_ended(Ticket("session", 3), IterationEnd(0, 4, {"full": 3}), [2, 1])
    ledger.close()
    again = Ledger(tmp_path / "state")
    (row,) = again.unfinished()
    assert row.request == replace(request, config_source=b"")
    assert (row.state, row.ordered_graphs) == (SessionState.OPEN, (1, 2))
    assert again.ends("session") == [EndRow(0, 4, {"full": 3})]
    assert len(again.counts("session")) == 2
    ((graph, record),) = again.kept("session", 0)
    assert (graph, record.path, record.shape, record.bytes_in) == (0, "p1", (4,), 16)
    again.close()


def test_applied_declarations_are_not_given_out_again(ledger, make_request):
    """A goodbye that took effect closes the session for good."""
    ledger.open_session(make_request())
    goodbye = SessionEnd(7, ("never matched: x",))
    commit(ledger, (), [declared(1, goodbye)])
    assert [row.request.session_id for row in ledger.unfinished()] == ["session"]
    ledger.session_ended(Ticket("session", 1), goodbye)
    assert ledger.unfinished() == []
    row = ledger.find("session")
    assert row is not None
    assert (row.state, row.iterations_seen) == (SessionState.CLOSED, 7)
    assert row.notes == ("never matched: x",)


def test_second_agent_on_a_ledger_is_refused(ledger, tmp_path):
    """Two agents on one state folder would acknowledge for each other."""
    with pytest.raises(ConfigError, match="no other agent"):
        Ledger(tmp_path / "state")


def test_close_may_be_repeated(ledger):
    """Closing twice is closing once."""
    ledger.close()
    ledger.close()

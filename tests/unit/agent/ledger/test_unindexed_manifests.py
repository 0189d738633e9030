"""Manifests in the ledger that wait for the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.session_protocol import IterationEnd
from rankdump._core.status import IterationStatus
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.records import FrameId


class Clock:
    now_us = 1000

    def __call__(self) -> int:
        self.now_us += 1
        return self.now_us


@pytest.fixture
def ledger(tmp_path: Path):
    made = AgentLedger(tmp_path, now_us=Clock())
    made.unindexed.is_kept = True
    yield made
    made.close()


def end_iteration(ledger: AgentLedger, iteration: int, session: str = "s") -> None:
    status = IterationStatus("job", session, 0, iteration, True, expected=7, stored=4, linked=3)
    end = IterationEnd(iteration, 7)
    ledger.enter_iteration_end(FrameId(session, iteration + 1), end, (), status)


def test_manifests_wait_in_their_order(ledger):
    for iteration in (0, 1):
        end_iteration(ledger, iteration)
    end_iteration(ledger, 0, "t")
    (first, second) = ledger.unindexed.list_sessions()
    assert (first.session_id, first.records) == ("s", 14)
    assert (second.session_id, second.records) == ("t", 7)
    assert first.since_us < second.since_us
    rows = ledger.unindexed.list_manifests("s", 10)
    assert [row.iteration for row in rows] == [0, 1]
    ledger.unindexed.delete(rows)
    assert [each.session_id for each in ledger.unindexed.list_sessions()] == ["t"]


def test_manifest_that_changes_while_it_is_read_waits_again(ledger):
    """Law: also when its row was the newest, whose number SQLite would otherwise reuse."""
    end_iteration(ledger, 0)
    rows = ledger.unindexed.list_manifests("s", 10)
    (before,) = ledger.unindexed.list_sessions()
    with ledger._transaction() as base:
        ledger.unindexed.enter(base, "s", 0)
    assert ledger.unindexed.list_sessions() == [before]
    ledger.unindexed.delete(rows)
    assert [row.iteration for row in ledger.unindexed.list_manifests("s", 10)] == [0]


def test_nothing_is_entered_where_nobody_writes_a_table(ledger):
    ledger.unindexed.is_kept = False
    end_iteration(ledger, 0)
    assert ledger.unindexed.list_sessions() == []


def test_rows_survive_a_restart(ledger, tmp_path):
    end_iteration(ledger, 0)
    ledger.close()
    again = AgentLedger(tmp_path)
    assert [each.records for each in again.unindexed.list_sessions()] == [7]
    again.close()

"""Tests of iteration balances: tallies, and findings for counts that do not add up."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump._core.record import StatisticRows
from rankdump._core.session_protocol import IterationEnd
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdumpd.agent.records import FrameId, RecordStatus, StatisticRowsResult
from rankdumpd.agent.session.balance import IterationTally, list_balance_findings


def session(**fields) -> SessionStatus:
    defaults: dict[str, Any] = {"state": SessionState.CLOSED, "iterations_seen": 9}
    return SessionStatus("job", "s", 2, 4, 2, "here", 1, **{**defaults, **fields})


def iteration(number: int, **fields) -> IterationStatus:
    complete = fields.pop("complete", True)
    return IterationStatus("job", "s", 2, number, complete, **fields)


@pytest.mark.parametrize(
    ("of", "iterations", "expected"),
    [
        (session(), [iteration(0, expected=2, stored=2)], []),
        (session(), [iteration(0, expected=3, stored=1, dropped={"full": 2})], []),
        (session(state=SessionState.OPEN), [iteration(0, complete=False, stored=1)], []),
        (
            session(),
            [iteration(5, expected=4, stored=1, degraded=1, dropped={"full": 1})],
            ["rank 2, iteration 5: 4 tensors expected, 2 kept and 1 dropped"],
        ),
        (
            session(state=SessionState.LOST),
            [iteration(0, expected=1, stored=1), iteration(1, complete=False, stored=1)],
            ["rank 2 ended within iteration 1, with 1 tensor in the tree"],
        ),
        (
            session(state=SessionState.LOST),
            [iteration(number, complete=number < 1, expected=22, stored=22) for number in range(4)],
            [
                "rank 2 ended within iteration 3, with 22 tensors in the tree; the ends of "
                "iterations 1-2 had not arrived"
            ],
        ),
        (
            session(state=SessionState.LOST),
            [iteration(number, complete=number != 1, expected=1, stored=1) for number in range(3)],
            ["rank 2: the end of iteration 1 had not arrived"],
        ),
        (
            session(excluded="support_device [1] excludes this rank's device 2"),
            [],
            [],
        ),
        (
            session(notes=("kernels match no operator that ran",)),
            [iteration(0)],
            [],
        ),
        (
            session(),
            [],
            ["rank 2 collected nothing: none of the 9 iterations it ran was selected"],
        ),
        (
            session(),
            [iteration(0)],
            ["rank 2 collected nothing: no tensor was selected in 1 selected iterations"],
        ),
        (
            session(),
            [
                iteration(0, expected=2, dropped={"disk_full": 2}),
                iteration(1, expected=1, dropped={"disk_full": 1}),
            ],
            ["rank 2 collected nothing: dropped: 3 disk_full"],
        ),
        (session(state=SessionState.OPEN), [], []),
    ],
)
def test_list_balance_findings_describes_imbalances(of, iterations, expected):
    """One finding for each imbalance or empty dump, none for correct iterations."""
    assert list_balance_findings(of, iterations) == expected


def test_tallies_add_up_iteration_that_runs_twice(make_request):
    """Two runs of one iteration are counted together and still balance."""
    tally = IterationTally()
    for _ in range(2):
        tally.count(RecordStatus.STORED, "", bytes_in=16, bytes_stored=9)
        tally.count(RecordStatus.DROPPED, "disk_full", bytes_in=16, bytes_stored=0)
        tally.end(IterationEnd(0, 5, {"buffer_full": 3}))
    status = tally.status(make_request(), 0)
    assert status.is_balanced
    assert (status.expected, status.stored, status.bytes_in) == (10, 2, 64)
    assert status.dropped == {"disk_full": 2, "buffer_full": 6}


def test_tallies_merge_stall_and_positions_of_two_runs(make_request):
    """Stall times are added; positions are the lowest and highest, and 0 to 0 means unknown."""
    tally = IterationTally()
    tally.end(IterationEnd(0, 0, stall_us=5))
    assert tally.status(make_request(), 0).last_position == 0
    tally.end(IterationEnd(0, 0, stall_us=7, first_position=40, last_position=60))
    tally.end(IterationEnd(0, 0))
    tally.end(IterationEnd(0, 0, first_position=10, last_position=50))
    status = tally.status(make_request(), 0)
    assert (status.stall_us, status.first_position, status.last_position) == (12, 10, 60)


def test_tallies_count_rows_of_statistics_without_bytes(make_request, make_kind):
    """Each row counts as kept or by its drop reason, in degraded and planned frames."""
    tally, columns = IterationTally(), ((make_kind(),) * 3, (1, 2, 3), ("1", "2", "3"))
    for degraded in ("", "buffer_full"):
        rows = StatisticRows(0, *columns, degraded=degraded)
        tally.count_rows(StatisticRowsResult(FrameId("s", 1), rows, {"why": [1]}, b""))
    tally.end(IterationEnd(0, 6))
    status = tally.status(make_request(), 0)
    assert status.is_balanced
    assert (status.stored, status.degraded, status.dropped) == (2, 2, {"why": 2})
    assert status.degraded_by == {"buffer_full": 2}
    assert (status.bytes_in, status.bytes_stored) == (0, 0)

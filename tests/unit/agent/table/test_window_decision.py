"""Decision when rows are written to the table."""

from __future__ import annotations

import pytest

from rankdumpd.agent.table.table_writer import (
    WINDOW_AGE_S,
    WINDOW_RECORDS,
    WaitingRows,
    decide_window,
)

YOUNG_US, OLD_US = 1_000_000, int(WINDOW_AGE_S * 1e6)
FEW = WaitingRows(records=5, since_us=0, is_job_over=False, is_disk_full=False)


@pytest.mark.parametrize(
    ("rows", "age_us", "is_finishing", "is_due", "reason"),
    [
        (FEW, YOUNG_US, False, False, "window_open"),
        (FEW, OLD_US, False, True, "window_old"),
        (FEW, YOUNG_US, True, True, "job_over"),
        (FEW._replace(is_job_over=True), YOUNG_US, False, True, "job_over"),
        (FEW._replace(records=WINDOW_RECORDS), YOUNG_US, False, True, "window_full"),
        (FEW._replace(records=WINDOW_RECORDS, is_disk_full=True), OLD_US, True, False, "disk_full"),
    ],
)
def test_decision_has_a_reason(rows, age_us, is_finishing, is_due, reason):
    decision = decide_window(rows, now_us=age_us, is_finishing=is_finishing)
    assert decision == (is_due, reason)

"""Tests of CoordinatorOutage: its description, and how long a stop waits."""

from __future__ import annotations

import datetime

import pytest

from rankdumpd.agent.report.reporter import (
    WARN_AFTER_S,
    CoordinatorOutage,
    describe_outage,
    is_hopeless,
)

SINCE_S = datetime.datetime(2026, 11, 20, 9, 14, 3).timestamp()
AWAY = CoordinatorOutage(SINCE_S, "connection refused", refused=False)
REFUSED = CoordinatorOutage(SINCE_S, "the certificate of 'n' is revoked", refused=True)

FULL = CoordinatorOutage(SINCE_S, "the ledger cannot be written", refused=False, is_local=True)


def test_describe_outage_names_items_start_and_cause():
    assert describe_outage("c:7421", AWAY, items=1042, events=120_000) == (
        "coordinator c:7421 has been unreachable since 2026-11-20 09:14:03: connection refused; "
        "messages waiting: 1,042, with events: 120,000"
    )
    assert describe_outage("c:7421", REFUSED, items=0, events=0) == (
        "coordinator c:7421 has rejected this agent since 2026-11-20 09:14:03: the "
        "certificate of 'n' is revoked; no messages are waiting"
    )
    assert describe_outage("c:7421", FULL, items=2, events=0) == (
        "coordinator c:7421 has been sent the same messages again and again since 2026-11-20 "
        "09:14:03: the ledger cannot be written; messages waiting: 2, with events: 0"
    )


@pytest.mark.parametrize(
    ("outage", "after_s", "tried", "given_up"),
    [
        (None, 60.0, True, False),
        (AWAY, WARN_AFTER_S, True, True),
        (AWAY, WARN_AFTER_S, False, False),
        (AWAY, WARN_AFTER_S / 2, True, False),
        (REFUSED, 0.0, True, True),
    ],
)
def test_is_hopeless_after_another_failed_attempt(
    outage: CoordinatorOutage | None, after_s: float, tried: bool, given_up: bool
):
    assert is_hopeless(outage, now_s=SINCE_S + after_s, tried=tried) is given_up

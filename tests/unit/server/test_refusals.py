"""Refused requests of the page of metrics: all are counted, and nobody can flood the audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.callers import LOCAL_CALLER, CallerIdentity, build_unknown_caller
from rankdumpd.server.metrics import PAGE_REFUSAL_REASONS, MetricCounters
from rankdumpd.server.metrics_page import AUDIT_INTERVAL_S, PAGE_REFUSALS_METRIC, PageRefusals

KNOWN = CallerIdentity("ann", frozenset({"rank"}), "f" * 64, "ipv4:1.2.3.4:5")
STRANGER = build_unknown_caller("ipv4:1.2.3.4:6")


class Desk:
    """Refusals with a clock, a meter and a file."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.meters = MetricCounters()
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path)
        self.refusals = PageRefusals(self.meters, self.audit, clock=lambda: self.now_s)

    def refuse(self, caller: CallerIdentity, times: int = 1) -> None:
        for _ in range(times):
            self.refusals.add("role", caller, "GET /metrics HTTP/1.1", "it is for readers")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def counted(self, reason: str) -> float:
        return {s.labels["reason"]: s.value for s in self.meters.samples()}[reason]


@pytest.fixture
def desk(tmp_path: Path):
    made = Desk(tmp_path)
    yield made
    made.audit.close()


def test_refusal_counters_start_at_zero(desk: Desk):
    """An alert sees the first one rise."""
    samples = desk.meters.samples()
    assert {s.labels["reason"]: s.value for s in samples} == dict.fromkeys(
        PAGE_REFUSAL_REASONS, 0.0
    )
    assert {s.name for s in samples} == {PAGE_REFUSALS_METRIC}


def test_refusals_of_known_callers_are_all_audited(desk: Desk):
    desk.refuse(KNOWN, times=3)
    assert [{**line, "time": ""} for line in desk.lines()] == [
        {
            "time": "",
            "what": "refused",
            "method": "GET /metrics HTTP/1.1",
            "who": "ann",
            "roles": ["rank"],
            "fingerprint": "f" * 64,
            "peer": "ipv4:1.2.3.4:5",
            "result": "role",
        }
    ] * 3
    assert desk.counted("role") == 3


@pytest.mark.parametrize("caller", [STRANGER, LOCAL_CALLER])
def test_refusals_of_unknown_callers_are_audited_once_a_second(desk: Desk, caller: CallerIdentity):
    """Law: lines and what they say was left out add up, and others are written down meanwhile."""
    desk.refuse(caller, times=1000)
    desk.refuse(KNOWN)
    assert [line["who"] for line in desk.lines()] == [caller.audit_fields()["who"], "ann"]
    desk.now_s = AUDIT_INTERVAL_S
    desk.refuse(caller)
    assert [line.get("more") for line in desk.lines()] == [None, None, 999]
    assert desk.counted("role") == 1002


def test_refusal_reasons_are_logged_once(desk: Desk, caplog: pytest.LogCaptureFixture):
    desk.refuse(STRANGER, times=3)
    desk.refuse(KNOWN)
    desk.refusals.add("path", LOCAL_CALLER, "GET / HTTP/1.1", "metrics are at /metrics")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "it is for readers",
        "metrics are at /metrics",
    ]


def test_refusals_without_audit_are_counted():
    meters = MetricCounters()
    refusals = PageRefusals(meters)
    refusals.add("path", STRANGER, "", "no")
    refusals.count("busy")
    counted = {s.labels["reason"]: s.value for s in meters.samples()}
    assert (counted["path"], counted["busy"]) == (1, 1)

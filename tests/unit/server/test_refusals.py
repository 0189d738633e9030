"""Requests that the metrics page refused: counted, audited and logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankdump._core.caller_roles import LOCAL_CALLER, CallerIdentity, build_unknown_caller
from rankdumpd.server.audit_log import AuditLog
from rankdumpd.server.metrics import PAGE_REFUSAL_REASONS, MetricCounters
from rankdumpd.server.metrics_page import AUDIT_INTERVAL_S, PAGE_REFUSALS_METRIC, PageRefusals

KNOWN = CallerIdentity("ann", frozenset({"rank"}), "f" * 64, "ipv4:1.2.3.4:5")
STRANGER = build_unknown_caller("ipv4:1.2.3.4:6")


class RefusalRig:
    """Refusals with a clock, counters and an audit file."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.counters = MetricCounters()
        self.path = folder / "audit.jsonl"
        self.audit = AuditLog(self.path)
        self.refusals = PageRefusals(self.counters, self.audit, clock=lambda: self.now_s)

    def refuse(self, caller: CallerIdentity, times: int = 1) -> None:
        for _ in range(times):
            self.refusals.add("role", caller, "GET /metrics HTTP/1.1", "it is for readers")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def counted(self, reason: str) -> float:
        return {s.labels["reason"]: s.value for s in self.counters.samples()}[reason]


@pytest.fixture
def rig(tmp_path: Path):
    built = RefusalRig(tmp_path)
    yield built
    built.audit.close()


def test_refusal_counters_start_at_zero(rig: RefusalRig):
    """So that an alert detects the first refusal."""
    samples = rig.counters.samples()
    assert {s.labels["reason"]: s.value for s in samples} == dict.fromkeys(
        PAGE_REFUSAL_REASONS, 0.0
    )
    assert {s.name for s in samples} == {PAGE_REFUSALS_METRIC}


def test_refusals_of_known_callers_are_all_audited(rig: RefusalRig):
    rig.refuse(KNOWN, times=3)
    assert [{**line, "time": ""} for line in rig.lines()] == [
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
    assert rig.counted("role") == 3


@pytest.mark.parametrize("caller", [STRANGER, LOCAL_CALLER])
def test_refusals_of_unknown_callers_are_audited_once_a_second(
    rig: RefusalRig, caller: CallerIdentity
):
    """Law: lines and their numbers add up, and other callers are audited meanwhile."""
    rig.refuse(caller, times=1000)
    rig.refuse(KNOWN)
    assert [line["who"] for line in rig.lines()] == [caller.audit_fields()["who"], "ann"]
    rig.now_s = AUDIT_INTERVAL_S
    rig.refuse(caller)
    assert [line.get("more") for line in rig.lines()] == [None, None, 999]
    assert rig.counted("role") == 1002


def test_refusal_reasons_are_logged_once(rig: RefusalRig, caplog: pytest.LogCaptureFixture):
    rig.refuse(STRANGER, times=3)
    rig.refuse(KNOWN)
    rig.refusals.add("path", LOCAL_CALLER, "GET / HTTP/1.1", "metrics are at /metrics")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "it is for readers",
        "metrics are at /metrics",
    ]


def test_refusals_without_audit_are_counted():
    counters = MetricCounters()
    refusals = PageRefusals(counters)
    refusals.add("path", STRANGER, "", "no")
    refusals.count("busy")
    counted = {s.labels["reason"]: s.value for s in counters.samples()}
    assert (counted["path"], counted["busy"]) == (1, 1)

"""Tests of LedgerSpace: the size of the ledger, and warnings when its disk is nearly full."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.status import LedgerStatus
from rankdumpd.agent.limits.admission import DiskSpace
from rankdumpd.agent.limits.resource_limits import LedgerSpace, list_ledger_warnings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free_mib", "total_mib", "near"),
    [(300, 10_000, False), (255, 10_000, True), (7, 64, False), (6, 64, True), (0, 0, False)],
)
def test_ledger_warning_precedes_full_disk(free_mib, total_mib, near):
    findings = list_ledger_warnings(
        LedgerStatus("/state", 5 * MIB, free_mib * MIB, total_mib * MIB)
    )
    assert bool(findings) == near
    if near:
        assert (
            "the ledger takes 5.00 MiB; ranks wait when the disk is full (agent.state_dir)"
            in findings[0]
        )


def test_ledger_space_counts_database_and_its_log(tmp_path: Path):
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "other"):
        (tmp_path / name).write_bytes(bytes(100))
    space = LedgerSpace(tmp_path, lambda _: DiskSpace(MIB, 3 * MIB))
    assert space.status() == LedgerStatus(str(tmp_path), 200, MIB, 3 * MIB)
    assert space.findings() == []


def test_ledger_space_reports_failing_disk(tmp_path: Path):
    def broken(_: Path) -> DiskSpace:
        raise OSError(5, "Input/output error")

    space = LedgerSpace(tmp_path, broken)
    assert space.status() == LedgerStatus(str(tmp_path))
    (findings,) = space.findings()
    assert "does not report its free space (Input/output error)" in findings

"""Tests of the resource policy: drop reasons, warnings near a limit, disk and dump usage."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rankdump._core.drop_reasons import SPACE_REASONS
from rankdumpd.agent.limits import admission, resource_limits
from rankdumpd.agent.limits.admission import (
    DiskSpace,
    ResourcePolicy,
    ResourceUsage,
    find_limit_reason,
)
from rankdumpd.agent.limits.resource_limits import DiskGauge
from rankdumpd.agent.limits.usage import DumpUsage

GIB = 1 << 30
USUAL = ResourcePolicy(
    10 * GIB, keep_free_bytes=1 << 20, keep_free_ratio=0.1, keep_free_inodes_ratio=0.01
)
DISK = DiskSpace(50 * GIB, 100 * GIB, 5000, 10_000)


@pytest.mark.parametrize(
    ("space", "more", "byte_count", "reason"),
    [
        (DISK, {}, GIB, ""),
        (DISK, {}, 10 * GIB + 1, "record_too_large"),
        (replace(DISK, free_bytes=11 * GIB), {}, GIB, ""),
        (replace(DISK, free_bytes=11 * GIB), {}, GIB + 1, "disk_low"),
        (replace(DISK, free_bytes=11 * GIB), {"queued_bytes": 1}, GIB, "disk_low"),
        (replace(DISK, free_inodes=101), {}, 1, ""),
        (replace(DISK, free_inodes=101), {"queued_records": 1}, 1, "inodes_low"),
        (replace(DISK, free_inodes=0, total_inodes=0), {}, 1, ""),
        (DiskSpace(), {}, 1, ""),
        (DISK, {"disk_bytes": 5 * GIB, "used_bytes": 4 * GIB}, GIB, ""),
        (DISK, {"disk_bytes": 5 * GIB, "used_bytes": 4 * GIB}, GIB + 1, "disk_cap"),
        (DISK, {"job_limit": 5 * GIB, "job_bytes": 4 * GIB}, GIB, ""),
        (DISK, {"job_limit": 5 * GIB, "job_bytes": 4 * GIB}, GIB + 1, "job_quota"),
        (DISK, {"job_limit": GIB, "job_bytes": 0, "queued_bytes": 1}, GIB, "job_quota"),
    ],
)
def test_find_limit_reason_returns_first_limit(space, more, byte_count, reason):
    """A tensor is rejected exactly where a limit would be exceeded; each reason is a listed one."""
    rules = replace(USUAL, disk_bytes=more.pop("disk_bytes", 0), job_bytes=more.pop("job_limit", 0))
    assert find_limit_reason(ResourceUsage(rules, space, **more), byte_count) == reason
    assert reason in SPACE_REASONS | {"", "record_too_large"}


def test_warnings_precede_reached_limits():
    """Warnings begin at 80 % of a limit, with the numbers and the setting."""
    assert not list(admission.list_disk_warnings(USUAL, "/x", DISK))
    (near,) = admission.list_disk_warnings(USUAL, "/x", replace(DISK, free_bytes=28 * GIB))
    assert near == (
        "disk of /x: 28.0 GiB (28%) free of 100.0 GiB; tensors are dropped below 10.0 GiB "
        "(agent.keep_free_ratio is 10%)"
    )
    (low,) = admission.list_disk_warnings(USUAL, "/x", replace(DISK, free_bytes=8 * GIB))
    assert "8%" in low
    assert "tensors are dropped while it is below 10.0 GiB" in low
    absolute = ResourcePolicy(1, keep_free_bytes=GIB)
    assert not list(admission.list_disk_warnings(absolute, "/x", replace(DISK, free_bytes=6 * GIB)))
    (tight,) = admission.list_disk_warnings(absolute, "/x", replace(DISK, free_bytes=5 * GIB))
    assert "tensors are dropped below 1.00 GiB (agent.keep_free_bytes)" in tight
    assert not list(admission.list_disk_warnings(absolute, "/x", replace(DISK, free_inodes=1)))
    (few,) = admission.list_disk_warnings(USUAL, "/x", replace(DISK, free_inodes=99))
    assert "space for 99 more files of 10000; tensors are dropped while it is below 100" in few
    capped = replace(USUAL, disk_bytes=10 * GIB, job_bytes=5 * GIB)
    assert not list(admission.list_cap_warnings(capped, 7 * GIB))
    assert "8.00 GiB of the 10.0 GiB" in next(admission.list_cap_warnings(capped, 8 * GIB))
    assert not list(admission.list_job_warnings(capped, "j", 3 * GIB))
    assert "job j takes 4.00 GiB of the 5.00 GiB" in next(
        admission.list_job_warnings(capped, "j", 4 * GIB)
    )


class TestDumpUsage:
    """Bytes by job and tree."""

    def test_sums_bytes_by_job_and_root(self):
        """Restored, added and removed bytes; links count 0."""
        usage = DumpUsage()
        usage.restore([("a", "/x", 100), ("b", "/x", 10)], {"a": 3})
        usage.add("a", "/y", 5)
        usage.add("a", "/x", -100)
        usage.count_retired("a")
        assert (usage.total, usage.job_bytes("a"), usage.root_bytes("/x")) == (15, 5, 10)
        assert usage.jobs() == [("a", 5, 4), ("b", 10, 0)]


class _StalledDisk:
    """A disk that answers once, then hangs until it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.released = threading.Event()

    def look_up(self, _root: Path) -> DiskSpace:
        self.calls += 1
        if self.calls > 1:
            self.released.wait(30)
        return DiskSpace(self.calls, 100, 0, 0)


class TestDiskGauge:
    """A disk is sampled at most once a second, by threads that may hang."""

    def test_hanging_disk_blocks_no_caller(self, monkeypatch):
        """The last good sample stays in use; one thread waits, and there is a finding."""
        now, stalled = [0.0], _StalledDisk()
        # The first answer is waited for.
        monkeypatch.setattr(resource_limits, "SAMPLE_TIMEOUT_S", 10.0)
        gauge = DiskGauge(lambda: now[0], stalled.look_up)
        assert gauge.space(Path("/x")).free_bytes == 1
        now[0] = 0.5
        assert gauge.space(Path("/x")).free_bytes == 1
        assert stalled.calls == 1
        monkeypatch.setattr(resource_limits, "SAMPLE_TIMEOUT_S", 0.0)
        try:
            for now[0] in (2.0, 5.0, 9.0):
                assert gauge.space(Path("/x")).free_bytes == 1
            (said,) = gauge.findings()
            assert said == (
                "disk of /x has not reported its free space for 7 s: "
                "1 bytes were free at its last report"
            )
        finally:
            stalled.released.set()
        assert stalled.calls == 2

    def test_error_keeps_last_good_sample(self):
        """A disk that fails causes no new drops."""
        now, answers = [0.0], iter([DiskSpace(7, 100), OSError(5, "Input/output error")])

        def look_up(_root: Path) -> DiskSpace:
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer

        gauge = DiskGauge(lambda: now[0], look_up)
        assert gauge.space(Path("/x")).free_bytes == 7
        now[0] = 2.0
        assert gauge.space(Path("/x")).free_bytes == 7
        assert "Input/output error" in gauge.findings()[0]
        assert "7 bytes" in gauge.findings()[0]

    def test_missing_root_is_sampled_at_its_parent(self, tmp_path):
        """A root is made later than it is looked at."""
        found = DiskGauge().space(tmp_path / "a" / "b")
        assert 0 < found.free_bytes <= found.total_bytes

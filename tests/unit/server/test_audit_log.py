"""Audit log: lines, permissions, rotation and full disks."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from rankdump.errors import ConfigError
from rankdumpd.server import audit_log as module
from rankdumpd.server.audit_log import MAX_AUDIT_FILES, AuditLog


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def test_audit_line_has_time_event_and_escaped_fields(path: Path):
    """Control characters are escaped, and long texts are cut."""
    audit = AuditLog(path, clock=lambda: 1.5)
    audit.add("call", {"who": "local", "job": "a\nb", "root": "x" * 9999, "rank": 3})
    audit.close()
    (line,) = lines(path)
    assert line == {
        "time": "1970-01-01T00:00:01.500000+00:00",
        "what": "call",
        "who": "local",
        "job": "a\nb",
        "root": "x" * 512,
        "rank": 3,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_audit_log_rejects_links_pipes_and_missing_folders(path: Path, tmp_path: Path):
    """Each is an error in one line at the start."""
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"log\.audit"):
        AuditLog(path)
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(tmp_path / "pipe")
    for there in (tmp_path / "pipe", tmp_path / "none" / "a", tmp_path):
        with pytest.raises(ConfigError, match=r"log\.audit"):
            AuditLog(there)


def test_audit_log_rotates_numbered_files(path: Path):
    """Files have the allowed size, the oldest are removed, and no line is split."""
    audit = AuditLog(path, max_bytes=200)
    for number in range(40):
        audit.add("call", {"number": number})
    audit.close()
    files = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, MAX_AUDIT_FILES))]
    assert all(0 < file.stat().st_size <= 200 for file in files)
    assert not path.with_name(f"{path.name}.{MAX_AUDIT_FILES}").exists()
    kept = [line["number"] for file in reversed(files) for line in lines(file)]
    assert kept == list(range(40 - len(kept), 40))


def test_audit_log_is_shared_by_processes(path: Path):
    """Law: with rotations by each other every line is in one file, once and whole."""
    audits = [AuditLog(path, max_bytes=60_000) for _ in range(3)]

    def add(which: int) -> None:
        for number in range(300):
            audits[which].add("call", {"number": which * 1000 + number})

    threads = [threading.Thread(target=add, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in audits:
        each.close()
    found = [line["number"] for file in path.parent.iterdir() for line in lines(file)]
    assert sorted(found) == sorted(w * 1000 + n for w in range(3) for n in range(300))
    assert len(list(path.parent.iterdir())) > 1


def test_audit_log_recreates_moved_file(path: Path):
    """As logrotate does it."""
    audit = AuditLog(path)
    audit.add("call", {"number": 0})
    path.rename(path.with_suffix(".old"))
    audit.add("call", {"number": 1})
    audit.close()
    assert [line["number"] for line in lines(path)] == [1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.ETIMEDOUT])
def test_audit_log_starts_on_a_disk_that_may_answer_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def fail(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as away:
        away.setattr(module.os, "open", fail)
        audit = AuditLog(path)
    audit.add("call", {"number": 1})
    audit.close()
    assert [line["number"] for line in lines(path)] == [1]


def test_audit_log_counts_lines_lost_to_full_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Law: partial lines are removed, and the file has the number of lost lines."""
    audit = AuditLog(path)
    audit.add("call", {"number": 0})
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(module.os, "write", lambda fd, data: write(fd, data[:10]))
        audit.add("call", {"number": 1})

        def fail(_fd: int, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(module.os, "write", fail)
        audit.add("call", {"number": 2})
    assert audit.lost_lines == 2
    assert len([r for r in caplog.records if "are lost" in r.message]) == 1
    audit.add("call", {"number": 3})
    audit.close()
    assert [(line["what"], line.get("number", line.get("lines"))) for line in lines(path)] == [
        ("call", 0),
        ("lost", 2),
        ("call", 3),
    ]
    assert audit.lost_lines == 0


def test_audit_log_on_full_device_raises_nothing():
    audit = AuditLog(Path("/dev/full"))
    audit.add("call", {})
    assert audit.lost_lines == 1
    audit.close()

"""Who still writes: the kernel's word, or time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rankdumpd.agent.records import FileStamp
from rankdumpd.ingest.file_copy import SETTLE_TIME_S, SettlingFiles, hold_read_lease


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    return path


def test_nobody_writes(file: Path):
    descriptor = os.open(file, os.O_RDONLY)
    for _ in range(2):
        with hold_read_lease(descriptor) as free:
            assert free is True
    os.close(descriptor)
    file.write_bytes(b"")  # it was given back


def test_somebody_writes(file: Path):
    """Another process, too."""
    descriptor = os.open(file, os.O_RDONLY)
    with file.open("ab"), hold_read_lease(descriptor) as free:
        assert free is False
    script = f"import sys; f = open({str(file)!r}, 'ab'); print('open', flush=True); input()"
    writer = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    with hold_read_lease(descriptor) as free:
        assert free is False
    writer.communicate(b"\n")
    with hold_read_lease(descriptor) as free:
        assert free is True
    os.close(descriptor)


def test_a_writer_waits_until_it_is_given_back(file: Path):
    """The signal that the kernel sends then does not end this process."""
    descriptor = os.open(file, os.O_RDONLY)
    opened = threading.Event()

    def write() -> None:
        with file.open("r+b") as writer:
            writer.truncate(0)
            opened.set()

    thread = threading.Thread(target=write)
    with hold_read_lease(descriptor) as free:
        assert free
        thread.start()
        assert not opened.wait(0.2)
        assert os.fstat(descriptor).st_size == 5
    thread.join(60)
    assert opened.is_set()
    os.close(descriptor)
    assert signal.getsignal(signal.SIGURG) in (signal.SIG_DFL, signal.SIG_IGN)


def test_where_there_are_no_leases(file: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_descriptor: int, command: int, *_args: object) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    descriptor = os.open(file, os.O_RDONLY)
    with hold_read_lease(descriptor) as free:
        assert free is None
    os.close(descriptor)


def test_waiting_until_nothing_has_changed():
    """A file is ripe once it was the same for long enough; one that changes waits on."""
    waiting, now = (
        SettlingFiles(),
        {"a": FileStamp(1, 1, 1), "b": FileStamp(2, 1, 1), "c": FileStamp(3, 1, 1)},
    )
    for path, stamp in now.items():
        waiting.add(path, stamp, 10.0)
    waiting.add("a", now["a"], 11.0)  # the same: it has waited since 10
    assert waiting.next_due_s() == 10.0 + SETTLE_TIME_S
    assert waiting.pop_settled(11.9, now.get) == []
    now["b"] = FileStamp(2, 5, 2)
    del now["c"]
    assert [c.path for c in waiting.pop_settled(12.0, now.get) if c.aged] == ["a"]
    assert [c.path for c in waiting.pop_settled(14.0, now.get)] == ["b"]
    assert len(waiting) == 0


def test_waiting_after_each_event():
    waiting = SettlingFiles()
    waiting.touch("table.csv", 1.0)
    waiting.touch("table.csv", 2.5)
    assert waiting.pop_settled(3.5, lambda _path: FileStamp(1, 1, 1)) == []
    assert [c.path for c in waiting.pop_settled(4.5, lambda _path: FileStamp(1, 2, 3))] == [
        "table.csv"
    ]

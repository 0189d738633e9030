"""Events of real folders; what the kernel lost, and what it refuses."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankdump.errors import ExhaustedError
from rankdumpd.ingest import folder_watch
from rankdumpd.ingest.folder_watch import InotifyEvent, InotifyQueue, parse_inotify_events


@pytest.fixture
def watched() -> Iterator[InotifyQueue]:
    events = InotifyQueue()
    yield events
    events.close()


def watch(events: InotifyQueue, folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return events.watch(descriptor)
    finally:
        os.close(descriptor)


def test_closed_and_moved_files_and_new_folders(watched: InotifyQueue, tmp_path: Path):
    """A file is heard of when its writer closes it, not when it is made, read or made read-only."""
    number = watch(watched, tmp_path)
    with (tmp_path / "a").open("w") as file:
        created = watched.read()
        file.write("x")
    (tmp_path / "a").read_text()
    (tmp_path / "a").chmod(0o400)
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "d").mkdir()
    assert created == [InotifyEvent(number, folder_watch.CREATE_EVENT, "a")]
    assert watched.read() == [
        InotifyEvent(number, folder_watch.CLOSE_WRITE_EVENT, "a"),
        InotifyEvent(number, folder_watch.CREATE_EVENT, "b"),
        InotifyEvent(number, folder_watch.MOVED_TO_EVENT, "c"),
        InotifyEvent(number, folder_watch.CREATE_EVENT | folder_watch.IS_FOLDER_EVENT, "d"),
    ]
    assert watched.read() == []


def test_a_folder_has_one_number_wherever_it_stands(watched: InotifyQueue, tmp_path: Path):
    (tmp_path / "a").mkdir()
    number = watch(watched, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert watch(watched, tmp_path / "b") == number
    (tmp_path / "b").rmdir()
    assert [event.mask & folder_watch.WATCH_REMOVED_EVENT for event in watched.read()] == [
        folder_watch.WATCH_REMOVED_EVENT
    ]


def test_lost_events_and_names_that_are_no_text():
    """As the kernel hands them over."""
    head = struct.Struct("iIII")
    data = head.pack(3, folder_watch.CLOSE_WRITE_EVENT, 0, 16) + b"\xffa".ljust(16, b"\0")
    data += head.pack(-1, folder_watch.QUEUE_OVERFLOW_EVENT, 0, 0)
    assert parse_inotify_events(data) == [
        InotifyEvent(3, folder_watch.CLOSE_WRITE_EVENT, "\udcffa"),
        InotifyEvent(-1, folder_watch.QUEUE_OVERFLOW_EVENT, ""),
    ]


def test_too_many_watches_name_the_limit(
    watched: InotifyQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched, "_libc", _Refusing(errno.ENOSPC))
    with pytest.raises(ExhaustedError, match=r"fs\.inotify\.max_user_watches"):
        watch(watched, tmp_path)
    monkeypatch.setattr(watched, "_libc", _Refusing(errno.ENOENT))
    with pytest.raises(OSError, match="No such file"):
        watch(watched, tmp_path)


class _Refusing:
    def __init__(self, number: int) -> None:
        self._number = number

    def inotify_add_watch(self, *_args: object) -> int:
        import ctypes

        ctypes.set_errno(self._number)
        return -1


def test_closing_twice(watched: InotifyQueue):
    watched.close()
    watched.close()

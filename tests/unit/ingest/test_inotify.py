"""Events of real folders; what the kernel lost, and what it refuses."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankdump.contract.errors import ExhaustedError
from rankdumpd.ingest import inotify
from rankdumpd.ingest.inotify import Event, Inotify, parse


@pytest.fixture
def watched() -> Iterator[Inotify]:
    events = Inotify()
    yield events
    events.close()


def watch(events: Inotify, folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return events.watch(descriptor)
    finally:
        os.close(descriptor)


def test_closed_and_moved_files_and_new_folders(watched: Inotify, tmp_path: Path):
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
    assert created == [Event(number, inotify.CREATED, "a")]
    assert watched.read() == [
        Event(number, inotify.CLOSED, "a"),
        Event(number, inotify.CREATED, "b"),
        Event(number, inotify.MOVED_HERE, "c"),
        Event(number, inotify.CREATED | inotify.FOLDER, "d"),
    ]
    assert watched.read() == []


def test_a_folder_has_one_number_wherever_it_stands(watched: Inotify, tmp_path: Path):
    (tmp_path / "a").mkdir()
    number = watch(watched, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert watch(watched, tmp_path / "b") == number
    (tmp_path / "b").rmdir()
    assert [event.mask & inotify.GONE for event in watched.read()] == [inotify.GONE]


def test_lost_events_and_names_that_are_no_text():
    """As the kernel hands them over."""
    head = struct.Struct("iIII")
    data = head.pack(3, inotify.CLOSED, 0, 16) + b"\xffa".ljust(16, b"\0")
    data += head.pack(-1, inotify.LOST, 0, 0)
    assert parse(data) == [Event(3, inotify.CLOSED, "\udcffa"), Event(-1, inotify.LOST, "")]


def test_too_many_watches_name_the_limit(
    watched: Inotify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_closing_twice(watched: Inotify):
    watched.close()
    watched.close()

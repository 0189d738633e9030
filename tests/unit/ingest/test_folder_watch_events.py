"""Events of real folders; what the kernel lost, and what it refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from inotify_simple import Event, INotify, flags

from rankdump.errors import ExhaustedError
from rankdumpd.ingest.folder_watch import InotifyQueue


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


def mask_and_name(events: list[Event]) -> list[tuple[int, str]]:
    return [(event.mask, event.name) for event in events]


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
    assert mask_and_name(created) == [(flags.CREATE, "a")]
    assert {event.wd for event in created} == {number}
    assert mask_and_name(watched.read()) == [
        (flags.CLOSE_WRITE, "a"),
        (flags.CREATE, "b"),
        (flags.MOVED_TO, "c"),
        (flags.CREATE | flags.ISDIR, "d"),
    ]
    assert watched.read() == []


def test_a_folder_has_one_number_wherever_it_stands(watched: InotifyQueue, tmp_path: Path):
    (tmp_path / "a").mkdir()
    number = watch(watched, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert watch(watched, tmp_path / "b") == number
    (tmp_path / "b").rmdir()
    assert [event.mask & flags.IGNORED for event in watched.read()] == [flags.IGNORED]


def test_a_name_that_is_no_text(watched: InotifyQueue, tmp_path: Path):
    watch(watched, tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xffa")).touch()
    assert {event.name for event in watched.read()} == {"\udcffa"}


def test_too_many_watches_name_the_limit(
    watched: InotifyQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(number: int) -> None:
        def add_watch(*_args: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(INotify, "add_watch", add_watch)

    refuse(errno.ENOSPC)
    with pytest.raises(ExhaustedError, match=r"fs\.inotify\.max_user_watches"):
        watch(watched, tmp_path)
    refuse(errno.ENOENT)
    with pytest.raises(OSError, match="No such file"):
        watch(watched, tmp_path)


def test_closing_twice(watched: InotifyQueue):
    watched.close()
    watched.close()

"""Temporary folders: what a killed process has left is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankdumpd.server.page_process import PrivateFolder

PREFIX = "rankdumpd-test-"
KILLED = """
import os, signal
from rankdumpd.server.page_process import PrivateFolder
print(PrivateFolder("rankdumpd-test-").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary ones are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_is_for_its_user_alone_and_removed():
    folder = PrivateFolder(PREFIX)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "file").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_folder_of_killed_process_is_removed_by_the_next(place: Path):
    """Not that of one that lives, and none of another name."""
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, check=False)
    left = Path(os.fsdecode(done.stdout.strip()))
    assert left.is_dir()
    (left / "pages.sock").touch()
    (place / "other").mkdir()
    first = PrivateFolder(PREFIX)
    second = PrivateFolder(PREFIX)
    assert sorted(place.iterdir()) == sorted([place / "other", first.path, second.path])
    first.remove()
    second.remove()


def test_link_to_another_folder_is_left(place: Path):
    (place / "data").mkdir()
    (place / f"{PREFIX}link").symlink_to(place / "data")
    PrivateFolder(PREFIX).remove()
    assert (place / "data").is_dir()


def test_folder_is_made_on_a_disk_without_locks(place, monkeypatch):
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = PrivateFolder(PREFIX)
    assert [*place.iterdir()] == [folder.path]
    folder.remove()
    assert not [*place.iterdir()]

"""Tests of TreeFolders: planted links, removed folders, and syncing before a power loss."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from rankdumpd.agent.storage import folders
from rankdumpd.agent.storage.folders import OpenFolderCache, OutsideRootError, TreeFolders
from rankdumpd.agent.storage.tree import DumpTree

FOLDER = "rank_0/Net/0/0"
UNFINISHED = stat.S_ISVTX | 0o700


def tree(root: Path, **fields) -> DumpTree:
    return DumpTree(str(root), file_mode=0o440, folder_mode=0o750, **fields)


def put(tree: DumpTree, name: str = "a.npy", folder: str = FOLDER) -> None:
    tree.put(folder, name, [b"bytes"], mark=f"mark-{name}")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    (outside / "Net" / "0" / "0").mkdir(parents=True)
    (outside / "0" / "0").mkdir(parents=True)
    (outside / "0" / "a.npy").write_bytes(b"victim")
    return outside


def nothing_came(outside: Path) -> bool:
    found = {path for path in outside.rglob("*") if not path.is_dir()}
    return (
        found == {outside / "0" / "a.npy"} and (outside / "0" / "a.npy").read_bytes() == b"victim"
    )


@pytest.mark.parametrize("planted", ["rank_0", "rank_0/Net", "rank_0/Net/0", FOLDER])
@pytest.mark.parametrize("used", [False, True], ids=["before", "after"])
def test_link_in_place_of_folder_is_not_followed(tmp_path, outside, planted, used):
    """Whether the folder was in use before or not, nothing is read, written or removed there."""
    root = tmp_path / "root"
    one = tree(root)
    if used:
        put(one)
        (root / planted).rename(tmp_path / "moved")
    (root / planted).parent.mkdir(parents=True, exist_ok=True)
    (root / planted).symlink_to(outside)
    for act in (
        lambda: put(one),
        lambda: one.append_lines(FOLDER, "table.csv", ["line"]),
        lambda: one.remove([f"{FOLDER}/a.npy"]),
        lambda: one.move(f"{FOLDER}/a.npy", "b.npy"),
        lambda: one.claim(FOLDER, "name", "me"),
        lambda: one.lines(FOLDER, "a.npy"),
        lambda: one.has(FOLDER, "a.npy"),
    ):
        with pytest.raises(OutsideRootError):
            act()
    assert nothing_came(outside)


@pytest.mark.parametrize("name", ["a.npy", ".mark-a.npy.tmp"])
def test_link_in_place_of_file_is_not_followed(tmp_path, name):
    """The file itself and the hidden one that it grows in."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    one = tree(tmp_path / "root")
    one.make(FOLDER)
    (tmp_path / "root" / FOLDER / name).symlink_to(victim)
    put(one)
    assert victim.read_text() == "untouched"
    assert (tmp_path / "root" / FOLDER / "a.npy").read_bytes() == b"bytes"
    (tmp_path / "root" / FOLDER / "lines").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        one.append_lines(FOLDER, "lines", ["line"])


def test_link_planted_during_write_is_not_followed(tmp_path, outside):
    """A file is completed in the folder where it was begun, even if the path changes."""
    root = tmp_path / "root"

    def write(descriptor: int, parts) -> None:
        (root / FOLDER).rename(tmp_path / "moved")
        (root / FOLDER).symlink_to(outside)
        os.write(descriptor, parts[0])

    put(tree(root, write=write))
    assert nothing_came(outside)
    assert (tmp_path / "moved" / "a.npy").read_bytes() == b"bytes"


@pytest.mark.parametrize("folder", ["..", "a/..", "../a", "a//b", "."])
def test_folder_out_of_root_is_rejected(tmp_path, folder):
    with pytest.raises(OutsideRootError):
        put(tree(tmp_path / "root"), folder=folder)
    assert not list(tmp_path.rglob("*.npy"))


def test_removed_or_replaced_folder_is_made_again(tmp_path):
    """A user may clear or move a tree in use: later files are written at its path."""
    one = tree(tmp_path)
    put(one)
    (tmp_path / "rank_0").rename(tmp_path / "kept")
    put(one, "b.npy")
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["b.npy"]


def test_root_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    put(tree(tmp_path / "root" / "deep"))
    assert (tmp_path / "disk" / "deep" / FOLDER / "a.npy").exists()


def test_open_folder_cache_bounds_and_closes_descriptors(tmp_path):
    held = OpenFolderCache(max_folders=3)
    some = TreeFolders(tmp_path, mode=0o750, synced=False, held=held)
    before = descriptors()
    mine = some.open("a/b", make=True)
    for number in range(20):
        some.open(f"c/{number}", make=True)
    assert descriptors() == before + 4
    assert os.fstat(mine.number).st_ino == (tmp_path / "a" / "b").stat().st_ino


def test_open_folder_cache_takes_a_quarter_of_the_descriptors(tmp_path, monkeypatch):
    """Ranks and their slabs need the others."""
    monkeypatch.setattr(folders.resource, "getrlimit", lambda _: (40, 80))
    some = TreeFolders(tmp_path, mode=0o750, synced=False, held=OpenFolderCache())
    before = descriptors()
    for number in range(20):
        some.open(f"c/{number}", make=True)
    assert descriptors() == before + 10


def test_folders_may_be_made_by_many_threads(tmp_path):
    """All get the same one, of the mode of the tree."""
    some = TreeFolders(tmp_path, mode=0o2775, synced=True, held=OpenFolderCache())
    ready = threading.Barrier(8)
    found: list[int] = []

    def make() -> None:
        ready.wait()
        # It is open for as long as somebody has it.
        opened = some.open(FOLDER, make=True)
        found.append(os.fstat(opened.number).st_ino)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {0o2775}


@pytest.mark.parametrize("at", ["root", "root/rank_0", "root/rank_0/Net"])
def test_unfinished_folder_gets_mode_of_tree(tmp_path, at):
    """Killed between mkdir and chmod; a folder of another owner keeps its mode."""
    (tmp_path / at).mkdir(parents=True)
    (tmp_path / at).chmod(UNFINISHED)
    (tmp_path / "root" / "own").mkdir()
    (tmp_path / "root" / "own").chmod(0o711)
    one = tree(tmp_path / "root" / "deep" if at == "root" else tmp_path / "root")
    put(one)
    one.make("own")
    assert stat.S_IMODE((tmp_path / at).stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "root" / "own").stat().st_mode) == 0o711


class TestSyncedTree:
    @pytest.fixture
    def synced(self, monkeypatch) -> list[Path]:
        """Folders that were synced, in their order."""
        done: list[Path] = []
        fsync = os.fsync

        def note(number: int) -> None:
            path = Path(f"/proc/self/fd/{number}").readlink()
            if path.is_dir():
                done.append(path)
            fsync(number)

        monkeypatch.setattr(os, "fsync", note)
        return done

    def test_syncs_every_parent_before_first_file(self, tmp_path, synced):
        """Once for each, also where another process made it and may have been killed before."""
        root = tmp_path / "root"
        (root / "rank_0" / "Net").mkdir(parents=True)
        one = tree(root, synced=True)
        put(one)
        above = [root, root / "rank_0", root / "rank_0" / "Net", root / "rank_0" / "Net" / "0"]
        assert synced[-5:] == [*above, root / FOLDER]
        assert {root.parent, *root.parent.parents} <= set(synced)
        synced.clear()
        put(one, "b.npy")
        assert synced == [root / FOLDER]
        synced.clear()
        put(one, "c.npy", folder="rank_0/Net/0/1")
        assert synced == [root / "rank_0" / "Net" / "0", root / "rank_0" / "Net" / "0" / "1"]

    @pytest.mark.parametrize("replaces", [True, False])
    def test_removes_file_whose_name_was_not_synced(self, tmp_path, monkeypatch, replaces):
        """A dropped record has no file; the next attempt succeeds."""
        one = tree(tmp_path, synced=True)
        put(one, "other.npy")
        sync = folders.sync_folder

        def fail(_) -> None:
            raise OSError(errno.EIO, "failing on purpose")

        monkeypatch.setattr("rankdumpd.agent.storage.tree.sync_folder", fail)
        with pytest.raises(OSError, match="on purpose"):
            one.put(FOLDER, "a.npy", [b"1"], mark="m", replaces=replaces)
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["other.npy"]
        monkeypatch.setattr("rankdumpd.agent.storage.tree.sync_folder", sync)
        one.put(FOLDER, "a.npy", [b"1"], mark="m", replaces=replaces)
        assert (tmp_path / FOLDER / "a.npy").read_bytes() == b"1"

"""Following a folder that is being written: nothing before it is closed, and nothing missed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from inotify_simple import Event, flags
from support.native_tree import npy_bytes, stored, tensor_name, write_file, write_tree

from rankdump.errors import UnavailableError
from rankdumpd.ingest import file_copy, folder_watch
from rankdumpd.ingest.dump_file import CandidateFile, IngestTask
from rankdumpd.ingest.engine import IngestEngine
from rankdumpd.ingest.file_copy import SETTLE_TIME_S
from rankdumpd.ingest.folder_watch import SWEEP_INTERVAL_S, FolderFollower
from rankdumpd.ingest.runner import IngestComponent, IngestRun

DATA = npy_bytes(np.arange(5000.0))
FOLDER = "rank_0/Net/0/0"


class Rig:
    """A follower whose clock is set by hand."""

    def __init__(self, base: Path) -> None:
        self.source, self.tree = base / "source", base / "tree"
        self.source.mkdir()
        self.now_s = 100.0
        self.said: list[str] = []
        self.stopped = False
        task = IngestTask(self.source, self.tree, threads=2)
        self.engine = IngestEngine(task, report=self.said.append, stopping=lambda: False)
        self.follower = FolderFollower(
            self.engine, stopping=lambda: self.stopped, until_idle_s=None, clock=lambda: self.now_s
        )

    def close(self) -> None:
        self.follower.close()
        self.engine.close()

    def look(self, after_s: float = 0.0) -> set[str]:
        self.now_s += after_s
        self.follower.process_events()
        return set(stored(self.tree))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_not_before_it_is_closed(rig: Rig):
    """Half a file is never taken, nor named: its writer is still there."""
    path = rig.source / "a.npy"
    rig.follower.begin()
    with path.open("wb") as file:
        file.write(DATA[:1000])
        file.flush()
        assert rig.look() == set()
        file.write(DATA[1000:])
    assert rig.look() == {"a.npy"}
    assert rig.said == []


def test_a_file_open_when_following_begins(rig: Rig):
    """A listing finds it; the kernel says that somebody writes, and then that it is closed."""
    with (rig.source / "a.npy").open("wb") as file:
        file.write(DATA[:1000])
        file.flush()
        rig.follower.begin()
        assert rig.look() == set()
        file.write(DATA[1000:])
    assert rig.look() == {"a.npy"}


def test_new_folders_with_all_that_is_in_them(rig: Rig):
    """Also what was closed in them before they were watched."""
    rig.follower.begin()
    files = write_tree(rig.source)
    tensors = {name for name in files if name.endswith(".npy") or "Add." in name}
    assert rig.look() == tensors
    assert rig.look(SETTLE_TIME_S) == set(files)
    assert stored(rig.tree) == files


def test_a_file_that_is_heard_of_twice(rig: Rig):
    """By its folder's listing and by its own event: it is taken once, by one thread."""
    rig.follower.begin()
    names = [f"{number}.npy" for number in range(200)]
    for name in names:
        write_file(rig.source / name, npy_bytes(np.arange(2000) + len(name)))
    rig.engine.ingest_files([CandidateFile(name, closed=True) for name in names for _ in range(3)])
    assert rig.engine.counts.files == len(names)
    assert rig.look() == set(names)
    assert rig.said == []


def test_moved_files_and_folders(rig: Rig, tmp_path: Path):
    """Written elsewhere and moved here; and moved about in here, with what comes after."""
    rig.follower.begin()
    write_file(tmp_path / "a.npy", DATA)
    (tmp_path / "a.npy").rename(rig.source / "a.npy")
    (tmp_path / "there").mkdir()
    write_file(tmp_path / "there" / "b.npy", DATA)
    (tmp_path / "there").rename(rig.source / "here")
    assert rig.look() == {"a.npy", "here/b.npy"}
    (rig.source / "here").rename(rig.source / "moved")
    rig.look()
    write_file(rig.source / "moved" / "c.npy", DATA)
    assert "moved/c.npy" in rig.look()


def test_tables_are_copied_when_they_rest(rig: Rig):
    """A table is opened and closed for every row: it is not copied for every row."""
    rig.follower.begin()
    for row in ("a\n", "b\n", "c\n"):
        with (rig.source / "statistic.csv").open("a") as file:
            file.write(row)
        assert rig.look(SETTLE_TIME_S / 2) == set()
    assert rig.look(SETTLE_TIME_S) == {"statistic.csv"}
    with (rig.source / "statistic.csv").open("a") as file:
        file.write("d\n")
    rig.look()
    rig.look(SETTLE_TIME_S)
    assert stored(rig.tree) == {"statistic.csv": b"a\nb\nc\nd\n"}


def test_lost_events_are_made_up_for(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The kernel's queue ran over: everything is listed again."""
    rig.follower.begin()
    files = write_tree(rig.source)
    lost = [Event(-1, flags.Q_OVERFLOW, 0, "")]
    with monkeypatch.context() as patched:
        patched.setattr(folder_watch.InotifyQueue, "read", lambda _self: lost)
        rig.look()
    rig.look()  # what the kernel did keep
    rig.look(SETTLE_TIME_S)
    assert stored(rig.tree) == files
    write_file(rig.source / FOLDER / tensor_name("later", 50), DATA)
    assert f"{FOLDER}/{tensor_name('later', 50)}" in rig.look()


def test_a_real_queue_that_runs_over(rig: Rig):
    """More events than the kernel keeps, of folders that are watched one and all."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    rig.follower.begin()
    write_file(rig.source / "a.npy", DATA)
    for _ in range(limit // 2 + 10):
        # Two files in turn: the kernel joins events that are the same as the last one.
        (rig.source / "one.txt").write_bytes(b"")
        (rig.source / "two.txt").write_bytes(b"")
    write_file(rig.source / "b.npy", DATA)
    taken = set[str]()
    for _ in range(1000):
        taken = rig.look()
        if "b.npy" in taken:
            break
    assert taken == {"a.npy", "b.npy"}


def test_where_the_kernel_cannot_tell(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Without leases: who was seen closing is believed; what is found has to rest, and be whole."""

    def refuse(_descriptor: int, command: int, *_args: object) -> int:
        if command == file_copy.fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return 0

    monkeypatch.setattr(file_copy.fcntl, "fcntl", refuse)
    write_file(rig.source / "found.npy", DATA)
    write_file(rig.source / "half.npy", DATA[:-1])
    rig.follower.begin()
    assert rig.look() == set()
    write_file(rig.source / "closed.npy", DATA)
    assert rig.look() == {"closed.npy"}
    assert rig.look(SETTLE_TIME_S) == {"closed.npy", "found.npy"}
    assert [line.split(":")[0] for line in rig.said] == ["half.npy"]


def test_damage_that_is_mended(rig: Rig):
    """A file that was damaged is looked at again when it is written again."""
    rig.follower.begin()
    (rig.source / "a.npy").write_bytes(DATA[:-1])
    assert rig.look() == set()
    assert rig.engine.counts.failed == 1
    (rig.source / "a.npy").write_bytes(DATA)
    assert rig.look() == {"a.npy"}
    assert rig.engine.counts.failed == 0


def test_an_iteration_is_indexed_when_the_next_begins(rig: Rig):
    rig.follower.begin()
    write_file(rig.source / FOLDER / tensor_name("a", 1), DATA)
    rig.look()
    folder = rig.tree / "rank_0/.dump_metadata/manifest"
    assert not folder.exists()
    write_file(rig.source / "rank_0/Net/0/1" / tensor_name("a", 2), DATA)
    rig.look()
    assert [path.name.split(".")[0] for path in folder.iterdir()] == ["iteration_0"]
    rig.look(SWEEP_INTERVAL_S)
    assert sorted(path.name.split(".")[0] for path in folder.iterdir()) == [
        "iteration_0",
        "iteration_1",
    ]


def test_what_failed_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The disk was full, and is not any more."""

    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    rig.follower.begin()
    with monkeypatch.context() as patched:
        patched.setattr("rankdumpd.agent.storage.tree.os.write", full)
        write_file_unpatched(rig.source / "a.npy")
        assert rig.look() == set()
    assert rig.look(SWEEP_INTERVAL_S) == {"a.npy"}
    assert rig.engine.counts.failed == 0


def write_file_unpatched(path: Path) -> None:
    with path.open("wb") as file:
        file.write(DATA)


def test_a_folder_that_is_removed(rig: Rig):
    """The one that may take its place is another."""
    rig.follower.begin()
    rig.source.rmdir()
    rig.source.mkdir()
    with pytest.raises(UnavailableError, match="was removed"):
        rig.look()


def test_hard_links_are_found_in_the_end(rig: Rig, tmp_path: Path):
    """Nobody closes a file that is linked to here."""
    rig.follower.begin()
    write_file(tmp_path / "elsewhere", DATA)
    (rig.source / "a.npy").hardlink_to(tmp_path / "elsewhere")
    assert rig.look() == set()
    assert rig.look(SWEEP_INTERVAL_S) == {"a.npy"}


@pytest.mark.usefixtures("short_waits")
def test_it_ends_when_nothing_comes(tmp_path: Path):
    source, tree = tmp_path / "source", tmp_path / "tree"
    files = write_tree(source)
    run = IngestRun(
        IngestTask(source, tree, delete=True, clear=True), report=print, until_idle_s=0.05
    )
    assert run.run()
    assert stored(tree) == files
    assert list(source.iterdir()) == []


def test_it_ends_when_asked(tmp_path: Path):
    """After a last look, whatever events there were."""
    source, tree = tmp_path / "source", tmp_path / "tree"
    source.mkdir()
    run = IngestRun(IngestTask(source, tree), report=print, follow=True)
    thread = threading.Thread(target=run.run)
    thread.start()
    files = write_tree(source)
    run.request_end()
    thread.join(60)
    run.request_end()
    run.abort()
    assert stored(tree) == files


@pytest.mark.usefixtures("short_waits")
def test_the_room_waits_for_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """An agent is there before the first job: that is said once, and tried again."""
    caplog.set_level("INFO")
    source, tree = tmp_path / "source", tmp_path / "tree"
    room = IngestComponent(IngestTask(source, tree, delete=True), retry_s=0.01, log_interval_s=0.01)
    room.start()
    wait_for(lambda: "cannot ingest" in caplog.text)
    files = write_tree(source)
    wait_for(lambda: "following" in caplog.text)
    assert room.drain(60) == 0
    room.stop()
    assert stored(tree) == files
    assert caplog.text.count("cannot ingest") == 1
    assert f"ingested {len(files)} files" in caplog.text
    left = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert left == {name for name in files if not (name.endswith(".npy") or "Add." in name)}


def test_the_room_outlives_its_troubles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """An error of this program is logged, and the ingest begun again."""
    source, tree = tmp_path / "source", tmp_path / "tree"
    files = write_tree(source)
    look, failures = FolderFollower.begin, iter([True])

    def begin(self: FolderFollower) -> None:
        if next(failures, False):
            raise RuntimeError("a mistake")
        look(self)

    monkeypatch.setattr(FolderFollower, "begin", begin)
    room = IngestComponent(IngestTask(source, tree), retry_s=0.01)
    room.start()
    wait_for(lambda: "a mistake" in caplog.text)
    wait_for(lambda: tree.exists() and len(stored(tree)) > 0)
    assert room.drain(60) == 0
    assert stored(tree) == files


def test_a_room_that_never_began(tmp_path: Path):
    room = IngestComponent(IngestTask(tmp_path / "source", tmp_path / "tree"))
    assert room.drain(0) == 0
    room.stop()
    room.stop()


def wait_for(holds) -> None:
    done = threading.Event()
    for _ in range(6000):
        if holds():
            return
        done.wait(0.01)
    raise AssertionError("it does not come")

"""Tests of small files of a tree, which one call of C makes, or several of Python."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rankdump._kernels.kernel_functions import KERNELS, load_kernels
from rankdumpd.agent.records import FileStamp
from rankdumpd.agent.storage import tree as tree_module
from rankdumpd.agent.storage.tree import DumpTree


@pytest.fixture(params=["", "numpy"], ids=["loaded", "without C"])
def tree(request, tmp_path: Path, monkeypatch) -> DumpTree:
    monkeypatch.setattr(tree_module, "KERNELS", load_kernels(request.param))
    return DumpTree(str(tmp_path), file_mode=0o440, folder_mode=0o750)


@pytest.fixture
def small_size_limit() -> Iterator[int]:
    limit_bytes = 1 << 10
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    yield limit_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def put(tree: DumpTree, name: str, data: bytes) -> FileStamp:
    (made,) = tree.put_small_files("a/b", [("m", name, data)])
    if isinstance(made, OSError):
        raise made
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 200])
def test_small_file_has_content_mode_and_stamp(tree: DumpTree, tmp_path: Path, data: bytes):
    old = os.umask(0o077)
    try:
        stamp = put(tree, "größe.npy", data)
    finally:
        os.umask(old)
    path = tmp_path / "a" / "b" / "größe.npy"
    status = path.stat()
    assert path.read_bytes() == data
    assert stat.S_IMODE(status.st_mode) == 0o440
    assert stamp == (status.st_ino, len(data), status.st_mtime_ns)
    assert names(path.parent) == ["größe.npy"]


def test_small_file_replaces_no_other(tree: DumpTree, tmp_path: Path):
    put(tree, "x", b"first")
    with pytest.raises(FileExistsError):
        put(tree, "x", b"second")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"first"
    assert names(tmp_path / "a" / "b") == ["x"]


def test_small_file_takes_the_place_of_a_hidden_one_that_a_crash_left(tree, tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / ".m.tmp").write_bytes(b"a longer rest of another")
    put(tree, "x", b"whole")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"whole"
    assert names(tmp_path / "a" / "b") == ["x"]


def test_small_file_is_written_to_a_folder_that_was_removed_meanwhile(tree, tmp_path: Path):
    put(tree, "x", b"x")
    (tmp_path / "a" / "b" / "x").unlink()
    (tmp_path / "a" / "b").rmdir()
    for name in ("y", "z"):
        put(tree, name, b"x")
    assert names(tmp_path / "a" / "b") == ["y", "z"]


def test_small_files_of_a_batch_fail_alone(tree: DumpTree, tmp_path: Path, small_size_limit):
    """Each has its own result, in their order; of two with one name the first is made."""
    batch = [("x", b"first"), ("x", b"second"), ("y", bytes(small_size_limit + 1)), ("z", b"")]
    found = tree.put_small_files("a/b", [(str(number), *each) for number, each in enumerate(batch)])
    assert [type(each) for each in found] == [FileStamp, FileExistsError, OSError, FileStamp]
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"first"
    assert names(tmp_path / "a" / "b") == ["x", "z"]


def test_batch_of_small_files_with_a_name_that_no_file_can_have_is_refused(tree, tmp_path: Path):
    """The others may exist by then; a file that is written again is recognised."""
    batch = [("1", "x", b""), ("2", "y\0", b""), ("3", "z", b"")]
    with pytest.raises(ValueError, match="null"):
        tree.put_small_files("a/b", batch)
    assert "x" in names(tmp_path / "a" / "b")


def test_small_file_that_cannot_be_written_leaves_nothing(tree, tmp_path: Path, small_size_limit):
    put(tree, "x", bytes(small_size_limit))
    with pytest.raises(OSError, match="too large"):
        put(tree, "y", bytes(small_size_limit + 1))
    assert names(tmp_path / "a" / "b") == ["x"]


def test_tree_does_without_a_call_that_its_system_lacks(tmp_path: Path, monkeypatch):
    """A file system without such a rename is asked once."""
    calls: list[str] = []

    def refuse(folder: int, mode: int, files: Sequence[tuple[str, str, bytes]], /):
        calls.extend(name for _, name, _ in files)
        return [22] * len(files)

    monkeypatch.setattr(tree_module, "KERNELS", KERNELS._replace(write_small_files=refuse))
    made = DumpTree(str(tmp_path), file_mode=0o440, folder_mode=0o750)
    for name in ("x", "y"):
        put(made, name, b"data")
    assert calls == ["x"]
    assert names(tmp_path / "a" / "b") == ["x", "y"]


def test_synced_tree_syncs_small_files_too(tmp_path: Path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    made = DumpTree(str(tmp_path), file_mode=0o440, folder_mode=0o750, synced=True)
    put(made, "x", b"data")
    assert len(synced) > 1

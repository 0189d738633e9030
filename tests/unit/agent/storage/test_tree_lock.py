"""Tests of the lock on a tree, and of claim_tree_context: no two ranks get the same time for their
folders.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.agent.storage.tree_lock import TreeLock, claim_tree_context


def tree_of(root: Path) -> DumpTree:
    return DumpTree(str(root), file_mode=0o440, folder_mode=0o750)


def test_second_claim_gets_next_second(tmp_path):
    """Law: one rank of one job always gets the same; any other one another."""
    trees = [tree_of(tmp_path), tree_of(tmp_path)]  # agents of two hosts
    stand = TreeContext(str(tmp_path), 3, "20261231235959")
    who = [(tree, "job", rank) for tree in trees for rank in (3, 11)] + [(trees[0], "other", 3)]
    for _ in range(2):
        seconds = [
            claim_tree_context(t, stand, job_id=job, rank=rank).started for t, job, rank in who
        ]
        assert seconds == [
            "20261231235959",
            "20270101000000",
            "20261231235959",
            "20270101000000",
            "20270101000001",
        ]
    other_device = TreeContext(str(tmp_path), 4, "20261231235959")
    assert claim_tree_context(trees[0], other_device, job_id="job", rank=4) == other_device


@pytest.mark.parametrize("job_id", ["a\0b", "../../x", "\udcff", "n" * 256])
def test_claim_accepts_any_job_id(job_id, tmp_path):
    stand = TreeContext(str(tmp_path), 0, "20261231235959")
    assert claim_tree_context(tree_of(tmp_path), stand, job_id=job_id, rank=0) == stand
    assert claim_tree_context(tree_of(tmp_path), stand, job_id=job_id, rank=1) != stand


def test_failed_claim_keeps_start_time(tmp_path, caplog):
    stand = TreeContext(str(tmp_path), 0, "99999999999999")
    assert claim_tree_context(tree_of(tmp_path), stand, job_id="job", rank=0) == stand
    (tmp_path / "file").write_text("")
    stand = TreeContext(str(tmp_path / "file"), 0, "20261231235959")
    assert claim_tree_context(tree_of(tmp_path / "file"), stand, job_id="job", rank=0) == stand
    assert len(caplog.records) == 2


def fail_with(code: int):
    def fail(*_args, **_named):
        raise OSError(code, os.strerror(code))

    return fail


def test_tree_on_a_disk_that_is_read_only_is_not_written_without_lock(tmp_path, monkeypatch):
    """A repair could begin meanwhile: the disk may be writable again in a second."""
    tree = tree_of(tmp_path)
    monkeypatch.setattr(tree, "open_lock_file", fail_with(errno.EROFS))
    with pytest.raises(OSError, match="Read-only file system"):
        TreeLock(tree).acquire()


@pytest.mark.parametrize(
    ("code", "problem"),
    [(errno.EACCES, "its lock file cannot be opened"), (errno.ENOLCK, "file locks are not")],
)
def test_warning_says_why_a_tree_has_no_lock(tmp_path, monkeypatch, caplog, code, problem):
    tree = tree_of(tmp_path)
    if code == errno.ENOLCK:
        monkeypatch.setattr(fcntl, "flock", fail_with(code))
    else:
        monkeypatch.setattr(tree, "open_lock_file", fail_with(code))
    TreeLock(tree).acquire()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} is written without the tree lock: {problem}")
    assert line.endswith(os.strerror(code))

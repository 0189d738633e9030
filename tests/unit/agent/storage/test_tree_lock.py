"""Tests of claim_tree_context: no two ranks get the same time for their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.agent.storage.tree_lock import claim_tree_context


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

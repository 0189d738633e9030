from __future__ import annotations

import numpy as np
import pytest

from rankdump._analysis.reader.rank_tallies import format_status_sentences
from rankdump._core.status import SessionState
from rankdump.reader import damaged, findings, status, walk

ONES = np.ones(4, np.float32)


def test_status_is_read_from_the_manifests(tree):
    """Sessions and balances come from the manifests, one session per rank, closed."""
    for rank in (0, 1):
        for iteration in (0, 1):
            tree.tensor(rank, iteration, "Default/a-A/A-op0", ONES)
            tree.complete(rank, iteration, expected=3, linked=1, dropped={"disk_low": 1})
    view = status(tree.root)
    assert [(s.rank, s.state, s.iterations_seen, s.world_size) for s in view.sessions] == [
        (0, SessionState.CLOSED, 2, 2),
        (1, SessionState.CLOSED, 2, 2),
    ]
    assert len(view.iterations) == 4
    assert all(i.is_balanced and i.complete for i in view.iterations)
    assert view.iterations[0].dropped == {"disk_low": 1}
    assert view.findings == ()
    assert view.load.disk_free_bytes > 0


def test_status_of_an_iteration_without_manifest_is_incomplete(tree):
    """Tensors of an iteration without a manifest are counted, and said to be incomplete."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    tree.complete(0, 0, world_size=1)
    tree.tensor(0, 1, "Default/a-A/A-op0", ONES)
    tree.tensor(0, 1, "Default/b-A/A-op1", ONES)
    unfinished = [i for i in status(tree.root).iterations if not i.complete]
    assert [(i.job_id, i.rank, i.iteration, i.stored) for i in unfinished] == [("job", 0, 1, 2)]
    assert unfinished[0].bytes_stored > 0
    (finding,) = findings(walk(tree.root))
    assert "rank 0: iteration 1" in finding


@pytest.mark.parametrize("add", ["tensor", "row"])
def test_tree_of_another_tool_is_not_called_incomplete(tree, add):
    """It never has manifests, and nothing says what should be there."""
    getattr(tree, add)(0, 1, "Default/a-A/A-op0", ONES)
    unknown = "the tree has no manifests, so it is not known whether tensors are missing"
    assert findings(walk(tree.root)) == (unknown,)
    assert format_status_sentences(status(tree.root)) == (unknown,)


def test_findings_name_missing_and_empty_ranks(tree):
    """The world's size says who is missing; a folder without tensors is not missing."""
    tree.tensor(1, 0, "Default/a-A/A-op0", ONES)
    tree.complete(1, 0, world_size=8)
    (tree.root / "rank_2" / ".dump_metadata").mkdir(parents=True)
    said = findings(walk(tree.root))
    assert said == (
        "rank 0,3-7: no folder, in a job with world size 8",
        "rank 2: the folder has no tensors",
    )
    assert not damaged(walk(tree.root))


def test_findings_of_a_huge_world_need_no_memory(tree):
    """A manifest may name any number of ranks: the missing ones are a range, never a set."""
    tree.tensor(1, 0, "Default/a-A/A-op0", ONES)
    tree.complete(1, 0, world_size=10**15)
    assert "rank 0,2-999999999999999: no folder" in findings(walk(tree.root))[0]


def test_findings_name_a_rank_without_an_iteration(tree):
    """A rank that stopped early is compared with the others."""
    for rank, last in ((0, 3), (1, 1)):
        for iteration in range(last + 1):
            tree.tensor(rank, iteration, "Default/a-A/A-op0", ONES)
            tree.complete(rank, iteration)
    assert findings(walk(tree.root)) == ("rank 1: iteration 2-3 is missing, other ranks have it",)


def test_ranks_lack_no_iterations_of_attempts_without_them(tree):
    """A job that is restarted with fewer ranks goes on without the others."""
    for rank in (0, 1, 2, 3):
        tree.tensor(rank, 0, "Default/a-A/A-op0", ONES)
        tree.complete(rank, 0, world_size=4)
    tree.tensor(3, 1, "Default/a-A/A-op0", ONES)
    tree.complete(3, 1, world_size=4)
    tree.attempt, tree.clock_us = 1, tree.clock_us + 10**9
    for rank in (0, 1):
        tree.tensor(rank, 2, "Default/a-A/A-op0", ONES)
        tree.complete(rank, 2, world_size=2)
    assert status(tree.root).findings == ("ranks 0-2: iteration 1 is missing, other ranks have it",)


def test_unbalanced_iteration_is_damage(tree):
    """expected = stored + linked + degraded + dropped, or somebody must hear of it."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    tree.complete(0, 0, world_size=1, expected=5)
    (finding,) = findings(walk(tree.root))
    assert "5 tensors expected, 1 accounted for" in finding
    assert damaged(walk(tree.root))


def test_status_of_a_mindspore_tree_without_manifests(tree):
    """A tree that MindSpore wrote is read as well; nothing in it counts as damage."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES, codec="none")
    view = status(tree.root)
    assert view.sessions == ()
    assert [i.stored for i in view.iterations] == [1]
    assert not damaged(walk(tree.root))

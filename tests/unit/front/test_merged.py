"""The view of all workers: everything once, and the fullest disk."""

from __future__ import annotations

from rankdump.contract.status import IterationStatus, Load, SessionState, SessionStatus, StatusView
from rankdumpd.front.merged import merged


def view(rank: int, *, root: str, load: Load, findings: tuple[str, ...] = ()) -> StatusView:
    session = SessionStatus("job", f"s{rank}", rank, 2, rank, "here", 1, SessionState.OPEN)
    iteration = IterationStatus("job", f"s{rank}", rank, 0, complete=True)
    return StatusView((session,), (iteration,), load, (root,), findings)


def test_every_rank_is_there_and_every_sentence_once():
    one = view(0, root="/a", load=Load(1, 10, 50, 100), findings=("same", "one"))
    two = view(1, root="/a", load=Load(2, 20, 40, 90), findings=("same",))
    both = merged([one, two], ["own", "same"])
    assert [s.rank for s in both.sessions] == [0, 1]
    assert [i.rank for i in both.iterations] == [0, 1]
    assert both.load == Load(3, 30, 40, 90)
    assert both.roots == ("/a",)
    assert both.findings == ("same", "one", "own")


def test_a_worker_without_a_tree_says_nothing_of_disks():
    used = view(0, root="/a", load=Load(0, 0, 50, 100))
    assert merged([StatusView(), used], ()).load == Load(0, 0, 50, 100)
    assert merged([StatusView()], ()).load == Load()

"""Merged status of all workers."""

from __future__ import annotations

from dataclasses import replace

from rankdump._core import forecast
from rankdump._core.status import (
    AgentLoad,
    DiskStatus,
    IterationStatus,
    JobNeed,
    JobUsage,
    LedgerStatus,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdumpd.workers.clients import merge_views


def view(rank: int, *, root: str, load: AgentLoad, findings: tuple[str, ...] = ()) -> StatusView:
    session = SessionStatus("job", f"s{rank}", rank, 2, rank, "here", 1, SessionState.OPEN)
    iteration = IterationStatus("job", f"s{rank}", rank, 0, complete=True)
    return StatusView((session,), (iteration,), load, (root,), findings)


def test_merged_view_has_every_rank_and_each_finding_once():
    one = view(0, root="/a", load=AgentLoad(1, 10, 50, 100), findings=("same", "one"))
    two = view(1, root="/a", load=AgentLoad(2, 20, 40, 90), findings=("same",))
    both = merge_views([one, two], ["own", "same"])
    assert [s.rank for s in both.sessions] == [0, 1]
    assert [i.rank for i in both.iterations] == [0, 1]
    assert both.load == AgentLoad(3, 30, 40, 90)
    assert both.roots == ("/a",)
    assert both.findings == ("same", "one", "own")


def test_merged_view_ignores_worker_without_tree():
    used = view(0, root="/a", load=AgentLoad(0, 0, 50, 100))
    assert merge_views([StatusView(), used], ()).load == AgentLoad(0, 0, 50, 100)
    assert merge_views([StatusView()], ()).load == AgentLoad()


def worker(rank: int, *, used: int) -> StatusView:
    """Return a worker with half of a limit of 1000 bytes; its rank needs 10 times 60 more."""
    need = JobNeed("job", "/a", iterations=10, bytes_stored=60, disk_bytes=60, inodes=2)
    known = replace(
        view(rank, root="/a", load=AgentLoad()),
        needs=(need,),
        disks=(DiskStatus("/a", 800, 2000, used_bytes=used),),
        usage=(JobUsage("job", used, limit_bytes=500),),
        ledger=LedgerStatus(f"/state/worker-{rank}", 10 + rank, 70 - rank, 100),
    )
    said = forecast.describe_shortages(known.needs, known.disks, known.usage)
    return replace(known, findings=tuple(said))


def test_merged_view_adds_up_needs_of_workers():
    """Each need alone fits on the disk; both together do not."""
    both = merge_views([worker(0, used=0), worker(1, used=0)], ())
    assert both.needs == (JobNeed("job", "/a", 10, 120, 120, 4),)
    assert both.findings == (
        "job job: 10 more iterations need 1.17 KiB on the disk of /a, and 800 B are free: 6 fit",
        "job job: 10 more iterations need 1.17 KiB, and its dump may take 1000 B more "
        "(agent.job_bytes): 8 fit",
    )


def test_merged_view_keeps_shortage_of_single_worker():
    """The limits suffice together, but not for the ranks of one worker."""
    other = replace(worker(1, used=0), needs=(), findings=(), disks=())
    one = worker(0, used=0)
    both = merge_views([one, other], ())
    assert both.findings == one.findings != ()


def test_merged_view_sums_ledgers():
    """The lowest free space counts, in case they are on several disks."""
    both = merge_views([worker(0, used=0), worker(1, used=0)], ())
    assert both.ledger == LedgerStatus("/state", 21, 69, 100)
    assert merge_views([StatusView()], ()).ledger == LedgerStatus()

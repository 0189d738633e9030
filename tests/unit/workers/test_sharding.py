"""Selection of the worker of a rank: stable, and evenly distributed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdumpd.workers.session_migration import select_worker

jobs = st.text(st.characters(codec="utf-8"), max_size=64)
ranks = st.integers(0, (1 << 24) - 1)
numbers = st.integers(1, 256)


@given(job=jobs, rank=ranks, workers=numbers)
def test_select_worker_returns_valid_index(job: str, rank: int, workers: int):
    index = select_worker(job, rank, workers)
    assert 0 <= index < workers
    assert select_worker(job, rank, workers) == index


@given(job=jobs, block=st.integers(0, 1 << 16), workers=numbers)
def test_select_worker_separates_neighbours(job: str, block: int, workers: int):
    """Of as many consecutive ranks as workers, from a multiple of that, each gets one worker."""
    row = range(block * workers, (block + 1) * workers)
    assert {select_worker(job, rank, workers) for rank in row} == set(range(workers))


@given(job=jobs, start=st.integers(0, 7), ranks_each=st.sampled_from([2, 4, 8]))
def test_select_worker_distributes_interleaved_hosts(job: str, start: int, ranks_each: int):
    """With eight hosts, each with every eighth rank, every worker of a host has ranks."""
    own = [start + 8 * turn for turn in range(ranks_each)]
    assert {select_worker(job, rank, 2) for rank in own} == {0, 1}


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_select_worker_distributes_jobs_of_one_rank(workers: int):
    counts = Counter(select_worker(f"20260101-{n:06}", 0, workers) for n in range(4000))
    assert min(counts.values()) > 0.8 * 4000 / workers


@pytest.mark.parametrize(
    ("job", "rank", "workers", "index"),
    [("job", 0, 2, 0), ("job", 1, 2, 1), ("job", 9, 4, 3), ("zwölf", 1023, 8, 5), ("", 0, 1, 0)],
)
def test_select_worker_is_stable_across_versions(job: str, rank: int, workers: int, index: int):
    """Another answer would separate a rank from its rows in the ledgers."""
    assert select_worker(job, rank, workers) == index

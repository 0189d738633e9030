"""Tests of CommitProgress: the watermark after commits in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankdumpd.agent.session.rank_session import CommitProgress


@given(st.lists(st.lists(st.integers(1, 40))))
def test_commit_progress_watermark_is_highest_number_without_gap(batches):
    progress = CommitProgress()
    seen: set[int] = set()
    for batch in batches:
        progress.add(batch)
        seen.update(batch)
        first_missing = next(n for n in range(1, 42) if n not in seen)
        assert progress.watermark == first_missing - 1
        assert all((n in progress) == (n in seen) for n in range(1, 42))

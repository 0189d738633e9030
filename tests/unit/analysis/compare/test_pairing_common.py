"""The longest common subsequence compared with a textbook implementation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._analysis.compare import call_pairs as module
from rankdump._analysis.compare.call_pairs import find_common_subsequence

TOKENS = st.lists(st.sampled_from("abcd"), max_size=24)


def textbook(a: list[str], b: list[str]) -> int:
    above = [0] * (len(b) + 1)
    for left in a:
        row = [0]
        for at, right in enumerate(b):
            row.append(above[at] + 1 if left == right else max(row[at], above[at + 1]))
        above = row
    return above[-1]


@pytest.mark.parametrize("kept", [1 << 22, 4])
@given(a=TOKENS, b=TOKENS)
def test_find_common_subsequence_is_common_ascending_and_longest(kept, a, b):
    """Law: whether a table is kept whole or solved by halves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_TABLE_CELLS", kept)
        found = find_common_subsequence(a, b)
    assert all(a[i] == b[j] for i, j in found)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(found))
    assert len(found) == textbook(a, b)


def test_find_common_subsequence_is_fast_for_long_programs(tmp_path):
    """A program of 30,000 calls with a call inserted every hundred: a row is one number."""
    a = [at % 37 for at in range(30_000)]
    b = [
        token for at, token in enumerate(a) for token in ([token, -1] if at % 100 == 0 else [token])
    ]
    assert len(find_common_subsequence(a, b)) == len(a)

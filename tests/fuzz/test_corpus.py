"""Corpus and its mutations: no decoder fails or takes excessive memory."""

from __future__ import annotations

import tracemalloc

import pytest
from fuzz.targets import CORPUS, TARGETS, fed, kept
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MOST_CORPUS_BYTES = 300_000
ROOM_BYTES = 24 << 20
"""What a decoder may take whatever it is given: a slab, a record's room."""
TIMES_INPUT = 256
EXAMPLES = 200


def test_every_target_has_its_corpus():
    """And no folder is without its target; together they are small enough for a repository."""
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)
    assert sum(len(path.read_bytes()) for name in TARGETS for path in kept(name)) < (
        MOST_CORPUS_BYTES
    )


@pytest.mark.parametrize("name", TARGETS)
def test_targets_survive_their_corpus(name: str):
    """Inputs that once failed no longer do, and take memory in proportion."""
    for path in kept(name):
        data = path.read_bytes()
        fed(name, data)
        tracemalloc.start()
        try:
            fed(name, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < ROOM_BYTES + TIMES_INPUT * len(data), path


@pytest.mark.parametrize("name", TARGETS)
def test_targets_survive_mutations_of_their_corpus(name: str):
    """Bytes changed, taken out, put in and repeated."""
    near = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    seeds = [path.read_bytes() for path in kept(name)]
    near(given(changed(seeds))(lambda data: fed(name, data)))()


def changed(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    edits = st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=9), st.integers(1, 3)),
        max_size=4,
    )
    return st.builds(_edited, st.sampled_from(seeds), edits)


def _edited(data: bytes, edits: list[tuple[float, int, bytes, int]]) -> bytes:
    for where, taken, put, times in edits:
        at = int(where * len(data))
        data = data[:at] + put * times + data[at + taken :]
    return data

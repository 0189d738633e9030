"""Laws of schedules, and of the content of tensors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from faults.schedule import HEAD_S, LASTS_S, crowd, schedule, tail_s
from faults.tensor_content import name_of, names, op_name, tensor
from faults.values import FaultKind
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.record import sanitize_name

SEEDS = st.integers(0, 1 << 32)


@given(SEEDS, st.integers(21, 120), st.floats(12, 600))
def test_schedule_depends_only_on_its_seed(seed: int, faults: int, seconds: float):
    """Law: the same words make the same faults, all of them, each kind among them, in time."""
    made = schedule(seed, seconds, faults)
    assert made == schedule(seed, seconds, faults)
    assert len(made) == faults
    assert {fault.kind for fault in made} == set(FaultKind)
    assert [fault.at_s for fault in made] == sorted(fault.at_s for fault in made)
    end_s = seconds - tail_s(seconds) + 0.01
    assert all(each.at_s >= HEAD_S and each.at_s + each.lasts_s <= end_s for each in made)


def test_soak_schedule_has_every_kind_and_at_most_two_at_once():
    made = schedule(1, 600, 500)
    counts = Counter(fault.kind for fault in made)
    assert min(counts.values()) >= 12
    assert max(crowd(each, [o for o in made if o is not each]) for each in made) <= 3
    assert all((fault.lasts_s > 0) == (fault.kind in LASTS_S) for fault in made)


def test_schedules_of_two_seeds_differ():
    assert schedule(1, 60, 50) != schedule(2, 60, 50)
    assert {each.kind for each in schedule(1, 60, 50, [FaultKind.CUT])} == {FaultKind.CUT}


@pytest.mark.parametrize("spelt", [str, sanitize_name])
@given(st.integers(0, 7), st.integers(0, 40), st.integers(0, 500))
def test_tensor_content_follows_from_its_name(spelt, rank: int, life: int, iteration: int):
    """Law: from its names in the tree alone a tensor is made again, and no other."""
    for name in names(rank, life, iteration):
        assert name_of(rank, iteration, spelt(op_name(name)), name.slot) == name
    assert name_of(rank, iteration, "Default/Add-op0", 0) is None
    assert name_of(rank, iteration, f"life{life}-op99", 0) is None


def test_tensors_have_mixed_sizes_and_some_are_equal():
    sizes = {tensor(name).nbytes for i in range(24) for name in names(0, 0, i)}
    assert {0, 4, 4096, 16384, 1048577, 3 << 20} <= sizes
    firsts, seconds = list(names(0, 0, 2)), list(names(0, 0, 3))
    alike = [
        name.number
        for name, after in zip(firsts, seconds, strict=True)
        if tensor(name).size and np.array_equal(tensor(name), tensor(after))
    ]
    assert alike == [3, 10]

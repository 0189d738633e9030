"""Clock steps: names stay distinct, and nothing is lost."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from faults.agent_rig import EACH, AgentRig

import rankdump

DAY_US = 86_400_000_000


@pytest.mark.parametrize("step_us", [DAY_US, -DAY_US, -1])
def test_clock_steps_within_a_session_lose_nothing(rig: AgentRig, step_us: int):
    with rig.session() as session:
        for iteration in range(4):
            rig.control.clock_us = step_us * (iteration % 2)
            rig.play(session, iteration)
    assert [each.kept_tensors for each in rig.settled(4)] == [EACH] * 4
    assert rig.control.hits("clock")
    assert rig.stored() == 4 * EACH


def test_rank_restarted_at_the_same_time_loses_nothing_uncounted(rig: AgentRig, monkeypatch):
    """Law: of two tensors with one name and one time both are there, or one is counted."""
    for value in range(2):
        ticks = itertools.count(1_800_000_000_000_000_000, 1_000_000)
        monkeypatch.setattr(time, "time_ns", ticks.__next__)
        with rig.session() as session:
            session.step(1)
            session.dump(
                "Add", "Default/Add-op0", "output", 0, np.full(100, value, dtype=np.float32)
            )
    kept = sum(each.kept_tensors for each in rig.settled(2))
    dump = rankdump.open(rig.root)
    found = sorted(float(dump.load(entry)[0]) for entry in dump.tensors())
    assert found == [0.0, 1.0][:kept]

"""`layout`, `optimizer` and `data_parallel` of a session, with one line for wrong calls."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity

HALF: dict[str, Any] = {
    "global_shape": (4,),
    "mesh": {"tp": 2},
    "placements": {"tp": "Shard(0)"},
}


def started(running: RunningFakeAgent) -> rankdump.Session:
    plan = DumpPlan(output=OutputSettings("/x"))
    return rankdump.Session(plan, agent=running.address, identity=RankIdentity(1, 2))


def test_declared_layout_is_sent_with_the_kind(running) -> None:
    with started(running) as session:
        session.layout("Default/Add-op0", slot=1, **HALF)
        for slot in range(2):
            session.dump("Add", "Default/Add-op0", "output", slot, np.ones(2))
    assert [str(record.layout) for record in bodies(running, "record")] == [
        "None",
        "tp 1/2 Shard(0) of [4]",
    ]


@pytest.mark.torch
def test_wrong_calls_are_one_line_each(running, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with started(running) as session:
        wrong: dict[str, Any] = {**HALF, "mesh": {"tp": 0}}
        session.layout("fc", **wrong)
        session.layout("fc", side="middle", **HALF)
        session.layout(np.ones(2), **HALF)
        session.optimizer("adam")
        session.data_parallel(3)
    lines = [record.getMessage() for record in caplog.records]
    starts = [
        "layout of fc: mesh={'tp': 0} is not allowed",
        "layout of fc: side 'middle', slot 0, graph 0 is not allowed",
        "layout of numpy.ndarray: target is not allowed",
        "optimizer of type builtins.str is not allowed",
        "data_parallel(builtins.int) is not allowed; allowed: torch.nn.Module",
    ]
    for start in starts:
        (line,) = [line for line in lines if start in line]
        assert "\n" not in line
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("method", ["optimizer", "data_parallel"])
def test_session_that_is_off_ignores_every_call(method: str) -> None:
    getattr(rankdump.Session(), method)(None)
    rankdump.Session().layout(None, global_shape=(), mesh={}, placements={})

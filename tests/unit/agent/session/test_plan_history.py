"""Tests of the plans of a session: which one a frame belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._core.job_control import NO_ITERATIONS, PlanChange
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings
from rankdump.errors import ProtocolError
from rankdumpd.agent.storage.session_storage import PlanHistory, make_session_storage

PLAN = DumpPlan(OutputSettings("/x"))
STOPPED = PlanChange(iterations=NO_ITERATIONS).apply_to(PLAN)


@pytest.fixture
def history(make_request) -> PlanHistory:
    return PlanHistory(PLAN, make_session_storage(make_request(), PLAN))


def test_frame_belongs_to_the_plan_before_it(history):
    history.add(5, STOPPED, 2)
    history.add(9, PLAN, 4)
    found = [history.find(sequence) for sequence in (0, 1, 5, 6, 9, 10)]
    assert [(period.plan, end) for period, end in found] == [
        (PLAN, 5),
        (PLAN, 5),
        (PLAN, 5),
        (STOPPED, 9),
        (STOPPED, 9),
        (PLAN, None),
    ]
    assert [period.iteration for period, _ in found] == [None, None, None, 2, 2, None]


def test_plan_that_comes_again_changes_nothing(history):
    for sequence in (5, 9, 5, 9):
        history.add(sequence, STOPPED, 3)
    assert history.latest.plan_sequence == 9
    assert history.find(6)[1] == 9


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(PLAN, output=OutputSettings("/y")), "for good"),
        (replace(PLAN, content=ContentSettings(sample_elements=3)), "for good"),
    ],
)
def test_plan_that_differs_in_more_is_refused(history, plan, reason):
    with pytest.raises(ProtocolError, match=reason):
        history.add(5, plan, 1)
    assert history.latest.plan == PLAN


def test_tables_come_into_being_and_stay(history):
    assert history.latest.storage.tables is None
    history.add(5, PlanChange(saved="full").apply_to(PLAN), 1)
    tables = history.latest.storage.tables
    assert tables is not None
    history.add(9, PLAN, 2)
    latest = history.latest.storage
    assert (latest.tables, latest.statistic_names, latest.has_elements) == (tables, None, True)

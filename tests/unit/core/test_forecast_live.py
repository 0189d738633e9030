"""Forecast of running jobs: what they still have to dump, and sentences where it does not fit."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core import forecast
from rankdump._core.forecast import count_planned_iterations, estimate_iteration_size, multiply_size
from rankdump._core.plan import ContentSettings, DumpPlan, OutputSettings, TensorSelection
from rankdump._core.selection import parse_iterations
from rankdump._core.status import (
    DiskStatus,
    IterationStatus,
    JobNeed,
    JobUsage,
    SessionState,
    SessionStatus,
)

GIB = 1 << 30
SESSION = SessionStatus("llm", "s", 3, 8, 3, "here", 1, SessionState.OPEN)
NEED = JobNeed("llm", "/d", iterations=96, bytes_stored=10 * GIB, disk_bytes=11 * GIB, inodes=1000)
DISK = DiskStatus("/d", 2000 * GIB, 4000 * GIB, 400 * GIB, 10**6, 10**7, floor_inodes=10**5)


def ended(iteration: int, stored: int = 4, **fields: Any) -> IterationStatus:
    about: dict[str, Any] = {"complete": True, "stored": stored, "bytes_stored": 10_000 * stored}
    return IterationStatus("llm", "s", 3, iteration, **about | fields)


def plan_of(text: str, content: ContentSettings = ContentSettings(), **selection) -> DumpPlan:  # noqa: B008
    iterations = parse_iterations(text)
    assert iterations is not None
    return DumpPlan(OutputSettings("/d"), TensorSelection(iterations, **selection), content)


@pytest.mark.parametrize(
    ("text", "after", "left"),
    [("0-99", 3, 96), ("0-99", 99, 0), ("5-8|0|6-9", 6, 3), ("7", -1, 1), ("all", 3, None)],
)
def test_count_planned_iterations_after_one(text, after, left):
    assert count_planned_iterations(plan_of(text).selection.iterations, after=after) == left


class TestEstimateJobNeed:
    """The largest iteration that it ended, for as many as are to come."""

    def test_uses_the_largest_iteration(self):
        some = [ended(0), ended(1, 40), ended(2), ended(3, 90, complete=False)]
        need = forecast.estimate_job_need(SESSION, plan_of("0-99"), "/d", some)
        each = estimate_iteration_size(some[1], tabulated=False)
        assert need == JobNeed("llm", "/d", 97, 400_000, each.disk_bytes, each.inodes)

    def test_has_no_count_for_a_plan_without_end(self):
        need = forecast.estimate_job_need(SESSION, plan_of("all"), "/d", [ended(0)])
        assert need is not None
        assert need.iterations == 0

    @pytest.mark.parametrize(
        ("session", "plan", "iterations"),
        [
            (SESSION, plan_of("0-99"), []),
            (SESSION, plan_of("0-99"), [ended(0, complete=False)]),
            (SESSION, plan_of("0-3"), [ended(3)]),
            (SESSION, plan_of("0-99"), [ended(0, stored=0)]),
            (SESSION, plan_of("0-99", trigger="overflow"), [ended(0)]),
            (replace(SESSION, state=SessionState.LOST), plan_of("0-99"), [ended(0)]),
            (replace(SESSION, state=SessionState.CLOSED), plan_of("0-99"), [ended(0)]),
        ],
        ids=["nothing", "unended", "over", "empty", "overflow", "lost", "closed"],
    )
    def test_returns_none_where_nothing_is_known_or_left(self, session, plan, iterations):
        assert forecast.estimate_job_need(session, plan, "/d", iterations) is None

    def test_includes_rows_of_statistics(self):
        bare = forecast.estimate_job_need(SESSION, plan_of("0-9"), "/d", [ended(0, 400)])
        full = forecast.estimate_job_need(
            SESSION, plan_of("0-9", ContentSettings("full")), "/d", [ended(0, 400)]
        )
        assert bare is not None
        assert full is not None
        assert full.disk_bytes > bare.disk_bytes
        assert full.inodes == bare.inodes + 1


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=8), st.data())
def test_sum_job_needs_is_independent_of_the_split(sizes, data):
    """Law: it does not matter how the ranks of a job are shared out."""
    needs = [replace(NEED, bytes_stored=each, disk_bytes=each, inodes=each) for each in sizes]
    cut = data.draw(st.integers(0, len(needs)))
    parts = (forecast.sum_job_needs(needs[:cut]), forecast.sum_job_needs(needs[cut:]))
    (whole,) = forecast.sum_job_needs(needs)
    assert forecast.sum_job_needs(each for part in parts for each in part) == (whole,)
    assert whole.bytes_stored == sum(sizes)


def test_sum_job_needs_has_no_end_if_one_rank_has_none():
    (whole,) = forecast.sum_job_needs([NEED, replace(NEED, iterations=0)])
    assert whole.iterations == 0


CAPPED = JobUsage("llm", bytes_stored=40 * GIB, limit_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("need", "disk", "usage", "said"),
    [
        (NEED, DISK, (), ()),
        (
            NEED,
            replace(DISK, free_bytes=800 * GIB),
            (),
            "job llm: 96 more iterations need 1.03 TiB on the disk of /d, and 400.0 GiB are free "
            "above the floor (agent.keep_free_ratio, agent.keep_free_bytes): 36 fit",
        ),
        (
            replace(NEED, iterations=1),
            replace(DISK, free_bytes=8 * GIB, floor_bytes=0),
            (),
            "job llm: 1 more iteration needs 11.0 GiB on the disk of /d, and 8.00 GiB are free: "
            "0 fit",
        ),
        (
            NEED,
            replace(DISK, free_inodes=190_000),
            (),
            "job llm: 96 more iterations need 96,000 files and folders on the disk of /d, and it "
            "has inodes for 90,000 more: 90 fit",
        ),
        (NEED, replace(DISK, total_inodes=0, free_inodes=0, floor_inodes=0), (), ()),
        (NEED, replace(DISK, total_bytes=0, free_bytes=0), (), ()),
        (
            NEED,
            replace(DISK, limit_bytes=900 * GIB),
            (JobUsage("llm", 40 * GIB), JobUsage("other", 60 * GIB)),
            "job llm: 96 more iterations need 960.0 GiB, and dumps may take 800.0 GiB more "
            "(agent.disk_bytes): 80 fit",
        ),
        (
            NEED,
            DISK,
            (CAPPED,),
            "job llm: 96 more iterations need 960.0 GiB, and its dump may take 60.0 GiB more "
            "(agent.job_bytes): 6 fit",
        ),
        (NEED, DISK, (replace(CAPPED, job_id="other"),), ()),
        (
            replace(NEED, iterations=0),
            DISK,
            (CAPPED,),
            "job llm: each iteration needs 10.0 GiB, and its dump may take 60.0 GiB more "
            "(agent.job_bytes): 6 more fit",
        ),
        (replace(NEED, iterations=0), DISK, (replace(CAPPED, limit_bytes=140 * GIB),), ()),
        (
            replace(NEED, iterations=0),
            replace(DISK, free_inodes=102_500),
            (),
            "job llm: each iteration needs 1,000 files and folders on the disk of /d, and it has "
            "inodes for 2,500 more: 2 more fit",
        ),
        (replace(NEED, root="/elsewhere"), replace(DISK, free_bytes=0), (), ()),
    ],
    ids=[
        "fits",
        "floor",
        "no floor",
        "inodes",
        "no table of files",
        "silent disk",
        "cap",
        "quota",
        "quota of another",
        "endless",
        "endless with room for ten",
        "endless and inodes",
        "another disk",
    ],
)
def test_describe_shortages_names_each_exceeded_limit(need, disk, usage, said):
    assert forecast.describe_shortages([need], [disk], usage) == ([said] if said else [])


def test_describe_shortages_adds_jobs_on_one_disk():
    """Each fits alone, and both together do not."""
    disk = replace(DISK, free_bytes=1600 * GIB)
    needs = [replace(NEED, iterations=60), replace(NEED, job_id="other", iterations=60)]
    assert (
        forecast.describe_shortages(needs[:1], [disk], ())
        == forecast.describe_shortages(needs[1:], [disk], ())
        == []
    )
    assert forecast.describe_shortages(needs, [disk], ()) == [
        "jobs llm, other: their iterations to come need 1.29 TiB on the disk of /d, and 1.17 TiB "
        "are free above the floor (agent.keep_free_ratio, agent.keep_free_bytes)"
    ]


@pytest.mark.parametrize(
    ("need", "retain", "used", "iterations"),
    [
        (NEED, 0, 0, 96),
        (NEED, 100 * GIB, 0, 11),
        (NEED, 100 * GIB, 95 * GIB, 1),
        (NEED, 100 * GIB, 200 * GIB, 1),
        (NEED, 10_000 * GIB, 0, 96),
        (replace(NEED, iterations=0), 100 * GIB, 0, 11),
        (replace(NEED, iterations=0, bytes_stored=0), 100 * GIB, 0, 0),
    ],
)
def test_limit_need_to_retention_stops_at_retired_iterations(need, retain, used, iterations):
    assert forecast.limit_need_to_retention(need, retain, used).iterations == iterations


def test_multiply_size_multiplies_every_field():
    one = estimate_iteration_size(ended(0, linked=2, bytes_in=7, stall_us=9), tabulated=True)
    assert multiply_size(one, 1) == one
    assert astuple(multiply_size(one, 3)) == tuple(3 * number for number in astuple(one))

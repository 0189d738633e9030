"""The sentence that leads an overview: the most urgent thing that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump._analysis.reader.rank_tallies import sum_iterations
from rankdump._analysis.tree_overview import (
    BadTensor,
    OverviewLevel,
    TreeOverview,
    find_budget_share,
    make_verdict,
)
from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import IterationStatus
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit

BAD = BadTensor(1, 7, 3, "Default/network-Net/fc-Linear/Linear-op0", "output", 0)
LATE = Finding(FindingKind.LATE, 1, "events came late")
WHOLE = IterationStatus("job", "s", 0, 0, complete=True, expected=5, stored=5)
GOOD = TreeOverview(
    jobs=("job",),
    ranks=(0,),
    iterations=(0,),
    tallies=(),
    totals=sum_iterations([WHOLE]),
    problems=(),
    missing=(),
    freezes=(),
    fault=None,
    findings=(),
    hints=(),
    card_differences=(),
    card_remarks=(),
)


def hint(level: HintLevel, projected_us: int = 0) -> TimeoutHint:
    limit = TimeoutLimit("timeout", 1000, "process group", (0,))
    return TimeoutHint(
        job_id="job",
        group="0",
        backend="gloo",
        level=level,
        waiting=False,
        kind="all_reduce",
        name="AllReduce",
        iteration=1,
        sequence=2,
        first_rank=0,
        last_rank=1,
        spread_us=250,
        dump_us=0,
        limit=limit,
        limits=(limit,),
        projected_us=projected_us,
        projected_iteration=9,
        settings=(),
        reason="it is near",
    )


URGENT = hint(next(level for level in HintLevel if level is not HintLevel.OK))


def test_most_urgent_thing_leads():
    """Everything is wrong; what leads is taken away, and the next one leads."""
    wrong = replace(
        GOOD,
        problems=("a file is damaged", "another one"),
        findings=(LATE, LATE),
        hints=(hint(HintLevel.OK), URGENT),
        missing=("rank 3: no folder",),
        card_differences=("the batches differ",),
    )
    steps = [
        ({}, (BAD,), OverviewLevel.FAULT, "a file is damaged (and 1 more problem)"),
        ({"problems": ()}, (BAD,), OverviewLevel.FAULT, "output 0 of fc/Linear-op0"),
        ({}, (), OverviewLevel.WARNING, "events came late (and 1 more finding)"),
        ({"findings": ()}, (), OverviewLevel.WARNING, "it is near"),
        ({"hints": ()}, (), OverviewLevel.WARNING, "rank 3: no folder"),
        ({"missing": ()}, (), OverviewLevel.WARNING, "ranks differ: the batches differ"),
        ({"card_differences": ()}, (), OverviewLevel.GOOD, "all 5 tensors"),
    ]
    for change, bad, level, words in steps:
        wrong = replace(wrong, **change)
        found = make_verdict(wrong, bad, 5)
        assert (found.level, words in found.text) == (level, True), found


def test_good_tree_says_how_much_is_known():
    assert "none of 5 measured tensors" in make_verdict(GOOD, (), 5).text
    unmeasured = make_verdict(GOOD, (), 0)
    assert unmeasured.level is OverviewLevel.UNKNOWN
    assert "no statistics say whether they are finite" in unmeasured.text
    unknown = replace(GOOD, totals=sum_iterations([]))
    assert "does not say how many" in make_verdict(unknown, (), 0).text


def test_constants_have_no_iteration():
    found = make_verdict(GOOD, (BAD._replace(iteration=None),), 5)
    assert "rank 1, constants: output 0" in found.text


@pytest.mark.parametrize(("projected_us", "share"), [(0, 0.25), (600, 0.6), (9000, 1.0)])
def test_budget_is_what_is_used_or_expected(projected_us, share):
    assert find_budget_share(hint(HintLevel.OK, projected_us)) == share
    assert find_budget_share(replace(hint(HintLevel.OK), limit=None)) == 0

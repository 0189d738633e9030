"""Every drop reason has a cause and a remedy, and the documentation has the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankdump._core.drop_reasons import (
    DROP_EXPLANATIONS,
    DROP_REASONS,
    PLAN_REASONS,
    count_lost,
    describe_drops,
    explain_drop,
)

PAGE = Path(__file__).parents[3] / "docs" / "guarantees.md"


def test_every_drop_reason_has_cause_and_remedy():
    assert set(DROP_EXPLANATIONS) == DROP_REASONS
    for cause, remedy in DROP_EXPLANATIONS.values():
        assert cause
        assert remedy
        assert not cause.endswith(".")


@pytest.mark.parametrize("reason", sorted(DROP_REASONS))
def test_documentation_explains_a_drop_reason_in_the_same_words(reason):
    cause, remedy = DROP_EXPLANATIONS[reason]
    assert f"| `{reason}` | {cause} | {remedy} |" in PAGE.read_text().splitlines()


def test_unknown_reason_is_explained_as_other():
    assert explain_drop("from_the_future") == DROP_EXPLANATIONS["other"]


def test_describe_drops_has_the_most_frequent_reason_first():
    first, second = describe_drops({"disk_full": 1, "buffer_full": 1200, "torn": 0})
    assert first.startswith("1,200 tensors dropped (buffer_full): the rank's send buffer")
    assert second == (
        "1 tensor dropped (disk_full): the disk had no space or no inodes left when the file was "
        "written; free space, remove small files, or dump to another disk"
    )


def test_tensors_that_the_plan_leaves_out_are_not_lost():
    assert count_lost(dict.fromkeys(PLAN_REASONS, 3) | {"torn": 2}) == 2

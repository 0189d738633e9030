"""data_dump.json with any content: it gives a plan or a one-line error, never a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configurations import ABSENT, body_of

from rankdump._config.config_section import ConfigNotes
from rankdump._config.mindspore_config import MINDSPORE_KEYS, parse_mindspore_config
from rankdump._core.plan import DumpPlan, plan_from_json, plan_to_json
from rankdump.errors import ConfigError

WORDS = ["all", "0|5-8", "device", "npy", "full", "name-regex([[:alpha:]]+)", "Conv2D-op0", "/a"]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(WORDS)
)
values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=4), scalars)
expressions = st.text(st.sampled_from(r"ab0-[]^():?*+{},.|\dDpZ=!<P&~:alpha"), max_size=12)


def sections(name: str) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from([*MINDSPORE_KEYS[name], "unknown", "a\nb"])
    return st.dictionaries(keys, values | st.just(ABSENT), max_size=5)


def parsed(common: dict[str, Any], e2e: object) -> DumpPlan | None:
    body = body_of(common=common, e2e=e2e)
    try:
        return parse_mindspore_config(body, file="f.json", environ={}, notes=ConfigNotes())
    except ConfigError:
        return None


@given(sections("common_dump_settings"), sections("e2e_dump_settings") | values)
def test_mindspore_config_gives_a_plan_or_one_line(common: dict[str, Any], e2e: object):
    """With any values of the keys; the plan round trips, and its warnings are single lines."""
    plan = parsed(common, e2e)
    if plan is not None:
        assert plan_from_json(plan_to_json(plan)) == plan
        assert all(warning.isprintable() for warning in plan.warnings)


@given(st.lists(expressions.map("name-regex({})".format), min_size=1, max_size=2))
def test_translated_expression_can_be_compiled(kernels: list[str]):
    """An accepted expression can be compiled by every reader of the plan."""
    plan = parsed({"dump_mode": 1, "kernels": kernels}, {})
    assert plan is None or plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize("depth", [10, 900])
def test_mindspore_config_accepts_deeply_nested_values(depth: int):
    """A value as deep as the JSON parser accepts can be shown in a message."""
    deep = json.loads("[" * depth + "]" * depth)
    for key in ("kernels", "unknown", "iteration", "statistic_category"):
        parsed({"dump_mode": 1, "saved_data": "full", key: [deep]}, {})

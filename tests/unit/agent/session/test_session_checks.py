"""Tests of read_checked_plan: which sessions the agent can serve."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump._core.plan import DumpPlan, OutputSettings, plan_to_json
from rankdump.errors import PermanentError
from rankdumpd.agent.session import registry


@pytest.mark.parametrize(
    ("fields", "output", "says"),
    [
        ({}, {"codec": "lzma"}, "codec 'lzma' is not one of none, zstd"),
        ({}, {"layout": "acl"}, "layout 'acl'"),
        ({}, {"profile": "ms3"}, "profile 'ms3' is not one of ms2.3, ms2.4, ms2.0"),
        ({}, {"folder_mode": 0o500}, "folder_mode 0o500"),
        ({}, {"net_name": "a/b"}, "net_name"),
        ({}, {"root": "relative"}, "relative"),
        ({"session_id": "../up"}, {}, "session id '../up'"),
        ({"session_id": "a" * 129}, {}, "session id"),
        ({"plan_json": b"[]"}, {}, "plan cannot be read"),
    ],
)
def test_read_checked_plan_names_fault(make_request, fields, output, says):
    """A session that would fail later is rejected with the fault."""
    whole: dict[str, Any] = {"root": "/dump", **output}
    plan = DumpPlan(output=OutputSettings(**whole))
    with pytest.raises(PermanentError) as refused:
        registry.read_checked_plan(make_request(**{"plan_json": plan_to_json(plan), **fields}))
    assert says in str(refused.value)


def test_read_checked_plan_returns_plan(make_request):
    plan = DumpPlan(output=OutputSettings(root="/dump", net_name="Net-1", codec="none"))
    assert registry.read_checked_plan(make_request(plan_json=plan_to_json(plan))) == plan

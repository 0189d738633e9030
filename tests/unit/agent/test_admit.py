"""The table of admissions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import Content, DumpPlan, Iterations, Operators, Output, Selection
from rankdump.contract.status import Load
from rankdumpd.agent.admit import verdict
from rankdumpd.agent.values import Policy

GIB = 1 << 30
ROOMY = Load(disk_free_bytes=GIB)
POLICY = Policy(max_record_bytes=1000, keep_free_bytes=1 << 20)

NONE = Selection(Iterations("5", ((5, 5),)), inputs=False)


@pytest.mark.parametrize(
    ("selection", "head", "device", "load", "reason"),
    [
        (Selection(), {}, 0, ROOMY, ""),
        (Selection(devices=(1, 2)), {}, 0, ROOMY, "device_excluded"),
        (Selection(devices=(1, 2)), {}, 2, ROOMY, ""),
        (Selection(Iterations("5", ((5, 5),))), {"iteration": 4}, 0, ROOMY, "iteration_excluded"),
        (Selection(Iterations("5", ((5, 5),))), {"iteration": 5}, 0, ROOMY, ""),
        (NONE, {"switched_on": True}, 0, ROOMY, ""),
        (NONE, {"switched_on": True, "side": Side.INPUT}, 0, ROOMY, "side_excluded"),
        (replace(NONE, devices=(1,)), {"switched_on": True}, 0, ROOMY, "device_excluded"),
        (Selection(outputs=False), {}, 0, ROOMY, "side_excluded"),
        (Selection(outputs=False), {"side": Side.INPUT}, 0, ROOMY, ""),
        (Selection(operators=Operators(False, ("x",))), {}, 0, ROOMY, "operator_excluded"),
        (Selection(operators=Operators(False, types=("matmul",))), {}, 0, ROOMY, ""),
        (Selection(), {"dtype": "int4"}, 0, ROOMY, "unsupported_dtype"),
        (Selection(), {"byte_count": 1000}, 0, ROOMY, ""),
        (Selection(), {"byte_count": 1001}, 0, ROOMY, "record_too_large"),
        (Selection(), {}, 0, Load(disk_free_bytes=(1 << 20) + 16), ""),
        (Selection(), {}, 0, Load(disk_free_bytes=(1 << 20) + 15), "disk_low"),
        (Selection(), {}, 0, Load(queued_bytes=GIB, disk_free_bytes=GIB), "disk_low"),
    ],
)
def test_verdicts(make_head, selection, head, device, load, reason):
    """A record is taken exactly when the plan, the policy and the disk all say yes."""
    plan = DumpPlan(output=Output(root="/dump"), selection=selection)
    answer = verdict(make_head(**head), plan, device, load, POLICY)
    assert (answer.accepted, answer.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("saved", "head", "load", "reason"),
    [
        ("statistic", {"figures": ("1",)}, ROOMY, ""),
        ("statistic", {}, ROOMY, "no_statistics"),
        ("statistic", {"figures": ("1",), "dtype": "complex64"}, ROOMY, "no_statistics"),
        ("statistic", {"figures": ("1",), "dtype": "int4"}, ROOMY, "unsupported_dtype"),
        ("statistic", {"figures": ("1",), "byte_count": 1001}, ROOMY, ""),
        ("statistic", {"figures": ("1",)}, Load(disk_free_bytes=1 << 20), ""),
        ("full", {"dtype": "complex64"}, ROOMY, ""),
        ("tensor", {"dtype": "complex64"}, ROOMY, ""),
        ("full", {"figures": ("1",), "degraded": True}, ROOMY, ""),
        ("tensor", {"figures": ("1",), "degraded": True, "byte_count": 1001}, ROOMY, ""),
        (
            "full",
            {"figures": ("1",), "degraded": True, "dtype": "complex64"},
            ROOMY,
            "no_statistics",
        ),
    ],
)
def test_figures_in_the_place_of_elements(make_head, saved, head, load, reason):
    """They are due exactly where the plan keeps nothing else, and need no room for elements."""
    plan = DumpPlan(output=Output(root="/dump"), content=Content(saved=saved))
    assert verdict(make_head(**head), plan, 0, load, POLICY).reason == reason

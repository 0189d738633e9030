"""The table of admissions."""

from __future__ import annotations

import pytest

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Iterations, Operators, Output, Selection
from rankdump.contract.status import Load
from rankdumpd.agent.admit import verdict
from rankdumpd.agent.values import Policy

GIB = 1 << 30
ROOMY = Load(disk_free_bytes=GIB)
POLICY = Policy(max_record_bytes=1000, keep_free_bytes=1 << 20)


@pytest.mark.parametrize(
    ("selection", "head", "device", "load", "reason"),
    [
        (Selection(), {}, 0, ROOMY, ""),
        (Selection(devices=(1, 2)), {}, 0, ROOMY, "device_excluded"),
        (Selection(devices=(1, 2)), {}, 2, ROOMY, ""),
        (Selection(Iterations("5", ((5, 5),))), {"iteration": 4}, 0, ROOMY, "iteration_excluded"),
        (Selection(Iterations("5", ((5, 5),))), {"iteration": 5}, 0, ROOMY, ""),
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

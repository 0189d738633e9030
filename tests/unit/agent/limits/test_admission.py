"""Tests of RecordAdmission: the reason for each plan, record and resource usage."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import StatisticRows, TensorSide
from rankdumpd.agent.limits import admission as limits_admission
from rankdumpd.agent.limits.admission import (
    DiskSpace,
    RecordAdmission,
    ResourcePolicy,
    ResourceUsage,
)

GIB = 1 << 30
POLICY = ResourcePolicy(max_record_bytes=1000, keep_free_bytes=1 << 20)


def free(free_bytes: int, *, queued_bytes: int = 0) -> ResourceUsage:
    """Space on a disk of 1 GiB."""
    return ResourceUsage(POLICY, DiskSpace(free_bytes, GIB), queued_bytes=queued_bytes)


ROOMY = free(GIB)

NOTHING = OperatorSelection(False)
WATCHED = WatchedOperators(("a",), ("b",))
INPUT_AGAIN = {"op_name": "a_To_b", "side": TensorSide.INPUT}


def without(*positions: str) -> OperatorSelection:
    """All operators but those of a type, or but these tensors of them."""
    return OperatorSelection(without_types=(TensorExclusion("MatMul", positions),))


NONE = TensorSelection(IterationSelection("5", ((5, 5),)), inputs=False)


@pytest.mark.parametrize(
    ("selection", "head", "device", "usage", "reason"),
    [
        (TensorSelection(), {}, 0, ROOMY, ""),
        (TensorSelection(devices=(1, 2)), {}, 0, ROOMY, "device_excluded"),
        (TensorSelection(devices=(1, 2)), {}, 2, ROOMY, ""),
        (
            TensorSelection(IterationSelection("5", ((5, 5),))),
            {"iteration": 4},
            0,
            ROOMY,
            "iteration_excluded",
        ),
        (TensorSelection(IterationSelection("5", ((5, 5),))), {"iteration": 5}, 0, ROOMY, ""),
        (NONE, {"switched_on": True}, 0, ROOMY, ""),
        (NONE, {"switched_on": True, "side": TensorSide.INPUT}, 0, ROOMY, "side_excluded"),
        (replace(NONE, devices=(1,)), {"switched_on": True}, 0, ROOMY, "device_excluded"),
        (TensorSelection(outputs=False), {}, 0, ROOMY, "side_excluded"),
        (TensorSelection(outputs=False), {"side": TensorSide.INPUT}, 0, ROOMY, ""),
        (
            TensorSelection(operators=OperatorSelection(False, ("x",))),
            {},
            0,
            ROOMY,
            "operator_excluded",
        ),
        (TensorSelection(operators=OperatorSelection(False, types=("matmul",))), {}, 0, ROOMY, ""),
        (
            TensorSelection(operators=OperatorSelection(False, ranges=(("a", "b"),))),
            {},
            0,
            ROOMY,
            "",
        ),
        (TensorSelection(models=(("Net", NOTHING),)), {}, 0, ROOMY, "operator_excluded"),
        (TensorSelection(models=(("Other", NOTHING),)), {}, 0, ROOMY, ""),
        (
            TensorSelection(operators=NOTHING, models=(("Net", OperatorSelection()),)),
            {},
            0,
            ROOMY,
            "",
        ),
        (TensorSelection(operators=without("output0")), {}, 0, ROOMY, "tensor_excluded"),
        (TensorSelection(operators=without("output0")), {"slot": 1}, 0, ROOMY, ""),
        (TensorSelection(operators=without("output0")), {"side": TensorSide.INPUT}, 0, ROOMY, ""),
        (TensorSelection(operators=without()), {"op_type": "Conv2D"}, 0, ROOMY, ""),
        (TensorSelection(operators=without()), {"slot": 5}, 0, ROOMY, "tensor_excluded"),
        (TensorSelection(watched=WATCHED), {}, 0, ROOMY, "operator_excluded"),
        (TensorSelection(watched=WATCHED), {"op_name": "a_To_b"}, 0, ROOMY, ""),
        (TensorSelection(watched=WATCHED), INPUT_AGAIN, 0, ROOMY, "operator_excluded"),
        (TensorSelection(), {"dtype": "int4"}, 0, ROOMY, "unsupported_dtype"),
        (TensorSelection(), {"byte_count": 1000}, 0, ROOMY, ""),
        (TensorSelection(), {"byte_count": 1001}, 0, ROOMY, "record_too_large"),
        (TensorSelection(), {}, 0, free((1 << 20) + 16), ""),
        (TensorSelection(), {}, 0, free((1 << 20) + 15), "disk_low"),
        (TensorSelection(), {}, 0, free(GIB, queued_bytes=GIB), "disk_low"),
    ],
)
def test_check_record_returns_reason(make_head, selection, head, device, usage, reason):
    """A record is taken exactly when the plan, the policy and the disk all say yes."""
    plan = DumpPlan(output=OutputSettings(root="/dump"), selection=selection)
    answer = RecordAdmission(plan, device).check_record(make_head(**head), usage)
    assert (answer.accepted, answer.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("saved", "head", "reason"),
    [
        ("statistic", {}, "no_statistics"),
        ("statistic", {"dtype": "int4"}, "unsupported_dtype"),
        ("full", {"dtype": "complex64"}, ""),
        ("tensor", {"dtype": "complex64"}, ""),
    ],
)
def test_check_record_rejects_elements_in_place_of_statistics(make_head, saved, head, reason):
    """A plan with statistics only accepts no elements."""
    plan = DumpPlan(output=OutputSettings(root="/dump"), content=ContentSettings(saved=saved))
    assert RecordAdmission(plan, 0).check_record(make_head(**head), ROOMY).reason == reason


def test_remembered_reasons_are_bounded_in_bytes(make_head, monkeypatch):
    """Memory stays bounded for a rank that invents new long names all the time."""
    monkeypatch.setattr(limits_admission, "MAX_REMEMBERED_BYTES", 1 << 20)
    admission = RecordAdmission(DumpPlan(output=OutputSettings(root="/dump")), 0)
    tracemalloc.start()
    try:
        for number in range(2000):
            assert admission.check_record(make_head(op_name=f"{number:04}" * 1000), ROOMY).accepted
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 << 20


class TestCheckRows:
    """The same questions for every row of a frame."""

    @pytest.mark.parametrize(
        ("selection", "fields", "device", "usage", "refused"),
        [
            (TensorSelection(), {}, 0, ROOMY, {}),
            (TensorSelection(devices=(1,)), {}, 0, ROOMY, {"device_excluded": [0, 1]}),
            (NONE, {}, 0, ROOMY, {"iteration_excluded": [0, 1]}),
            (NONE, {"switched_on": True}, 0, ROOMY, {"side_excluded": [1]}),
            (TensorSelection(), {}, 0, free(1 << 20), {}),
            (TensorSelection(), {}, 0, free(1), {"disk_low": [0, 1]}),
        ],
    )
    def test_returns_reason_of_row(self, make_kind, selection, fields, device, usage, refused):
        """Each row that is not taken has the reason that a record would have."""
        plan = DumpPlan(OutputSettings(root="/dump"), selection, ContentSettings("statistic"))
        kinds = (make_kind(), make_kind(side=TensorSide.INPUT))
        rows = StatisticRows(0, kinds, (1, 2), ("1", "2"), **fields)
        found = RecordAdmission(plan, device).check_rows(rows, usage)
        assert {reason: list(places) for reason, places in found.items()} == refused

    @pytest.mark.parametrize("saved", ["statistic", "full", "tensor"])
    def test_statistics_need_numeric_type_and_no_space(self, make_kind, saved):
        """Complex numbers have no statistics; the size of the tensor does not matter."""
        plan = DumpPlan(output=OutputSettings(root="/dump"), content=ContentSettings(saved=saved))
        types = ("float32", "complex64", "int4", "float32")
        kinds = tuple(make_kind(dtype=dtype, byte_count=1 << 20) for dtype in types)
        rows = StatisticRows(
            0,
            kinds,
            (1, 2, 3, 4),
            ("1",) * 4,
            degraded="" if saved == "statistic" else "buffer_full",
        )
        found = RecordAdmission(plan, 0).check_rows(rows, ROOMY)
        assert found == {"no_statistics": [1], "unsupported_dtype": [2]}

    @pytest.mark.parametrize(("net_name", "refused"), [("", [0, 3]), ("Mine", [0, 1, 2, 3])])
    def test_decides_by_model_of_row(self, make_kind, net_name, refused):
        """Law: a row is judged by the name that its folder has."""
        models = tuple((name, NOTHING) for name in ("Net", "Mine", "A"))
        plan = DumpPlan(OutputSettings("/dump", net_name=net_name), TensorSelection(models=models))
        kinds = tuple(make_kind(model=model) for model in ("", "B", "C", "A"))
        rows = StatisticRows(0, kinds, (1, 2, 3, 4), ("1",) * 4, degraded="buffer_full")
        found = RecordAdmission(plan, 0).check_rows(rows, ROOMY)
        assert found == {"operator_excluded": refused}

    def test_returns_indexes_of_rejected_rows(self, make_kind):
        """Law: each slot of an operator has its own answer."""
        operators = without("output1", "input0")
        plan = DumpPlan(
            OutputSettings("/dump"),
            TensorSelection(operators=operators),
            ContentSettings("statistic"),
        )
        kinds = [make_kind(slot=slot) for slot in range(3)]
        kinds += [make_kind(slot=slot, side=TensorSide.INPUT) for slot in range(2)]
        rows = StatisticRows(0, tuple(kinds), (1, 2, 3, 4, 5), ("1",) * 5)
        found = RecordAdmission(plan, 0).check_rows(rows, ROOMY)
        assert found == {"tensor_excluded": [1, 3]}

    def test_frame_without_rows_has_no_reasons(self):
        """A frame without rows has no reasons."""
        plan = DumpPlan(output=OutputSettings(root="/dump"), selection=NONE)
        assert RecordAdmission(plan, 0).check_rows(StatisticRows(0, (), (), ()), ROOMY) == {}


def test_remembered_reasons_equal_computed_ones(make_head):
    """More operators than are remembered: each has its answer, first time and again."""
    plan = DumpPlan(
        output=OutputSettings(root="/dump"),
        selection=TensorSelection(operators=OperatorSelection(False, ("op7",))),
    )
    admission = RecordAdmission(plan, 0)
    for _ in range(2):
        taken = [
            n
            for n in range(20_000)
            if admission.check_record(make_head(op_name=f"op{n}"), ROOMY).accepted
        ]
        assert taken == [7]

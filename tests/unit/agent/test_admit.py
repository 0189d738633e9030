"""The table of admissions."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.key import Side
from rankdump.contract.plan import (
    Content,
    DumpPlan,
    Excluded,
    Iterations,
    Operators,
    Output,
    Selection,
    Watched,
)
from rankdumpd.agent import admit
from rankdumpd.agent.admit import Admission
from rankdumpd.agent.policy import Policy, Room, Space

GIB = 1 << 30
POLICY = Policy(max_record_bytes=1000, keep_free_bytes=1 << 20)


def free(free_bytes: int, *, queued_bytes: int = 0) -> Room:
    """Room on a disk of 1 GiB."""
    return Room(POLICY, Space(free_bytes, GIB), queued_bytes=queued_bytes)


ROOMY = free(GIB)

NOTHING = Operators(False)
WATCHED = Watched(("a",), ("b",))
INPUT_AGAIN = {"op_name": "a_To_b", "side": Side.INPUT}


def without(*positions: str) -> Operators:
    """All operators but those of a type, or but these tensors of them."""
    return Operators(without_types=(Excluded("MatMul", positions),))


NONE = Selection(Iterations("5", ((5, 5),)), inputs=False)


@pytest.mark.parametrize(
    ("selection", "head", "device", "room", "reason"),
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
        (Selection(operators=Operators(False, ranges=(("a", "b"),))), {}, 0, ROOMY, ""),
        (Selection(models=(("Net", NOTHING),)), {}, 0, ROOMY, "operator_excluded"),
        (Selection(models=(("Other", NOTHING),)), {}, 0, ROOMY, ""),
        (Selection(operators=NOTHING, models=(("Net", Operators()),)), {}, 0, ROOMY, ""),
        (Selection(operators=without("output0")), {}, 0, ROOMY, "tensor_excluded"),
        (Selection(operators=without("output0")), {"slot": 1}, 0, ROOMY, ""),
        (Selection(operators=without("output0")), {"side": Side.INPUT}, 0, ROOMY, ""),
        (Selection(operators=without()), {"op_type": "Conv2D"}, 0, ROOMY, ""),
        (Selection(operators=without()), {"slot": 5}, 0, ROOMY, "tensor_excluded"),
        (Selection(watched=WATCHED), {}, 0, ROOMY, "operator_excluded"),
        (Selection(watched=WATCHED), {"op_name": "a_To_b"}, 0, ROOMY, ""),
        (Selection(watched=WATCHED), INPUT_AGAIN, 0, ROOMY, "operator_excluded"),
        (Selection(), {"dtype": "int4"}, 0, ROOMY, "unsupported_dtype"),
        (Selection(), {"byte_count": 1000}, 0, ROOMY, ""),
        (Selection(), {"byte_count": 1001}, 0, ROOMY, "record_too_large"),
        (Selection(), {}, 0, free((1 << 20) + 16), ""),
        (Selection(), {}, 0, free((1 << 20) + 15), "disk_low"),
        (Selection(), {}, 0, free(GIB, queued_bytes=GIB), "disk_low"),
    ],
)
def test_verdicts(make_head, selection, head, device, room, reason):
    """A record is taken exactly when the plan, the policy and the disk all say yes."""
    plan = DumpPlan(output=Output(root="/dump"), selection=selection)
    answer = Admission(plan, device).of_record(make_head(**head), room)
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
def test_elements_in_the_place_of_figures(make_head, saved, head, reason):
    """Where the plan keeps figures alone, elements are not taken."""
    plan = DumpPlan(output=Output(root="/dump"), content=Content(saved=saved))
    assert Admission(plan, 0).of_record(make_head(**head), ROOMY).reason == reason


def test_what_it_remembers_is_bounded_in_bytes(make_head, monkeypatch):
    """Names may be long: a rank that makes up new ones all the time takes no more memory."""
    monkeypatch.setattr(admit, "MOST_REMEMBERED_BYTES", 1 << 20)
    admission = Admission(DumpPlan(output=Output(root="/dump")), 0)
    tracemalloc.start()
    try:
        for number in range(2000):
            assert admission.of_record(make_head(op_name=f"{number:04}" * 1000), ROOMY).accepted
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 << 20


class TestRows:
    """The same questions for every row of a frame."""

    @pytest.mark.parametrize(
        ("selection", "fields", "device", "room", "refused"),
        [
            (Selection(), {}, 0, ROOMY, {}),
            (Selection(devices=(1,)), {}, 0, ROOMY, {"device_excluded": [0, 1]}),
            (NONE, {}, 0, ROOMY, {"iteration_excluded": [0, 1]}),
            (NONE, {"switched_on": True}, 0, ROOMY, {"side_excluded": [1]}),
            (Selection(), {}, 0, free(1 << 20), {}),
            (Selection(), {}, 0, free(1), {"disk_low": [0, 1]}),
        ],
    )
    def test_reasons(self, make_kind, selection, fields, device, room, refused):
        """Each row that is not taken has the reason that a record would have."""
        plan = DumpPlan(Output(root="/dump"), selection, Content("statistic"))
        kinds = (make_kind(), make_kind(side=Side.INPUT))
        rows = FigureRows(0, kinds, (1, 2), ("1", "2"), **fields)
        found = Admission(plan, device).of_rows(rows, room)
        assert {reason: list(places) for reason, places in found.items()} == refused

    @pytest.mark.parametrize("saved", ["statistic", "full", "tensor"])
    def test_figures_need_a_countable_type_and_no_room(self, make_kind, saved):
        """Complex numbers have no figures; how large the tensor was does not matter."""
        plan = DumpPlan(output=Output(root="/dump"), content=Content(saved=saved))
        types = ("float32", "complex64", "int4", "float32")
        kinds = tuple(make_kind(dtype=dtype, byte_count=1 << 20) for dtype in types)
        rows = FigureRows(0, kinds, (1, 2, 3, 4), ("1",) * 4, degraded=saved != "statistic")
        found = Admission(plan, 0).of_rows(rows, ROOMY)
        assert found == {"no_statistics": [1], "unsupported_dtype": [2]}

    @pytest.mark.parametrize(("net_name", "refused"), [("", [0, 3]), ("Mine", [0, 1, 2, 3])])
    def test_a_plan_that_names_all_models_knows_better(self, make_kind, net_name, refused):
        """Law: a row is judged by the name that its folder has."""
        models = tuple((name, NOTHING) for name in ("Net", "Mine", "A"))
        plan = DumpPlan(Output("/dump", net_name=net_name), Selection(models=models))
        kinds = tuple(make_kind(model=model) for model in ("", "B", "C", "A"))
        rows = FigureRows(0, kinds, (1, 2, 3, 4), ("1",) * 4, degraded=True)
        found = Admission(plan, 0).of_rows(rows, ROOMY)
        assert found == {"operator_excluded": refused}

    def test_positions_of_rows(self, make_kind):
        """Law: each slot of an operator has its own answer."""
        operators = without("output1", "input0")
        plan = DumpPlan(Output("/dump"), Selection(operators=operators), Content("statistic"))
        kinds = [make_kind(slot=slot) for slot in range(3)]
        kinds += [make_kind(slot=slot, side=Side.INPUT) for slot in range(2)]
        rows = FigureRows(0, tuple(kinds), (1, 2, 3, 4, 5), ("1",) * 5)
        found = Admission(plan, 0).of_rows(rows, ROOMY)
        assert found == {"tensor_excluded": [1, 3]}

    def test_nothing_of_nothing(self):
        """A frame without rows has no reasons."""
        plan = DumpPlan(output=Output(root="/dump"), selection=NONE)
        assert Admission(plan, 0).of_rows(FigureRows(0, (), (), ()), ROOMY) == {}


def test_answers_that_are_remembered_are_the_same(make_head):
    """More operators than are remembered: each has its answer, first time and again."""
    plan = DumpPlan(
        output=Output(root="/dump"), selection=Selection(operators=Operators(False, ("op7",)))
    )
    admission = Admission(plan, 0)
    for _ in range(2):
        taken = [
            n
            for n in range(20_000)
            if admission.of_record(make_head(op_name=f"op{n}"), ROOMY).accepted
        ]
        assert taken == [7]

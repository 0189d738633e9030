"""What a rank sends of its steps, and what it finds wrong by itself."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from support.black_box_side import BlackBoxSide

from rankdump._core.black_box import DETAIL_ROW, FaultKind, FreezeNotice
from rankdump._core.plan import BlackBoxSettings, OperatorSelection, WatchRule
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.recorder_protocol import LateRow, TurnSpending
from rankdump._frameworks.arrays import ArraySource
from rankdump._kernels.kernel_functions import FoundMoments
from rankdump._recorder.black_box_recorder import (
    PROGRESS_NS,
    UNMATCHED_STEPS,
    format_stacks,
)
from rankdump._wire import black_box_messages

STEP_NS = 100_000_000


def kind_of(name: str) -> TensorKind:
    return TensorKind(0, "Linear", name, TensorSide.OUTPUT, 0, "float32", (2, 3), 24)


def moments(squares: float = 4.0, nan: int = 0, positive: int = 0):
    return (6, 2.0, -1.0, 0.0, squares, nan, positive, 0, 1, 1, 4)


def run_step(side: BlackBoxSide, iteration: int, squares: float = 4.0, **noted: float) -> None:
    side.recorder.begin_step(iteration)
    kind = kind_of("Gradients/weight")
    side.recorder.add_gradient(kind, side.recorder.number_kind(kind), moments(squares))
    if noted:
        side.recorder.note(noted)
    side.now_ns += STEP_NS
    side.recorder.end_step(ran=True)
    side.take()


def test_step_is_sent_with_its_rows_and_cause():
    side = BlackBoxSide()
    side.now_ns = 5_000_000
    side.recorder.begin_step(7)
    number = side.recorder.number_kind(kind_of("a"))
    assert side.recorder.add_pulse(number, moments())
    assert not side.recorder.add_pulse(number, moments(nan=2))
    side.recorder.add_digest("batch.0", "0f")
    side.recorder.note({"loss": 0.5})
    side.recorder.count_skipped(3)
    side.now_ns += STEP_NS
    side.recorder.end_step(ran=True)
    side.take()
    (state,) = side.states
    assert (state.iteration, state.started_us, state.ended_us) == (7, 5_000, 105_000)
    assert (state.skipped, state.unfinished) == (3, False)
    assert (dict(state.cause.numbers), dict(state.cause.digests)) == (
        {"loss": 0.5},
        {"batch.0": "0f"},
    )
    row = side.list_rows(state)["a"]
    assert (row["maximum"], row["minimum"], row["squares"], row["nan"]) == (2.0, -1.0, 4.0, 2)
    assert not side.faults


def test_learning_rates_of_several_optimizers_are_told_apart():
    side = BlackBoxSide()
    critic, generator = object(), object()
    for iteration, optimizers in enumerate([(critic, generator), (generator,)]):
        side.recorder.begin_step(iteration)
        for rate, optimizer in enumerate(optimizers):
            side.recorder.add_rates(optimizer, [float(rate)])
        side.recorder.end_step(ran=True)
    side.take()
    assert [dict(state.cause.numbers) for state in side.states] == [
        {"learning_rate.0": 0.0, "learning_rate.1.0": 1.0},
        {"learning_rate.0": 0.0},
    ]


def test_stacks_are_those_of_the_job_and_the_main_thread_leads():
    """Threads of this library and of its connection say nothing of a rank that hangs."""
    stop, started = threading.Event(), threading.Barrier(4)
    code = "def run():\n    started.wait()\n    stop.wait()\n"
    threads: list[threading.Thread] = []
    for module in ("train", "rankdump._transport.agent_client", "grpc._channel"):
        names: dict[str, Any] = {"__name__": module, "started": started, "stop": stop}
        exec(code, names)
        threads.append(threading.Thread(target=names["run"], name=f"loader of {module}"))
        threads[-1].start()
    started.wait()
    stacks = format_stacks()
    stop.set()
    for each in threads:
        each.join()
    heads = [stack.splitlines()[0] for stack in stacks]
    assert heads[0] == f"thread {threading.get_ident()}, MainThread:"
    assert [head for head in heads if "loader" in head] == [
        f"thread {threads[0].ident}, loader of train:"
    ]
    assert "in run" in stacks[heads.index(f"thread {threads[0].ident}, loader of train:")]


def test_step_in_which_nothing_ran_is_not_sent():
    side = BlackBoxSide()
    side.recorder.begin_step(0)
    side.recorder.end_step(ran=False)
    side.take()
    assert not side.states


def test_long_step_is_sent_while_it_comes_further():
    side = BlackBoxSide()
    side.recorder.begin_step(3)
    number = side.recorder.number_kind(kind_of("a"))

    def report(later_ns: int) -> list[tuple[int, bool]]:
        side.now_ns += later_ns
        side.recorder.report_progress()
        side.take()
        found = [(len(side.list_rows(each)), each.unfinished) for each in side.states]
        side.states.clear()
        return found

    side.recorder.add_pulse(number, moments())
    assert report(PROGRESS_NS - 1) == []
    assert report(1) == [(1, True)]
    assert report(2 * PROGRESS_NS) == []
    side.recorder.count_skipped()
    assert report(0) == [(1, True)]
    side.recorder.add_pulse(number, moments())
    side.recorder.end_step(ran=True)
    side.take()
    assert [(each.iteration, each.unfinished) for each in side.states] == [(3, False)]
    side.states.clear()
    assert report(PROGRESS_NS) == []


def test_waiting_step_is_replaced_by_what_came_of_it():
    side = BlackBoxSide()
    side.recorder.begin_step(0)
    side.recorder.count_skipped()
    side.now_ns += PROGRESS_NS
    side.recorder.report_progress()
    side.recorder.end_step(ran=True)
    side.take()
    assert [each.unfinished for each in side.states] == [False]


def test_new_stream_brings_all_kinds_again():
    side = BlackBoxSide()
    run_step(side, 0)
    side.recorder.begin_step(1)
    side.recorder.add_pulse(side.recorder.number_kind(kind_of("a")), moments())
    side.recorder.end_step(ran=True)
    known, side.kinds = side.kinds, []
    side.take(stream=1)
    assert [each.op_name for each in known] == ["Gradients/weight"]
    assert [each.op_name for each in side.kinds] == ["Gradients/weight", "a"]


def test_outbox_keeps_the_latest_steps():
    side = BlackBoxSide(BlackBoxSettings(2))
    for iteration in range(5):
        side.recorder.begin_step(iteration)
        side.recorder.end_step(ran=True)
    side.take()
    assert [state.iteration for state in side.states] == [3, 4]


def test_kinds_above_the_limit_are_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rankdump._recorder.black_box_recorder.MAX_KINDS", 1)
    side = BlackBoxSide()
    side.recorder.begin_step(0)
    side.recorder.add_pulse(side.recorder.number_kind(kind_of("a")), moments())
    side.recorder.add_pulse(side.recorder.number_kind(kind_of("b")), moments(nan=1))
    side.recorder.end_step(ran=True)
    side.take()
    assert side.states[0].skipped == 1
    assert len(side.kinds) == 1
    assert len(side.warnings) == 1


def test_jump_of_gradients_is_reported_once():
    side = BlackBoxSide()
    for iteration in range(20):
        run_step(side, iteration, squares=4.0 + iteration % 3)
    assert not side.faults
    run_step(side, 20, squares=4e6)
    (fault,) = side.faults
    assert (fault.kind, fault.iteration) == (FaultKind.JUMP, 20)
    assert fault.text == "the norm of the gradients jumped to 2000"
    assert fault.tensor_kind == kind_of("Gradients/weight")


def test_loss_that_jumps_or_is_not_finite_is_reported():
    side = BlackBoxSide()
    for iteration in range(20):
        run_step(side, iteration, loss=1.0 + iteration % 3 / 10)
    run_step(side, 20, loss=99.0)
    assert [fault.text for fault in side.faults] == ["the loss jumped to 99"]
    run_step(side, 21, loss=math.nan)
    assert side.faults[1].kind is FaultKind.NON_FINITE
    assert side.faults[1].text == "loss is nan"


def test_fault_that_goes_on_is_reported_once():
    side = BlackBoxSide()
    for iteration in range(4):
        run_step(side, iteration, loss=math.nan)
    run_step(side, 4, loss=1.0)
    run_step(side, 5, loss=math.nan)
    assert [fault.iteration for fault in side.faults] == [0, 5]


def test_measuring_that_costs_too_much_measures_a_part():
    side = BlackBoxSide(BlackBoxSettings(64, max_overhead=0.01))
    side.recorder.note_tensor_count(500)
    for iteration in range(8):
        side.recorder.begin_step(iteration)
        side.now_ns += STEP_NS
        side.recorder.add_time(STEP_NS // 10)
        side.recorder.end_step(ran=True)
    # 0.1 of the step and 0.15 ms that nothing measures; 0.8 of the allowed share is aimed at.
    assert side.recorder.stride == 15
    # The first steps of a job take more than others: that is no reason for a warning.
    assert not side.warnings
    side.recorder.begin_step(30)
    assert side.recorder.part == 30 % 15


def test_some_tensor_is_measured_in_one_of_four_steps():
    side = BlackBoxSide(BlackBoxSettings(64, max_overhead=0.01))
    side.recorder.note_tensor_count(3)
    for iteration in range(24):
        side.recorder.begin_step(iteration)
        side.now_ns += STEP_NS
        side.recorder.add_time(STEP_NS // 2)
        side.recorder.end_step(ran=True)
    assert side.recorder.stride == 12
    parts = []
    for iteration in range(24, 40):
        side.recorder.begin_step(iteration)
        parts.append(side.recorder.part)
    assert parts == [0, 11, 11, 11, 1, 11, 11, 11, 2, 11, 11, 11, 0, 11, 11, 11]
    (warning,) = side.warnings
    assert "rank 3: the black box takes 100.6% of a step, more than " in warning
    assert "max_overhead = 0.01" in warning


def test_freeze_is_answered_with_the_running_step_and_stacks():
    side = BlackBoxSide()
    side.recorder.answer_freeze(FreezeNotice(1, "frozen"))
    side.recorder.begin_step(5)
    side.recorder.answer_freeze(FreezeNotice(5, "frozen again", wants_stacks=True))
    side.take()
    (state,) = side.states
    assert (state.iteration, state.unfinished) == (5, True)
    assert any("test_freeze_is_answered" in stack for stack in state.stacks)
    assert side.warnings == ["frozen", "frozen again"]


def test_error_that_ends_the_session_is_reported_with_the_running_step():
    side = BlackBoxSide()
    side.recorder.begin_step(2)
    try:
        raise RuntimeError("shape mismatch")
    except RuntimeError:
        side.recorder.close(raised=True)
    side.take()
    assert [(state.iteration, state.unfinished) for state in side.states] == [(2, True)]
    (fault,) = side.faults
    assert fault.kind is FaultKind.EXCEPTION
    assert fault.text == "the job raised RuntimeError: shape mismatch"


def test_session_that_ends_well_reports_nothing():
    side = BlackBoxSide()
    run_step(side, 0)
    side.recorder.close(raised=False)
    side.take()
    assert len(side.states) == 1
    assert not side.faults


def test_forked_child_sends_nothing():
    side = BlackBoxSide()
    run_step(side, 0)
    side.recorder.begin_step(1)
    side.recorder.disarm()
    side.recorder.add_pulse(side.recorder.number_kind(kind_of("new")), moments(nan=1))
    side.recorder.report_fault(FaultKind.NON_FINITE, "the loss is nan")
    side.recorder.end_step(ran=True)
    side.recorder.begin_step(2)
    side.recorder.end_step(ran=True)
    assert not side.outbox.has_waiting
    assert len(side.kinds) == 1


def watching(**rule: Any) -> BlackBoxSide:
    return BlackBoxSide(BlackBoxSettings(64, watch=(WatchRule("zero"), WatchRule(**rule))))


def run_pulses(side: BlackBoxSide, iteration: int, **pulses: FoundMoments) -> None:
    side.recorder.begin_step(iteration)
    for name, found in pulses.items():
        side.recorder.add_pulse(side.recorder.number_kind(kind_of(name)), found, lambda: "a.py:3")
    side.now_ns += STEP_NS
    side.recorder.end_step(ran=True)
    side.take()


def test_rule_that_notes_is_logged_once_and_is_in_each_step():
    side = watching(when="too_large", operators=("layer*",), value=1.5)
    small = (6, 1.0, -1.0, 0.0, 4.0, 0, 0, 0, 1, 1, 4)
    for iteration in range(4):
        run_pulses(side, iteration, layer1=moments() if iteration % 2 else small, other=moments())
    note = (
        "rankdump.blackbox.watch[1] (too_large): its largest magnitude is 2, the limit is 1.5 "
        "(output 0 of layer1)"
    )
    assert [state.notes for state in side.states] == [(), (note,), (), (note,)]
    assert side.warnings == [f"rank 3, iteration 1: {note}"]
    assert side.recorder.list_notes() == [f"iteration 1: {note}"]
    assert not side.faults
    assert not side.recorder.list_unmatched_rules()


def test_rule_that_freezes_reports_its_first_tensor_until_it_has_passed():
    side = watching(when="too_large", operators=("layer*",), value=1.5, do="freeze")
    small = (6, 1.0, -1.0, 0.0, 4.0, 0, 0, 0, 1, 1, 4)
    for iteration, found in enumerate([small, moments(), moments(), small, small, moments()]):
        run_pulses(side, iteration, layer1=found, layer2=found)
    assert [(fault.kind, fault.iteration) for fault in side.faults] == [
        (FaultKind.WATCH, 1),
        (FaultKind.WATCH, 5),
    ]
    fault = side.faults[0]
    assert fault.text.startswith("rankdump.blackbox.watch[1] (too_large): its largest magnitude")
    assert (fault.tensor_kind, fault.source) == (kind_of("layer1"), "a.py:3")
    assert [len(state.notes) for state in side.states] == [0, 2, 0, 0, 0, 2]


def test_rule_that_dumps_takes_the_next_iterations_of_its_operators():
    side = watching(
        when="too_large", operators=("layer*",), value=1.5, do="dump", iterations=3, steps=1
    )
    small = (6, 1.0, -1.0, 0.0, 4.0, 0, 0, 0, 1, 1, 4)
    sizes = [small, moments(), small, moments(), small, moments()]
    for iteration, found in enumerate(sizes):
        run_pulses(side, iteration, layer1=found, layer2=small, other=moments())
    only = OperatorSelection(everything=False, names=("layer1", "layer2"))
    # In iteration 3 those up to 4 are under way.
    assert side.dumps == [(only, 2, 3), (only, 6, 3)]
    assert len(side.warnings) == 1
    assert [len(state.notes) for state in side.states] == [0, 1, 0, 1, 0, 1]


def test_rule_that_cannot_dump_says_why():
    side = watching(when="too_large", value=1.5, do="dump")
    side.refusal = "the agent of this host is of an earlier release"
    run_pulses(side, 0, other=moments())
    assert side.dumps == [(OperatorSelection(), 1, 1)]
    assert side.warnings[0] == (
        "rank 3: rankdump.blackbox.watch[1] (too_large) dumps nothing: "
        "the agent of this host is of an earlier release"
    )


def test_rule_that_matched_nothing_is_named():
    side = watching(when="jump", operators=("layer?", "*Conv"))
    assert not side.recorder.list_unmatched_rules()
    unmatched = (
        "rankdump.blackbox.watch[1] (jump) matched nothing: the black box measured no tensor of "
        "the operators layer?, *Conv"
    )
    for iteration in range(2 * UNMATCHED_STEPS):
        has_run = iteration >= UNMATCHED_STEPS
        assert side.warnings == [f"rank 3, in its first 16 steps: {unmatched}"] * has_run
        run_pulses(side, iteration, other=moments())
    assert side.recorder.list_unmatched_rules() == [unmatched]


def test_rule_judges_what_accelerators_bring_later():
    side = watching(when="too_large", value=1.5, do="freeze")
    number = side.recorder.number_kind(kind_of("a"))
    side.recorder.begin_step(0)
    side.recorder.end_step(ran=True)
    side.take()
    side.recorder.begin_step(1)
    side.recorder.add_late_rows(0, [LateRow(number, moments(), None, "b.py:9")])
    side.take()
    assert [len(state.notes) for state in side.states] == [0, 1]
    (fault,) = side.faults
    assert (fault.iteration, fault.source) == (0, "b.py:9")


def test_fingerprints_take_what_pulses_leave_and_do_not_change_their_part():
    side = BlackBoxSide(BlackBoxSettings(64, max_overhead=0.01))
    side.recorder.note_tensor_count(500)
    number = side.recorder.number_kind(kind_of("a"))
    for iteration in range(9):
        side.recorder.begin_step(iteration)
        afforded = side.recorder.can_afford(TurnSpending(100_000, 1))
        assert afforded is bool(iteration)
        side.recorder.add_pulse(number, moments())
        if afforded:
            side.recorder.add_detail(number, moments(), bytes(264), 100_000, STEP_NS // 200)
            side.recorder.add_time(STEP_NS // 200, 0)
        side.now_ns += STEP_NS
        side.recorder.end_step(ran=True)
    assert side.recorder.stride == 1
    side.take()
    assert [len(state.details) for state in side.states] == [0] + [300] * 8
    assert np.frombuffer(side.states[3].details, DETAIL_ROW)["row"] == 0


def test_detail_of_a_pulse_without_a_row_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rankdump._recorder.black_box_recorder.MAX_STEP_ROWS", 1)
    side = BlackBoxSide()
    side.recorder.begin_step(0)
    for name in ("a", "b"):
        number = side.recorder.number_kind(kind_of(name))
        side.recorder.add_pulse(number, moments())
        side.recorder.add_detail(number, moments(), bytes(264), 24, 100)
    side.recorder.add_detail(-1, moments(), bytes(264), 24, 100)
    side.recorder.end_step(ran=True)
    side.take()
    assert len(side.states[0].details) == DETAIL_ROW.itemsize


def test_rules_of_a_plan_name_operators():
    side = watching(when="jump", operators=("Linear",))
    assert side.recorder.is_watched("Linear", "a")
    assert not side.recorder.is_watched("Conv2d", "a")


def test_limit_of_kinds_is_that_of_the_messages():
    assert black_box_messages.MAX_KINDS == 1 << 16


def keep(side: BlackBoxSide, name: str, array: Any, *, about_fault: bool = False) -> None:
    kind = kind_of(name)._replace(shape=array.shape, byte_count=array.nbytes)
    number = side.recorder.number_kind(kind)
    side.recorder.add_pulse(number, moments())
    if about_fault:
        side.recorder.keep_fault(number, [(kind, ArraySource(array))])
    else:
        side.recorder.keep_tensor(kind, number, ArraySource(array))


def begin_second_step(settings: BlackBoxSettings) -> BlackBoxSide:
    side = BlackBoxSide(settings)
    run_step(side, 0)
    side.recorder.begin_step(1)
    return side


def end_step(side: BlackBoxSide) -> None:
    side.now_ns += STEP_NS
    side.recorder.end_step(ran=True)
    side.take()


def test_tensor_in_full_is_copied_and_follows_its_step():
    side = begin_second_step(BlackBoxSettings(64))
    array = np.arange(6, dtype=np.float32)
    keep(side, "a", array)
    array[:] = 0  # the job goes on with it
    side.take()
    assert not side.tensors
    end_step(side)
    assert side.bodies[-2:] == ["step_states", "step_tensors"]
    (tensor,) = side.tensors
    assert (tensor.iteration, tensor.row, tensor.about_fault) == (1, 0, False)
    assert np.frombuffer(tensor.data, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_in_full_stay_within_time_and_bytes():
    side = begin_second_step(BlackBoxSettings(64, tensor_bytes=9000))
    small, large = np.zeros(6, np.float32), np.zeros(1200, np.float32)
    keep(side, "a", small)
    keep(side, "b", large)  # 4,120 bytes are taken
    keep(side, "c", small)
    end_step(side)
    assert [each.kind.op_name for each in side.tensors] == ["a", "c"]
    assert side.states[-1].left_out == 1
    side.recorder.begin_step(2)
    side.recorder._credit.spend_copy(0, STEP_NS)
    keep(side, "a", small)
    end_step(side)
    assert side.states[-1].left_out == 1
    assert len(side.tensors) == 2


def test_tensors_that_are_not_sent_take_no_more_than_their_bytes():
    side = begin_second_step(BlackBoxSettings(64, tensor_bytes=9000))
    array = np.zeros(6, np.float32)
    for iteration in range(2, 6):
        keep(side, "a", array)
        keep(side, "bad", array, about_fault=True)
        side.now_ns += STEP_NS
        side.recorder.end_step(ran=True)
        side.recorder.begin_step(iteration)
    side.take()
    # Those about a fault have as many bytes again.
    assert [each.about_fault for each in side.tensors] == [True, True, False, False]
    assert [state.left_out for state in side.states if not state.unfinished][1:] == [0, 0, 2, 2]


def test_agent_that_keeps_no_tensors_gets_none():
    side = begin_second_step(BlackBoxSettings(64))
    keep(side, "a", np.zeros(6, np.float32))
    side.recorder.end_step(ran=True)
    side.outbox.set_agent(keeps_steps=True, keeps_tensors=False)
    side.recorder.begin_step(2)
    keep(side, "a", np.zeros(6, np.float32))
    keep(side, "a", np.zeros(6, np.float32), about_fault=True)
    end_step(side)
    assert not side.tensors
    assert not side.recorder.keeps_tensors
    assert [(state.left_out, state.unfinished) for state in side.states] == [(0, False)] * 3


def test_fault_is_new_when_the_step_before_had_none():
    side = BlackBoxSide()
    found: list[bool] = []
    for iteration in (0, 1, 1, 3, 4, 0):
        side.recorder.begin_step(iteration)
        found.append(side.recorder.begin_fault())
        side.recorder.end_step(ran=True)
    assert found == [True, False, False, True, False, True]


def test_error_sends_the_tensors_of_the_running_step():
    side = begin_second_step(BlackBoxSettings(64))
    keep(side, "a", np.zeros(6, np.float32))
    side.recorder.close(raised=True)
    side.take()
    assert len(side.tensors) == 1


def test_copies_do_not_change_the_part_that_is_measured():
    side = BlackBoxSide(BlackBoxSettings(64, max_overhead=0.01))
    side.recorder.note_tensor_count(500)
    for iteration in range(9):
        side.recorder.begin_step(iteration)
        begun_ns = side.now_ns
        side.recorder._clock_ns = iter((begun_ns, begun_ns + STEP_NS // 10)).__next__
        keep(side, "bad", np.zeros(6, np.float32), about_fault=True)
        side.recorder._clock_ns = lambda: side.now_ns
        side.recorder.add_time(STEP_NS // 10)
        side.now_ns += STEP_NS
        side.recorder.end_step(ran=True)
        side.take()
    assert side.recorder.stride == 1


def test_fault_after_the_end_of_its_step_does_not_replace_the_step():
    side = begin_second_step(BlackBoxSettings(64))
    end_step(side)
    keep(side, "bad", np.zeros(6, np.float32), about_fault=True)
    side.take()
    assert not side.tensors
    assert [state.unfinished for state in side.states] == [False, False]

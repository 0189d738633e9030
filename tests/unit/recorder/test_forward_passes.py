"""Micro-batches and phases of observations on their way to kinds, through every trigger."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, introduction_of, rows

from rankdump._core.plan import (
    ContentSettings,
    DumpPlan,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import ForwardPass, TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.pipeline import DumpPipeline
from rankdump._recorder.record_builder import RecordNamer

GOOD, BAD = np.ones(2, "f4"), np.array([1, np.inf], "f4")


def a_plan(*, saved: SavedDataMode = "tensor", **selection) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(**selection),
        content=ContentSettings(saved=saved),
    )


@contextmanager
def started(running: RunningFakeAgent, plan: DumpPlan) -> Generator[DumpPipeline]:
    pipeline = DumpPipeline(plan, introduction_of(plan), running.address)
    pipeline.start()
    yield pipeline
    pipeline.end_iteration(ran=True)
    pipeline.close()


def observation(
    name: str, side: TensorSide, array: np.ndarray, forward_pass: ForwardPass
) -> TensorObservation:
    return TensorObservation(
        0, "Add", name, side, 0, "", ArraySource(array), forward_pass=forward_pass
    )


def offer(
    pipeline: DumpPipeline,
    name: str,
    forward_pass: ForwardPass,
    array: np.ndarray = GOOD,
    *sides: TensorSide,
) -> None:
    """Observe a tensor on each side of an operator, if it is wanted."""
    for side in sides or TensorSide:
        if pipeline.recorder.is_wanted(0, name, side):
            pipeline.recorder.observe(observation(name, side, array, forward_pass))


def found(running: RunningFakeAgent) -> list[tuple[str, str, int | None, str]]:
    return [(r.op_name, r.side.value, r.microbatch, r.phase) for r in bodies(running, "record")]


def test_records_have_the_pass_of_their_observation(running):
    """Law: what the script declares later does not change a tensor that was observed before."""
    with started(running, a_plan()) as pipeline:
        pipeline.set_microbatch(8)
        offer(pipeline, "a", ForwardPass(1))
        offer(pipeline, "a", ForwardPass(0, "eval"))
        offer(pipeline, "a", ForwardPass())
    assert [(number, phase) for _, side, number, phase in found(running) if side == "input"] == [
        (1, ""),
        (0, "eval"),
        (None, ""),
    ]


def test_rows_of_statistics_have_the_pass_of_their_observation(running):
    with started(running, a_plan(saved="statistic")) as pipeline:
        offer(pipeline, "a", ForwardPass(1, "no_grad"), GOOD, TensorSide.INPUT)
        offer(pipeline, "a", ForwardPass(2), GOOD, TensorSide.INPUT)
    assert [(row.microbatch, row.phase) for row in rows(running)] == [(1, "no_grad"), (2, "")]


def test_overflow_trigger_keeps_the_number_of_inputs_that_waited(running):
    with started(running, a_plan(trigger="overflow")) as pipeline:
        offer(pipeline, "a", ForwardPass(1), GOOD, TensorSide.INPUT)
        offer(pipeline, "b", ForwardPass(2), GOOD, TensorSide.INPUT)
        offer(pipeline, "a", ForwardPass(1), BAD, TensorSide.OUTPUT)
        for name in "ab":
            pipeline.recorder.end_call(0, name)
    assert found(running) == [("a", "input", 1, ""), ("a", "output", 1, "")]


def test_exception_trigger_keeps_the_number_of_held_observations(running):
    with started(running, a_plan(trigger="exception")) as pipeline:
        offer(pipeline, "a", ForwardPass(1))
        pipeline.set_microbatch(2)
        offer(pipeline, "b", ForwardPass(2))
        pipeline.recorder.end_call(0, "b")
        pipeline.recorder.end_call(0, "a", raised=True)
    assert found(running) == [("a", "input", 1, "")]


def test_watched_outputs_keep_their_number_when_they_are_read_again(running):
    plan = a_plan(
        watched=WatchedOperators(("layer",), ("a",)),
        operators=OperatorSelection(everything=False),
        inputs=False,
    )
    with started(running, plan) as pipeline:
        offer(pipeline, "a", ForwardPass(1))
        offer(pipeline, "layer", ForwardPass(2))
        pipeline.recorder.end_call(0, "layer")
    assert {number for _, _, number, _ in found(running)} == {1}
    assert len(found(running)) == 2


@pytest.mark.parametrize("other", [ForwardPass(1), ForwardPass(None, "eval")])
def test_kinds_of_two_passes_differ_and_are_remembered(other):
    """Law: alternating passes find the same two objects, so their bytes are made once."""
    namer = RecordNamer(rank=0, net_name="Net", clock_us=lambda: 1)
    seen = [observation("a", TensorSide.INPUT, GOOD, each) for each in (ForwardPass(), other) * 2]
    kinds = [namer.find_kind(each, each.tensor) for each in seen]
    assert kinds[0] is kinds[2]
    assert kinds[1] is kinds[3]
    assert kinds[0]._replace(microbatch=other.microbatch, phase=other.phase) == kinds[1]


def test_iteration_that_begins_has_no_declared_microbatch(running):
    with started(running, a_plan()) as pipeline:
        pipeline.set_microbatch(3)
        assert pipeline.recorder.declared_pass == ForwardPass(3)
        pipeline.begin_iteration(1)
        assert pipeline.recorder.declared_pass == ForwardPass()

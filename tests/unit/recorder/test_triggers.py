"""The triggers for overflows and exceptions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.agent_double import Running, bodies, event_names, introduction_of, kinds, rows

import rankdump
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    StatisticPrecision,
    TensorExclusion,
    TensorSelection,
    TriggerMode,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import DeferredStatistics, TensorObservation
from rankdump._core.session_protocol import SessionRequest
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.pipeline import DumpPipeline

GOOD, BAD = np.ones(4, "f4"), np.array([1, np.inf], "f4")


def a_plan(
    trigger: TriggerMode,
    *,
    saved: SavedDataMode = "tensor",
    buffer_bytes: int = 1 << 20,
    **selection,
) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(trigger=trigger, **selection),
        content=ContentSettings(saved=saved, kernel_arguments=True),
        delivery=DeliverySettings(buffer_bytes=buffer_bytes, block_timeout_s=600),
    )


def request() -> SessionRequest:
    return introduction_of(a_plan("always"))


def found(running: Running) -> list[tuple[str, str, int]]:
    return [(r.op_name, r.side.value, r.slot) for r in bodies(running, "record")]


def run(session: rankdump.Session, name: str, *outputs: np.ndarray) -> None:
    """Dump one operator with an input and these outputs."""
    session.dump("Add", name, "input", 0, GOOD)
    for slot, output in enumerate(outputs):
        session.dump("Add", name, "output", slot, output)


class FakeTensor(ArraySource):
    """An array that may have changed, or fail to be read."""

    is_changed = False
    fails = ""

    def has_changed(self) -> bool:
        return self.is_changed

    def is_finite(self) -> bool:
        if self.fails == "finite":
            raise RuntimeError("no answer")
        return super().is_finite()

    def accelerator(self):
        return None

    def copy_into(self, target: memoryview) -> None:
        if self.fails == "copy":
            raise RuntimeError("no data")
        super().copy_into(target)


def seen(
    name: str, side: TensorSide, tensor: ArraySource, slot: int = 0, **fields
) -> TensorObservation:
    return TensorObservation(
        0, fields.pop("op_type", "Add"), name, side, slot, "", tensor, **fields
    )


# -- overflow


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_overflow_trigger_keeps_only_the_operator_that_overflowed(running, bad, place):
    """Law: whichever output is not finite, all of the operator's tensors are kept, in order."""
    outputs = [GOOD, GOOD]
    outputs[place] = np.array([bad], "f8")
    with rankdump.Session(a_plan("overflow"), agent=running.address) as session:
        run(session, "before", GOOD)
        run(session, "it", *outputs)
        run(session, "after", GOOD)
    assert found(running) == [("it", "input", 0), ("it", "output", 0), ("it", "output", 1)]
    stamps = [r.timestamp_us for r in bodies(running, "record")]
    assert stamps == sorted(stamps)
    (end,) = bodies(running, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (3, {})
    assert event_names(running) == ["before", "it", "after"]


def test_overflow_trigger_keeps_inputs_from_before_a_write_in_place(running):
    array = np.array([3, 4], "f4")
    with rankdump.Session(a_plan("overflow"), agent=running.address) as session:
        session.dump("Div", "it", "input", 0, array)
        array[:] = np.inf
        session.dump("Div", "it", "output", 0, array)
    before, after = bodies(running, "record")
    assert np.frombuffer(before.data, "f4").tolist() == [3, 4]
    assert np.frombuffer(after.data, "f4").tolist() == [np.inf, np.inf]


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, ["a", "b", "c"]), (1, ["a"]), (2, ["a", "b"]), (9, ["a", "b", "c"])]
)
def test_overflow_trigger_stops_at_its_limit(running, limit, kept):
    plan = a_plan("overflow", overflow_limit=limit)
    with rankdump.Session(plan, agent=running.address) as session:
        for i, name in enumerate("abc"):
            session.step(i // 2)
            run(session, name, BAD, BAD)
    assert [name for name, side, _ in found(running) if side == "input"] == kept
    assert len(found(running)) == 3 * len(kept)
    ends = [end.iteration for end in bodies(running, "iteration_end")]
    assert ends == ([0] if limit in (1, 2) else [0, 1])
    notes = list(bodies(running, "session_end")[0].notes)
    assert bool(notes) is (limit in (1, 2))


@pytest.mark.parametrize(
    ("sides", "kept"),
    [
        ({"outputs": False}, [("it", "input", 0)]),
        ({"inputs": False}, [("it", "output", 0)]),
    ],
)
def test_overflow_trigger_checks_outputs_that_are_not_kept(running, sides, kept):
    with rankdump.Session(a_plan("overflow", **sides), agent=running.address) as session:
        run(session, "it", BAD)
        run(session, "good", GOOD)
    assert found(running) == kept


def test_overflow_trigger_without_overflow_leaves_a_note(running, caplog):
    """Law: without an overflow the iteration is complete, and there is no warning."""
    caplog.set_level(logging.INFO, "rankdump")
    with rankdump.Session(a_plan("overflow"), agent=running.address) as session:
        run(session, "good", GOOD)
    assert [end.expected for end in bodies(running, "iteration_end")] == [0]
    (note,) = bodies(running, "session_end")[0].notes
    assert "no overflow" in note
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert note in caplog.text


def test_overflow_trigger_releases_space_of_operators_without_overflow(running):
    """Law: any number of finite operators fits into a buffer that holds one of them."""
    plan = a_plan("overflow", buffer_bytes=4096)
    with rankdump.Session(plan, agent=running.address) as session:
        for number in range(100):
            run(session, f"op{number}", np.ones(100))
        run(session, "it", np.full(100, np.inf))
    assert found(running) == [("it", "input", 0), ("it", "output", 0)]
    assert dict(bodies(running, "iteration_end")[0].dropped) == {}


@pytest.mark.parametrize(("output", "dropped"), [(BAD, {"buffer_full": 7}), (GOOD, {})])
def test_overflow_trigger_counts_a_loss_only_if_the_operator_overflowed(running, output, dropped):
    """Law: no thread waits for space that only the end of its own operator can release."""
    plan = a_plan("overflow", buffer_bytes=4096)
    with rankdump.Session(plan, agent=running.address) as session:
        for slot in range(8):
            session.dump("Add", "it", "input", slot, np.ones(300))
        session.dump("Add", "it", "output", 0, output)
    (end,) = bodies(running, "iteration_end")
    kept = len(bodies(running, "record"))
    assert (end.expected - kept, dict(end.dropped)) == (sum(dropped.values()), dropped)


def test_overflow_trigger_keeps_statistics(running):
    plan = a_plan("overflow", saved="statistic")
    with rankdump.Session(plan, agent=running.address) as session:
        run(session, "good", GOOD)
        run(session, "it", BAD)
    assert [row.figures for row in rows(running)] == [("1", "1", "2"), ("inf", "1", "inf")]
    (end,) = bodies(running, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (2, {})


class FakeDeviceStatistics:
    """Statistics on a device."""

    read_back: list[str]

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        names = [each.name for each in others if isinstance(each, FakeDeviceStatistics)]
        FakeDeviceStatistics.read_back += names
        return [(name,) for name in names]


class DeviceSource(ArraySource):
    def __init__(self, name: str, values: np.ndarray) -> None:
        super().__init__(values)
        self.name = name

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> FakeDeviceStatistics:
        return FakeDeviceStatistics(self.name)


def test_overflow_trigger_reads_back_only_statistics_of_an_overflow(running):
    FakeDeviceStatistics.read_back = []
    plan = a_plan("overflow")
    content = ContentSettings(saved="statistic", statistics=("max",), on_device=True)
    pipeline = DumpPipeline(replace(plan, content=content), request(), running.address)
    pipeline.start()
    for name, output in [("good", GOOD), ("it", BAD), ("after", GOOD)]:
        pipeline.recorder.observe(seen(name, TensorSide.INPUT, DeviceSource(f"{name} in", GOOD)))
        pipeline.recorder.observe(
            seen(name, TensorSide.OUTPUT, DeviceSource(f"{name} out", output))
        )
        pipeline.recorder.end_call(0, name)
    assert FakeDeviceStatistics.read_back == []
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert FakeDeviceStatistics.read_back == ["it in", "it out"]
    assert [row.figures for row in rows(running)] == [("it in",), ("it out",)]


def test_parameters_and_constants_are_kept_only_with_trigger_always(running):
    with rankdump.Session(a_plan("overflow"), agent=running.address) as session:
        session.dump("Parameter", "conv1.weight", "output", 0, BAD)
        session.constant("data-1", BAD)
    assert found(running) == []


@pytest.mark.parametrize("profile", ["ms2.3", "ms2.0"])
def test_gradient_of_a_parameter_counts_as_output_of_an_operator(running, profile):
    """Law: an overflow that shows in the gradient of a weight alone is found, whatever its name."""
    plan = replace(a_plan("overflow"), output=OutputSettings("/x", profile=profile))
    with rankdump.Session(plan, agent=running.address) as session:
        session.dump("Parameter", "Gradients/good.weight", "output", 0, GOOD)
        session.dump("Parameter", "Gradients/conv1.weight", "output", 0, BAD)
    names = {"ms2.3": "Gradients/conv1.weight", "ms2.0": "grad.conv1.weight"}
    assert found(running) == [(names[profile], "output", 0)]


def test_arguments_are_kept_with_their_operator(running):
    pipeline = DumpPipeline(a_plan("overflow"), request(), running.address)
    pipeline.start()
    for name, output in [("good", GOOD), ("it", BAD)]:
        pipeline.recorder.record_arguments(0, "Add", name, {"alpha": "1"})
        pipeline.recorder.observe(seen(name, TensorSide.OUTPUT, ArraySource(output)))
        pipeline.recorder.end_call(0, name)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    sent = [o.op_name for a in bodies(running, "kernel_arguments") for o in a.operators]
    assert sent == ["it"]


def test_overflow_trigger_warns_about_a_tensor_that_it_cannot_check(running, caplog):
    pipeline = DumpPipeline(a_plan("overflow"), request(), running.address)
    pipeline.start()
    tensor = FakeTensor(BAD)
    tensor.fails = "finite"
    pipeline.recorder.observe(seen("it", TensorSide.OUTPUT, tensor))
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert "it could not be checked" in caplog.text


def test_operators_that_never_end_are_released_with_their_iteration(running):
    pipeline = DumpPipeline(a_plan("overflow"), request(), running.address)
    pipeline.start()
    pipeline.recorder.observe(seen("x", TensorSide.INPUT, ArraySource(GOOD)))
    pipeline.recorder.count_loss(0, "Add", "x", TensorSide.INPUT, 0, "unsupported_sparse")
    pipeline.end_iteration(ran=True)
    pipeline.begin_iteration(1)
    pipeline.recorder.observe(seen("x", TensorSide.OUTPUT, ArraySource(BAD)))
    pipeline.recorder.count_loss(0, "Add", "x", TensorSide.OUTPUT, 0, "unsupported_sparse")
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert found(running) == [("x", "output", 0)]
    first, second = bodies(running, "iteration_end")
    assert (first.expected, dict(first.dropped)) == (0, {})
    assert (second.expected, dict(second.dropped)) == (2, {"unsupported_sparse": 1})


# -- exception


def test_exception_trigger_keeps_inputs_of_the_operator_that_raised(running):
    """Law: only inputs of the operator that was dumped last before the error are kept."""

    def job() -> None:
        with rankdump.Session(a_plan("exception"), agent=running.address) as session:
            for i in range(3):
                session.step(i)
                run(session, f"good{i}", BAD)
            session.dump("Div", "it", "input", 0, GOOD)
            session.dump("Div", "it", "input", 1, BAD)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert found(running) == [("it", "input", 0), ("it", "input", 1)]
    assert {r.iteration for r in bodies(running, "record")} == {2}
    assert bodies(running, "iteration_end") == []
    assert event_names(running) == []


def test_exception_trigger_keeps_inputs_if_the_session_closes_during_an_error(running):
    """`close` in a `finally` keeps the operator that raised, as leaving a `with` does."""
    session = rankdump.Session(a_plan("exception"), agent=running.address)

    def job() -> None:
        try:
            session.dump("Div", "it", "input", 0, GOOD)
            raise ZeroDivisionError
        finally:
            session.close()

    with pytest.raises(ZeroDivisionError):
        job()
    assert found(running) == [("it", "input", 0)]


def test_exception_trigger_sends_nothing_without_an_exception(running, caplog):
    """Law: there is no record, no event, no end of an iteration, and no warning."""
    with rankdump.Session(a_plan("exception"), agent=running.address) as session:
        for i in range(3):
            session.step(i)
            run(session, "good", BAD)
    assert kinds(running) == ["session_end"]
    goodbye = bodies(running, "session_end")[0]
    assert goodbye.iterations_seen == 3
    assert [note.partition(";")[0] for note in goodbye.notes] == [
        "no operator was observed to raise"
    ]
    assert caplog.records == []


def test_exception_trigger_sends_only_the_iteration_of_an_exception_that_the_job_survives(running):
    pipeline = DumpPipeline(a_plan("exception"), request(), running.address)
    pipeline.start()
    recorder = pipeline.recorder
    for iteration in range(3):
        pipeline.begin_iteration(iteration)
        recorder.observe(seen("x", TensorSide.INPUT, ArraySource(GOOD)))
        recorder.finish_event(recorder.start_event(graph=0, name="x"))
        recorder.end_call(0, "x", raised=iteration == 1)
        recorder.end_call(0, "x")
        pipeline.end_iteration(ran=True)
    pipeline.close()
    assert [(r.op_name, r.iteration) for r in bodies(running, "record")] == [("x", 1)]
    assert [(e.iteration, e.expected) for e in bodies(running, "iteration_end")] == [(1, 1)]
    assert bodies(running, "events") == []  # one rank's alone would look like a hang of the rest


@pytest.mark.parametrize("reason", ["changed_in_place", "copy_failed", "unsupported_sparse", ""])
def test_exception_trigger_counts_unreadable_inputs(running, reason):
    pipeline = DumpPipeline(a_plan("exception"), request(), running.address)
    pipeline.start()
    tensor = FakeTensor(GOOD)
    pipeline.recorder.observe(seen("it", TensorSide.INPUT, tensor))
    tensor.is_changed = reason == "changed_in_place"
    tensor.fails = "copy" if reason == "copy_failed" else ""
    if reason == "unsupported_sparse":
        pipeline.recorder.count_loss(0, "Add", "it", TensorSide.INPUT, 0, reason)
    pipeline.recorder.end_call(0, "it", raised=True)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    (end,) = bodies(running, "iteration_end")
    assert dict(end.dropped) == ({reason: 1} if reason else {})
    assert end.expected - sum(end.dropped.values()) == len(bodies(running, "record"))


def test_exception_trigger_wants_no_outputs(running):
    pipeline = DumpPipeline(a_plan("exception"), request(), running.address)
    pipeline.start()
    assert pipeline.recorder.is_wanted(0, "x", TensorSide.INPUT)
    assert not pipeline.recorder.is_wanted(0, "x", TensorSide.OUTPUT)
    pipeline.close()


@pytest.mark.parametrize("trigger", ["overflow", "exception"])
def test_triggers_separate_operators_of_two_models_with_one_name(running, trigger: TriggerMode):
    """Law: both operators are decided separately, even while both are open."""
    pipeline = DumpPipeline(a_plan(trigger), request(), running.address)
    pipeline.start()
    recorder = pipeline.recorder
    for graph in (0, 1):
        observation = seen("it", TensorSide.INPUT, FakeTensor(GOOD))
        recorder.observe(observation._replace(graph=graph))
    for graph, result in ((0, GOOD), (1, BAD)):
        observation = seen("it", TensorSide.OUTPUT, FakeTensor(result))
        recorder.observe(observation._replace(graph=graph))
    for graph in (0, 1):
        recorder.end_call(graph, "it", raised=graph == 1)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert {r.graph for r in bodies(running, "record")} == {1}
    assert found(running)[0] == ("it", "input", 0)


def test_overflow_trigger_checks_excluded_tensors(running):
    """Law: an output that is not kept still shows that its operator overflowed."""
    left = OperatorSelection(without_names=(TensorExclusion("it", ("output0",)),))
    with rankdump.Session(a_plan("overflow", operators=left), agent=running.address) as session:
        run(session, "it", BAD, GOOD)
        run(session, "good", GOOD)
    assert found(running) == [("it", "input", 0), ("it", "output", 1)]
    (end,) = bodies(running, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (2, {})


def test_exception_trigger_counts_freed_inputs_as_lost(running):
    """Law: tensors kept by reference are checked again before they are read."""
    pipeline = DumpPipeline(a_plan("exception"), request(), running.address)
    pipeline.start()
    tensor = FakeTensor(GOOD)
    tensor.read_again = lambda: "storage_freed"
    pipeline.recorder.observe(seen("it", TensorSide.INPUT, tensor))
    pipeline.recorder.end_call(0, "it", raised=True)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    (end,) = bodies(running, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (1, {"storage_freed": 1})

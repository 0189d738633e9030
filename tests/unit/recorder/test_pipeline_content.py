"""Content that a pipeline sends: statistics, samples, constants, arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, introduction_of, kinds, rows

import rankdump
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    StatisticPrecision,
    TensorSelection,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import DeferredStatistics, TensorObservation
from rankdump._core.session_protocol import SessionRequest
from rankdump._frameworks.arrays import ArraySource
from rankdump._kernels.kernel_functions import load_kernels
from rankdump._layout.statistic_tables import FIXED_TABLE_STATISTICS
from rankdump._recorder import pipeline as pipeline_module
from rankdump._recorder.pipeline import DumpPipeline

INPUT = np.arange(1, 7, dtype="f4").reshape(2, 3)


def a_plan(profile: str = "ms2.3", selection: TensorSelection | None = None, **content) -> DumpPlan:
    return DumpPlan(
        output=OutputSettings("/x", profile=profile),
        selection=selection or TensorSelection(),
        content=ContentSettings(**content),
    )


def started(running: RunningFakeAgent, a_plan: DumpPlan) -> rankdump.Session:
    return rankdump.Session(a_plan, agent=running.address)


def request() -> SessionRequest:
    return introduction_of(a_plan())


@pytest.mark.parametrize(
    ("array", "sample", "statistics", "size"),
    [
        (INPUT, 0, ("6", "1", "9.53939"), 24),
        (INPUT, 6, ("6", "1", "9.53939"), 24),
        (INPUT, 4, ("4", "1", "5.47723"), 16),
        (np.array([np.nan, 1], "f2"), 0, ("nan", "nan", "nan"), 4),
        (np.array(True), 0, ("1", "1", "1"), 1),
    ],
)
def test_statistic_mode_sends_no_elements(running, array, sample, statistics, size):
    """Law: a row has the statistics and the size of the tensor, and no bytes of it."""
    with started(running, a_plan(saved="statistic", sample_elements=sample)) as session:
        session.dump("Add", "a", "input", 0, array)
    (row,) = rows(running)
    assert row.figures == statistics
    assert (row.byte_count, row.degraded) == (size, "")
    assert not {"record", "chunk"} & set(kinds(running))
    assert bodies(running, "iteration_end")[0].expected == 1


@pytest.mark.parametrize("saved", ["tensor", "full"])
def test_other_modes_send_elements(running, saved):
    with started(running, a_plan(saved=saved)) as session:
        session.dump("Add", "a", "input", 0, INPUT)
    (record,) = bodies(running, "record")
    assert rows(running) == []
    assert record.data == INPUT.tobytes()


@pytest.mark.parametrize(
    ("saved", "lost"), [("statistic", True), ("tensor", False), ("full", False)]
)
def test_complex_tensors_have_files_and_no_statistics(running, saved, lost):
    with started(running, a_plan(saved=saved)) as session:
        session.dump("Add", "a", "input", 0, np.ones(2, "c8"))
    assert rows(running) == []
    assert len(bodies(running, "record")) == (not lost)
    (end,) = bodies(running, "iteration_end")
    assert dict(end.dropped) == ({"no_statistics": 1} if lost else {})


def test_statistics_of_an_old_profile_have_its_columns(running):
    plan = a_plan("ms2.0", saved="statistic", statistics=("md5",))
    with started(running, plan) as session:
        session.dump("Add", "a", "input", 0, INPUT)
    assert len(rows(running)[0].figures) == len(FIXED_TABLE_STATISTICS)


@pytest.mark.parametrize(
    ("shape", "sample", "kept"),
    [((5, 5), 20, (20,)), ((4, 5), 20, (5, 4)), ((5, 5), 0, (5, 5)), ((), 1, ()), ((0,), 1, None)],
)
def test_sample_has_the_first_elements(running, shape, sample, kept):
    """Law: a tensor larger than the sample is cut to its first elements, in one dimension."""
    array = np.arange(np.prod(shape, dtype=int), dtype="i4").reshape(shape)
    with started(running, a_plan(sample_elements=sample)) as session:
        session.dump("Add", "a", "output", 0, array.T)
    records = bodies(running, "record")
    assert [tuple(record.shape) for record in records] == ([kept] if kept is not None else [])
    for record in records:
        count = record.byte_count // 4
        assert np.frombuffer(record.data, "<i4").tolist() == array.T.ravel()[:count].tolist()


class FakeDeviceStatistics:
    """Statistics on a device that counts its reads."""

    reads = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        type(self).reads += 1
        return [(each.name,) for each in others if isinstance(each, FakeDeviceStatistics)]


class DeviceSource(ArraySource):
    def __init__(self, name: str) -> None:
        super().__init__(np.ones(1))
        self.name = name

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> FakeDeviceStatistics:
        return FakeDeviceStatistics(self.name)


def test_device_statistics_are_read_back_once_per_step_in_order(running, monkeypatch):
    """Law: no row is sent before the end of the iteration, not even one computed on the host."""
    monkeypatch.setattr(FakeDeviceStatistics, "reads", 0)
    plan = a_plan(saved="statistic", on_device=True, statistics=("max",))
    pipeline = DumpPipeline(plan, request(), running.address)
    pipeline.start()
    recorder = pipeline.recorder
    for name in "abcd":
        source = ArraySource(np.array([7.0])) if name == "b" else DeviceSource(name)
        recorder.observe(TensorObservation(0, "Add", name, TensorSide.OUTPUT, 0, "", source))
    assert rows(running) == []
    assert FakeDeviceStatistics.reads == 0
    pipeline.end_iteration(ran=True)
    assert FakeDeviceStatistics.reads == 1
    recorder.observe(TensorObservation(0, "Add", "e", TensorSide.OUTPUT, 0, "", DeviceSource("e")))
    pipeline.close()
    found = [(row.op_name, *row.figures) for row in rows(running)]
    assert found == [("a", "a"), ("b", "7"), ("c", "c"), ("d", "d"), ("e", "e")]
    stamps = [row.timestamp_us for row in rows(running)]
    assert stamps == sorted(stamps)


def test_host_statistics_wait_for_the_end_of_a_step_that_fits_the_buffer(running):
    """Law: a buffer that holds two rows loses none of a step with more of them."""
    names = "abcdefg"
    for buffer_bytes, before_the_end in [(1, 7), (1024, 4), (1 << 20, 0)]:
        plan = a_plan(saved="statistic", statistics=("max",))
        plan = replace(plan, delivery=DeliverySettings(buffer_bytes=buffer_bytes))
        running.agent.frames.clear()
        pipeline = DumpPipeline(plan, request(), running.address)
        pipeline.start()
        for number, name in enumerate(names):
            array = np.array([number, 1], "f4")
            seen = TensorObservation(0, "Add", name, TensorSide.OUTPUT, 0, "", ArraySource(array))
            pipeline.recorder.observe(seen)
        assert len(rows(running)) <= before_the_end
        pipeline.end_iteration(ran=True)
        pipeline.close()
        found = [(row.op_name, *row.figures) for row in rows(running)]
        assert found == [(name, str(max(at, 1))) for at, name in enumerate(names)]
        (end,) = bodies(running, "iteration_end")
        assert (end.expected, dict(end.dropped)) == (7, {})


def test_statistics_that_cannot_be_read_back_are_counted_as_lost(running, monkeypatch, caplog):
    monkeypatch.setattr(FakeDeviceStatistics, "read", lambda self, others: 1 / 0)
    plan = a_plan(saved="statistic", on_device=True, statistics=("max",))
    pipeline = DumpPipeline(plan, request(), running.address)
    pipeline.start()
    one = TensorObservation(0, "Add", "a", TensorSide.OUTPUT, 0, "", DeviceSource("a"))
    pipeline.recorder.observe(one)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    (end,) = bodies(running, "iteration_end")
    assert (end.expected, dict(end.dropped)) == (1, {"figures_failed": 1})
    assert "figures_failed" in caplog.text


def test_constant_is_sent_once_in_the_first_dumped_iteration(running):
    plan = a_plan(selection=TensorSelection(iterations=IterationSelection("1-2", ((1, 2),))))
    with started(running, plan) as session:
        session.constant("data-1", np.ones(2))
        for i in range(3):
            session.step(i)
            session.constant("data-2", np.ones(1), graph=i % 2)
            session.dump("Add", "a", "input", 0, np.ones(1))
    found = [(r.op_name, r.graph, r.iteration) for r in bodies(running, "record") if r.constant]
    assert found == [("data-1", 0, 1), ("data-2", 0, 1), ("data-2", 1, 1)]
    assert {r.op_type for r in bodies(running, "record") if r.constant} == {"Parameter"}
    assert [e.expected for e in bodies(running, "iteration_end")] == [4, 1]


def test_arguments_of_selected_operators_are_sent_with_their_iteration(running):
    selection = TensorSelection(
        iterations=IterationSelection("1", ((1, 1),)),
        operators=OperatorSelection(everything=False, types=("conv",)),
    )
    plan = a_plan(selection=selection, kernel_arguments=True)
    pipeline = DumpPipeline(plan, request(), running.address)
    pipeline.start()
    for iteration in range(3):
        pipeline.begin_iteration(iteration)
        assert pipeline.recorder.wants_arguments is (iteration == 1)
        for name in ("x/Conv2d-op0", "x/ReLU-op0"):
            pipeline.recorder.record_arguments(0, "Conv2d", name, {"stride": "(1, 1)"})
        pipeline.end_iteration(ran=True)
    pipeline.close()
    (sent,) = bodies(running, "kernel_arguments")
    assert sent.iteration == 1
    (operator,) = sent.operators
    assert (operator.op_name, dict(operator.values)) == ("x/Conv2d-op0", {"stride": "(1, 1)"})
    order = kinds(running)
    assert order.index("kernel_arguments") < order.index("iteration_end")


def test_arguments_are_not_wanted_without_the_setting(running):
    plan = replace(a_plan(), content=ContentSettings(kernel_arguments=False))
    pipeline = DumpPipeline(plan, request(), running.address)
    pipeline.start()
    assert not pipeline.recorder.wants_arguments
    pipeline.recorder.record_arguments(0, "Conv2d", "x", {"a": "1"})
    pipeline.close()
    assert bodies(running, "kernel_arguments") == []


@pytest.mark.parametrize("saved", ["statistic", "tensor"])
def test_slow_kernels_are_logged_where_a_rank_needs_them(running, saved, monkeypatch, caplog):
    """A rank that computes no statistics has nothing to say about their speed."""
    monkeypatch.setattr(pipeline_module, "KERNELS", load_kernels("numpy"))
    with started(running, a_plan(saved=saved)) as session:
        session.dump("Add", "a", "input", 0, INPUT)
        session.step(1)
    found = [line.message for line in caplog.records if "kernels" in line.message]
    reason = "RANKDUMP_KERNELS is 'numpy'"
    expected = (
        f"rankdump: statistics and conversions are computed by numpy, {reason}: they take several "
        "times as long as with compiled kernels"
    )
    assert found == ([expected] if saved == "statistic" else [])

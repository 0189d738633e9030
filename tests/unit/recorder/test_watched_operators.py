"""The trigger for watched operators."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.agent_double import Running, bodies, introduction_of, rows

import rankdump
from rankdump._core.plan import (
    ContentSettings,
    DeliverySettings,
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    SavedDataMode,
    TensorExclusion,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._frameworks.arrays import ArraySource
from rankdump._recorder.pipeline import DumpPipeline

ONE = np.ones(1, "f4")


def a_plan(
    layers: tuple[str, ...] = ("a",),
    nodes: tuple[str, ...] = ("c",),
    *,
    saved: SavedDataMode = "tensor",
    **selection,
) -> DumpPlan:
    chosen: dict[str, Any] = {
        "operators": OperatorSelection(everything=False),
        "inputs": False,
    } | selection
    return DumpPlan(
        output=OutputSettings("/x"),
        selection=TensorSelection(watched=WatchedOperators(layers, nodes), **chosen),
        content=ContentSettings(saved=saved),
        delivery=DeliverySettings(buffer_bytes=1 << 20),
        dialect="acl",
    )


def started(running: Running, *lists: tuple[str, ...], **settings) -> rankdump.Session:
    return rankdump.Session(a_plan(*lists, **settings), agent=running.address)


def out(session: rankdump.Session, name: str, array: np.ndarray, slot: int = 0, **place) -> None:
    session.dump("Add", name, "output", slot, array, **place)


def found(running: Running) -> list[tuple[str, int, list[float]]]:
    return [
        (r.op_name, r.slot, np.frombuffer(r.data, "f4").tolist()) for r in bodies(running, "record")
    ]


def again(running: Running) -> list[str]:
    return [name for name, *_ in found(running) if "_To_" in name]


def balance(running: Running) -> tuple[int, dict[str, int]]:
    (end,) = bodies(running, "iteration_end")
    return end.expected, dict(end.dropped)


def test_watched_output_is_recorded_again_after_an_overwrite(running):
    """Law: outputs are kept when they are written and after the layer has ended, nothing else."""
    mine = np.array([1, 2], "f4")
    with started(running) as session:
        session.dump("Add", "c", "input", 0, ONE)
        out(session, "c", mine)
        out(session, "b", ONE)
        session.dump("Mul", "a", "input", 0, ONE)
        mine[1] = 9
        out(session, "a", ONE)
        out(session, "d", ONE)
        mine[:] = 0
    assert found(running) == [("c", 0, [1, 2]), ("a_To_c", 0, [1, 9])]
    records = bodies(running, "record")
    assert {(record.op_type, record.side) for record in records} == {("Add", TensorSide.OUTPUT)}
    assert balance(running) == (2, {})


def test_watched_outputs_are_recorded_after_every_layer(running):
    """Law: each end of a layer records all slots of watched operators that have run so far.

    A layer that is itself watched is not read again after itself.
    """
    with started(running, ("a", "c"), ("c", "e")) as session:
        out(session, "a", ONE)
        for slot in (0, 1):
            out(session, "c", ONE * slot, slot)
        out(session, "e", ONE * 5)
        out(session, "a", ONE)
    names = [(name, slot) for name, slot, _ in found(running)]
    own = [("c", 0), ("c", 1), ("e", 0)]
    assert names == [*own, ("a_To_c", 0), ("a_To_c", 1), ("a_To_e", 0)]
    assert balance(running) == (6, {})


def test_every_operator_is_a_layer_without_a_list_of_layers(running):
    """Law: outputs are recorded after each operator of any type, except the watched one itself."""
    with started(running, (), ("c", "e")) as session:
        for name in "acbe":
            out(session, name, ONE)
        session.dump("Mul", "d", "input", 0, ONE)
    names = ["c", "b_To_c", "e", "e_To_c", "d_To_c", "d_To_e"]
    assert [name for name, *_ in found(running)] == names
    assert balance(running) == (6, {})


def test_watched_operator_that_is_a_layer_is_not_recorded_again(running):
    with started(running, ("c",), ("c",)) as session:
        for name in "acb":
            out(session, name, ONE)
    assert [name for name, *_ in found(running)] == ["c"]


def test_watched_names_match_any_spelling(running):
    name = "Default/network-Net/{0}-Relu/Relu-op0"
    with started(running, ("act",), (name.format("fc").replace("/", "_"),)) as session:
        out(session, name.format("fc"), ONE)
        out(session, name.format("act"), ONE)
    assert again(running) == [f"{name.format('act')}_To_{name.format('fc')}"]


@pytest.mark.parametrize("at", ["step", "stop"])
def test_watched_outputs_are_released_with_the_iteration_or_session(running, at):
    with started(running) as session:
        out(session, "c", ONE)
        if at == "step":
            session.step()
        else:
            session.dump_stop()
            session.dump_start()
        out(session, "a", ONE)
    assert again(running) == []


def test_watched_operators_of_models_are_independent(running):
    with started(running) as session:
        out(session, "c", ONE, graph=1)
        out(session, "a", ONE)
    assert again(running) == []


def test_references_to_outputs_end_with_the_iteration(running):
    pipeline = DumpPipeline(a_plan(), introduction_of(a_plan()), running.address)
    pipeline.start()
    tensor = FreeableSource(ONE)
    pipeline.recorder.observe(TensorObservation(0, "Add", "c", TensorSide.OUTPUT, 0, "", tensor))
    pipeline.recorder.end_call(0, "c")
    assert tensor.held == 1
    pipeline.end_iteration(ran=True)
    pipeline.begin_iteration(1)
    pipeline.recorder.end_call(0, "a")
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert again(running) == []


class FreeableSource(ArraySource):
    """A tensor whose memory may be freed."""

    held = 0
    gone = False
    broken = False

    def make_memory_source(self) -> ArraySource:
        self.held += 1
        return self

    def read_again(self) -> ArraySource | str:
        if self.broken:
            raise RuntimeError("no answer")
        return "storage_freed" if self.gone else self


def test_watched_output_that_became_unreadable_is_counted_as_lost(running):
    """Law: expected = kept + lost, again after every layer."""
    plan = a_plan(("a", "b"))
    pipeline = DumpPipeline(plan, introduction_of(plan), running.address)
    pipeline.start()
    recorder, tensor = pipeline.recorder, FreeableSource(ONE)
    recorder.observe(TensorObservation(0, "Add", "c", TensorSide.OUTPUT, 0, "", tensor))
    recorder.count_loss(0, "Add", "c", TensorSide.OUTPUT, 1, "unsupported_sparse")
    recorder.end_call(0, "c")
    recorder.end_call(0, "a")
    tensor.gone = True
    recorder.end_call(0, "b", raised=True)
    tensor.broken = True
    recorder.end_call(0, "b")
    pipeline.end_iteration(ran=True)
    pipeline.close()
    lost = {"unsupported_sparse": 4, "storage_freed": 1, "copy_failed": 1}
    assert balance(running) == (8, lost)
    assert [name for name, *_ in found(running)] == ["c", "a_To_c"]


def test_excluded_slot_is_not_recorded_again(running):
    lists = OperatorSelection(False, without_names=(TensorExclusion("c", ("output0",)),))
    with started(running, operators=lists) as session:
        out(session, "c", ONE)
        out(session, "c", ONE, 1)
        out(session, "a", ONE)
    assert [(name, slot) for name, slot, _ in found(running)] == [("c", 1), ("a_To_c", 1)]


def test_statistics_of_watched_outputs_are_recorded(running):
    mine = np.array([1, 2], "f4")
    with started(running, saved="statistic") as session:
        out(session, "c", mine)
        mine[:] = 7
        out(session, "a", ONE)
    statistics = [(row.op_name, row.figures[0]) for row in rows(running)]
    assert statistics == [("c", "2"), ("a_To_c", "7")]
    assert balance(running) == (2, {})


def test_watched_operators_are_remembered_up_to_a_limit(running, monkeypatch):
    monkeypatch.setattr("rankdump._recorder.triggers._MAX_WATCHED_OPERATORS", 2)
    with started(running, ("a",), ("c0", "c1", "c2")) as session:
        for number in range(3):
            out(session, f"c{number}", ONE)
        out(session, "a", ONE)
    assert again(running) == ["a_To_c1", "a_To_c2"]


@pytest.mark.parametrize(
    ("program", "notes"),
    [
        (
            "xy",
            [
                "dump_list and dump_mode match no operator that ran",
                "dump_list names layer a, which no operator matched",
                "dump_list names watcher_nodes c, which no operator matched",
            ],
        ),
        (
            "xc",
            ["dump_list names layer a, which no operator matched"],
        ),
        ("ac", []),
        ("ca", []),
    ],
)
def test_watched_names_that_never_ran_are_reported(running, caplog, program, notes):
    caplog.set_level(logging.WARNING, "rankdump")
    with started(running) as session:
        for name in program:
            out(session, name, ONE)
    assert list(bodies(running, "session_end")[0].notes) == notes
    assert all(note in caplog.text for note in notes)


def test_watched_operators_respect_the_rest_of_the_plan(running):
    iterations = IterationSelection("1", ((1, 1),))
    with started(running, iterations=iterations) as session:
        for i in range(3):
            session.step(i)
            out(session, "c", ONE * i)
            out(session, "a", ONE)
    assert found(running) == [("c", 0, [1]), ("a_To_c", 0, [1])]


def test_timestamps_of_one_layer_are_equal_if_the_layout_shares_them(running):
    """Law: outputs recorded after one end of a layer have one time, after the next another."""
    plan = a_plan(("a",), ("c", "e"))
    output = OutputSettings("/x", net_name="", layout="cann", started="20260101000000")
    with rankdump.Session(replace(plan, output=output), agent=running.address) as session:
        for name in ("c", "e"):
            for slot in (0, 1):
                out(session, name, ONE, slot)
        for name in "aba":
            out(session, name, ONE)
    records = [r for r in bodies(running, "record") if "_To_" in r.op_name]
    stamps = [(r.op_name, r.timestamp_us) for r in records]
    assert [name for name, _ in stamps] == ["a_To_c", "a_To_c", "a_To_e", "a_To_e"] * 2
    assert len(set(stamps)) == 4
    assert stamps[0] == stamps[1]
    assert stamps[2] == stamps[3]

"""`dump_start` and `dump_stop`, `set_dump`, and the first iteration."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from support.agent_double import RunningFakeAgent, bodies, event_names, introduction_of
from support.configurations import body_of

import rankdump
from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    OutputSettings,
    TensorSelection,
)
from rankdump._core.record import TensorSide
from rankdump._recorder.pipeline import DumpPipeline

ONE = np.ones(1)


def a_plan(**selection) -> DumpPlan:
    return DumpPlan(output=OutputSettings("/x"), selection=TensorSelection(**selection))


def started(running: RunningFakeAgent, **selection) -> rankdump.Session:
    return rankdump.Session(a_plan(**selection), agent=running.address)


class Hook:
    """What a session tells an adapter."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, bool]] = []

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        self.told.append(("begins", iteration, armed))

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        self.told.append(("ends", iteration, armed))

    def detach(self) -> None:
        self.told.append(("detach", -1, False))


def test_dump_start_and_stop_replace_the_iterations_of_the_plan(running):
    """Law: after the first use, exactly the operators that ran while it was on are dumped."""
    with started(running, iterations=IterationSelection("3", ((3, 3),))) as session:
        for i in range(5):
            session.step(i)
            session.dump("Add", f"a{i}", "input", 0, ONE)
            if i == 1:
                session.dump_start()
            session.dump("Add", f"b{i}", "input", 0, ONE)
            if i == 2:
                session.dump_stop()
            session.dump("Add", f"c{i}", "input", 0, ONE)
    records = bodies(running, "record")
    assert [r.op_name for r in records] == ["b1", "c1", "a2", "b2"]
    assert all(r.switched_on for r in records)
    assert [(e.iteration, e.expected) for e in bodies(running, "iteration_end")] == [(1, 2), (2, 2)]
    assert event_names(running) == ["b1", "c1", "a2", "b2"]


def test_records_without_the_switch_are_not_marked_switched(running):
    with started(running) as session:
        session.dump("Add", "a", "input", 0, ONE)
    assert not bodies(running, "record")[0].switched_on


@pytest.mark.parametrize(
    ("selection", "kept"),
    [({"devices": (7,)}, 0), ({"outputs": False}, 1), ({"inputs": False}, 1), ({}, 2)],
)
def test_dump_start_keeps_devices_and_sides_of_the_plan(running, selection, kept):
    with started(running, **selection) as session:
        session.dump_start()
        session.dump("Add", "a", "input", 0, ONE)
        session.dump("Add", "a", "output", 0, ONE)
    assert len(bodies(running, "record")) == kept


def test_dump_start_notifies_hooks_at_once(running, monkeypatch):
    """Law: hooks are armed only while dumping is on; a switch without effect notifies none."""
    hook = Hook()
    monkeypatch.setattr("rankdump._session.rank_session.make_hook", lambda *_, **__: hook)
    with started(running, iterations=IterationSelection("9", ((9, 9),))) as session:
        session.attach(object())
        session.dump_stop()
        session.dump_start()
        session.dump_start()
        session.dump("Add", "a", "input", 0, ONE)
        session.step(1)
        session.dump_stop()
    assert hook.told == [
        ("begins", 0, False),
        ("begins", 0, True),
        ("ends", 0, True),
        ("begins", 1, True),
        ("begins", 1, False),
        ("ends", 1, False),
        ("detach", -1, False),
    ]


def test_summary_explains_a_run_that_was_switched_off(running, caplog):
    with started(running) as session:
        session.dump_stop()
        session.step(1)
    assert "nothing was dumped: dump_stop() was called" in caplog.text


def test_public_functions_use_the_session_of_the_environment(running, tmp_path, monkeypatch):
    plan_file = tmp_path / "plan.json"
    monkeypatch.setattr("rankdump._session.default_session._default", None)
    monkeypatch.setenv("RANKDUMP_CONFIG", str(plan_file))
    monkeypatch.setenv("RANKDUMP_AGENT", running.address)
    plan = a_plan(iterations=IterationSelection("9", ((9, 9),)))
    monkeypatch.setattr("rankdump._session.plan_source.load_config_plan", lambda *_: (plan, b"{}"))
    rankdump.dump_start()
    session = rankdump.attach("no model")
    session.dump("Add", "a", "input", 0, ONE)
    rankdump.dump_stop()
    session.dump("Add", "b", "input", 0, ONE)
    session.close()
    assert [r.op_name for r in bodies(running, "record")] == ["a"]
    assert len(running.agent.opened) == 1


def test_inactive_session_accepts_every_call(monkeypatch):
    monkeypatch.setattr("rankdump._session.default_session._default", None)
    session = rankdump.Session()
    session.dump_start()
    session.dump_stop()
    session.constant("data-1", ONE)
    session.graph(["a"])
    session.close()
    rankdump.dump_start()
    rankdump.dump_stop()


# -- set_dump


@pytest.mark.parametrize("target", [None, "conv1", 3, object, np.ones(1)])
def test_set_dump_accepts_only_models(target):
    with pytest.raises(ValueError, match=r"set_dump: .*; allowed: torch\.nn\.Module"):
        rankdump.set_dump(target)


@pytest.mark.parametrize("marked", [True, False])
def test_dump_mode_2_keeps_only_marked_operators(running, caplog, marked):
    plan = a_plan(operators=OperatorSelection(everything=False, marked=True))
    pipeline = DumpPipeline(plan, introduction_of(plan), running.address)
    pipeline.start()
    if marked:
        pipeline.recorder.set_marks(0, frozenset({"network-Net/a-Add"}))
    assert (
        pipeline.recorder.is_wanted(0, "Default/network-Net/a-Add/Add-op0", TensorSide.INPUT)
        is marked
    )
    assert not pipeline.recorder.is_wanted(0, "Default/network-Net/b-Add/Add-op0", TensorSide.INPUT)
    pipeline.end_iteration(ran=True)
    pipeline.close()
    assert ("set_dump() marks, but set_dump() marked nothing" in caplog.text) is not marked


# -- counting, warnings, unused kernels


def test_first_iteration_has_the_number_in_the_plan(running):
    """Law: `initial_iteration` is added to counted and to given numbers."""
    for given in (True, False):
        with started(running, initial_iteration=100) as session:
            for i in range(2):
                if given:
                    session.step(i)
                session.dump("Add", "a", "input", 0, ONE)
                if not given:
                    session.step()
    assert [r.iteration for r in bodies(running, "record")] == [100, 101, 100, 101]
    assert [e.iteration for e in bodies(running, "iteration_end")] == [100, 101, 100, 101]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, 1),
        ({"RANK": "1"}, 0),
        ({"RANKDUMP_WARNED": "the file"}, 0),
        ({"RANKDUMP_WARNED": "x"}, 1),
    ],
)
def test_configuration_warnings_are_logged_once_per_job(running, caplog, tmp_path, more, said):
    """Only rank 0 logs them, at the start, unless they were logged before the job began."""
    config = tmp_path / "data_dump.json"
    config.write_text(json.dumps(body_of(common={"iteration": "5-3"})))
    environ = {"RANKDUMP_CONFIG": str(config), "RANKDUMP_AGENT": running.address}
    more = {k: str(config) if v == "the file" else v for k, v in more.items()}
    with rankdump.Session.from_environment(environ | more):
        warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == said
    assert all("'5-3' runs backwards" in warning for warning in warnings)


KERNELS = OperatorSelection(
    everything=False, names=("Default/x-op0",), types=("conv",), patterns=("nothing.*",)
)


@pytest.mark.parametrize(
    ("operators", "unused"),
    [
        (["Default/x-op0", "c/Conv2d-op1"], ["name-regex(nothing.*)"]),
        (["c/Conv2d-op1"], ["Default/x-op0", "name-regex(nothing.*)"]),
        (["y"], ["Default/x-op0", "conv", "name-regex(nothing.*)"]),
        ([], []),
    ],
)
def test_unmatched_entries_of_kernels_are_logged(running, caplog, operators, unused):
    """Law: one warning and one note for each; none at all when no operator ran."""
    with started(running, operators=KERNELS) as session:
        session.step(0)
        for name in operators:
            session.dump("Add", name, "input", 0, ONE)
    said = [r.message for r in caplog.records if "Unused Kernel in json: " in r.message]
    notes = [n for n in bodies(running, "session_end")[0].notes if "Unused" in n]
    for texts in (said, notes):
        assert [text.rpartition("json: ")[2] for text in texts] == unused

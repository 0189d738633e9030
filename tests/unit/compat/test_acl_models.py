"""Torch models under `rankdump.acl`: models that are dumped, and their iterations."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.agent_double import RunningFakeAgent, bodies
from torch import Tensor, nn

import rankdump
from rankdump import acl
from rankdump._compat.acl_lifecycle import AclDumpLifecycle

pytestmark = [pytest.mark.torch, pytest.mark.slow]
X = torch.arange(4.0).reshape(1, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return torch.relu(self.fc(x))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


@pytest.fixture
def cycle(running: RunningFakeAgent) -> Iterator[AclDumpLifecycle]:
    made = AclDumpLifecycle({"RANKDUMP_AGENT": running.address})
    assert made.init_dump() == acl.OK
    yield made
    made.finalize_dump()


def write(folder: Path, **dump: Any) -> str:
    path = folder / "acl.json"
    path.write_text(json.dumps({"dump": {"dump_path": str(folder), "dump_mode": "all", **dump}}))
    return str(path)


EVERY = {"dump_op_switch": "on", "dump_list": []}


def calls_of(running: RunningFakeAgent, op_type: str = "Net", side: str = "output") -> list[int]:
    """The iterations of one operator's tensors, in the order they came."""
    return [
        record.iteration
        for record in bodies(running, "record")
        if record.op_type == op_type and record.side.value == side
    ]


def pristine(model: nn.Module) -> bool:
    """Nothing stands before or after any module's call."""
    return not any(
        each._forward_pre_hooks or each._forward_hooks or "forward" in vars(each)
        for each in model.modules()
    )


def test_every_model_call_is_an_iteration(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    model = Net()
    rankdump.attach(model)
    with torch.no_grad():
        for _ in range(3):
            model(X)
    cycle.finalize_dump()
    assert calls_of(running) == [0, 1, 2]
    assert calls_of(running, "Linear", "input") == [0, 1, 2]
    ends = [(e.iteration, e.expected > 0) for e in bodies(running, "iteration_end")]
    assert ends == [(0, True), (1, True), (2, True)]
    assert pristine(model)


def test_first_dumped_iteration_is_complete(cycle, running, tmp_path):
    """Law: of a call that begins a selected iteration nothing is missing, inside or out."""
    cycle.set_dump(write(tmp_path, **EVERY, dump_step="1|3"))
    model = Net()
    rankdump.attach(model)
    for _ in range(5):
        model(X)
    cycle.finalize_dump()
    for op_type in ("Net", "Linear"):
        for side in ("input", "output"):
            assert calls_of(running, op_type, side) == [1, 3]
    assert running.agent.frames[-1].session_end.iterations_seen == 5


def test_script_steps_replace_model_calls(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    model = Net()
    session = rankdump.attach(model)
    for step in (7, 9):
        session.step(step)
        model(X)
        model(X)
    cycle.finalize_dump()
    assert calls_of(running) == [7, 7, 9, 9]


def test_script_may_step_at_the_end(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    model = Net()
    session = rankdump.attach(model)
    for _ in range(2):
        model(X)
        session.step()
    cycle.finalize_dump()
    assert calls_of(running) == [0, 1]


def test_nested_calls_are_not_iterations(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    inner = Net()
    outer = Outer(inner)
    rankdump.attach(outer, name="outer")
    rankdump.attach(inner, name="inner")
    outer(X)
    outer(X)
    inner(X)
    inner(X)
    cycle.finalize_dump()
    assert calls_of(running, "Outer") == [0, 1]
    of_inner = [r for r in bodies(running, "record") if r.model == "inner" and r.op_type == "Net"]
    assert sorted({r.iteration for r in of_inner}) == [0, 1, 2]


def test_alternating_models_share_iterations(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    first, second = Net(), Net()
    rankdump.attach(first, name="first")
    rankdump.attach(second, name="second")
    for _ in range(2):
        first(X)
        second(X)
    cycle.finalize_dump()
    found = [(r.model, r.iteration) for r in bodies(running, "record") if r.op_type == "Linear"]
    assert set(found) == {("first", 0), ("second", 0), ("first", 1), ("second", 1)}


def test_wrapped_model_has_the_name_of_its_class(cycle, running, tmp_path):
    """The file says `Net`, whatever the script wraps it in; a name given goes before it."""
    cycle.set_dump(write(tmp_path, **EVERY))
    session = rankdump.attach(torch.nn.DataParallel(Net()))
    rankdump.attach(torch.nn.DataParallel(Net()), name="other")
    assert session.models == ["Net", "other"]
    cycle.finalize_dump()


def test_call_that_raises_ends_its_iteration(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    model = Net()
    rankdump.attach(model)
    model(X)
    with pytest.raises(ValueError, match="negative"):
        model(-X)
    model(X)
    cycle.finalize_dump()
    assert calls_of(running) == [0, 2]


def test_set_dump_applies_to_models_attached_later(cycle, running, tmp_path):
    """A second file is for models attached from then on; those before keep theirs."""
    first, second, never = Net(), Net(), Net()
    cycle.set_dump(write(tmp_path, **EVERY, dump_step="0"))
    rankdump.attach(first, name="first")
    cycle.set_dump(write(tmp_path, **EVERY, dump_step="1"))
    rankdump.attach(second, name="second")
    for _ in range(2):
        for model in (first, second, never):
            model(X)
    cycle.finalize_dump()
    records = bodies(running, "record")
    assert {(r.model, r.iteration) for r in records} == {("first", 0), ("second", 1)}


def test_two_models_in_turn(cycle, running, tmp_path):
    for name in ("a", "b"):
        model = Net()
        cycle.init_dump()
        cycle.set_dump(write(tmp_path, **EVERY, dump_step={"a": "0", "b": "1"}[name]))
        rankdump.attach(model, name=name)
        model(X)
        model(X)
        assert cycle.finalize_dump() == acl.OK
    records = bodies(running, "record")
    assert {(r.model, r.graph, r.iteration) for r in records} == {("a", 0, 0), ("b", 1, 1)}


def test_dumped_model_computes_the_same_and_is_left_clean(cycle, running, tmp_path):
    """Law: the numbers are the same bit for bit, and afterwards nothing is left in the model."""
    torch.manual_seed(1)
    model = Net()
    before = model(X)
    cycle.set_dump(write(tmp_path, **EVERY))
    rankdump.attach(model)
    during = model(X)
    cycle.finalize_dump()
    sent = len(bodies(running, "record"))
    after = model(X)
    for other in (during, after):
        assert np.array_equal(before.detach().numpy(), other.detach().numpy())
    assert pristine(model)
    assert len(bodies(running, "record")) == sent > 0
    cycle.init_dump()
    cycle.set_dump(write(tmp_path, **EVERY))
    rankdump.attach(model)
    model(X)
    cycle.finalize_dump()
    assert len(bodies(running, "record")) == 2 * sent


def test_copies_of_a_model_are_not_counted(cycle, running, tmp_path):
    cycle.set_dump(write(tmp_path, **EVERY))
    model = Net()
    rankdump.attach(model)
    model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(X)
        other(X)
    model(X)
    cycle.finalize_dump()
    assert calls_of(running) == [0, 1]


def test_model_of_an_unknown_framework_is_logged(cycle, tmp_path, caplog):
    cycle.set_dump(write(tmp_path, **EVERY))
    rankdump.attach("no model")
    assert "cannot attach to an object of type builtins.str" in caplog.text


@pytest.mark.parametrize("compiled", ["before", "after", "in place, before", "in place, after"])
def test_compiled_models_are_counted(cycle, running, tmp_path, compiled):
    cycle.set_dump(write(tmp_path, **EVERY, dump_step="1|3"))
    model = Net()
    expected = model(X)
    attached = called = model
    if compiled == "before":
        attached = called = torch.compile(model, backend="eager")
    if compiled == "in place, before":
        model.compile(backend="eager")
    rankdump.attach(attached)
    if compiled == "after":
        called = torch.compile(model, backend="eager")
    if compiled == "in place, after":
        model.compile(backend="eager")
    for _ in range(5):
        assert torch.equal(called(X), expected)
    assert cycle.finalize_dump() == acl.OK
    assert calls_of(running) == [1, 3]
    assert running.agent.frames[-1].session_end.iterations_seen == 5

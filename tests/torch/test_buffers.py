"""Buffers of a model: part of its state, or constants."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.model_hook import attach_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x)


def run(model: nn.Module, recorder, iterations: int) -> None:
    hook = attach_model(model, recorder, 0)
    for iteration in range(iterations):
        hook.iteration_begins(iteration, armed=True)
        model(torch.randn(4, 2))
        hook.iteration_ends(iteration, armed=True)
    hook.detach()


def test_persistent_buffers_are_recorded_like_parameters(recorder) -> None:
    """After each iteration, behind the parameters, with the values it left."""
    model = Net()
    run(model, recorder, 2)
    names = [taken.op_name for taken in recorder.taken if taken.op_type == "Parameter"]
    weights = ["bn.weight", "bn.bias"]
    state = ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
    assert names == [*weights, "table", *state, *weights, *state]
    counts = [taken for taken in recorder.taken if taken.op_name == "bn.num_batches_tracked"]
    assert [int(taken.array) for taken in counts] == [1, 2]
    means = [taken for taken in recorder.taken if taken.op_name == "bn.running_mean"]
    assert np.array_equal(means[1].array, model.get_buffer("bn.running_mean").numpy())
    assert (means[0].side, means[0].slot, means[0].argument) == (TensorSide.OUTPUT, 0, "buffer")
    assert not any(taken.constant for taken in recorder.taken if taken.op_name != "table")


def test_other_buffers_are_constants(recorder) -> None:
    """A buffer outside the state is handed over once for its model, and says what it is."""
    run(Net(), recorder, 3)
    table = recorder.one("table", "output")
    assert table.constant
    assert table.array.tolist() == [0, 1, 2]


def test_constant_is_recorded_once_it_is_wanted(recorder) -> None:
    """What the plan leaves out in the first iteration can be wanted in a later one."""
    model = Net()
    hook = attach_model(model, recorder, 0)
    recorder.wanted = lambda name, side: False
    hook.iteration_begins(0, armed=True)
    hook.iteration_ends(0, armed=True)
    assert not recorder.taken
    recorder.wanted = lambda name, side: name == "table"
    for iteration in (1, 2):
        hook.iteration_begins(iteration, armed=True)
        hook.iteration_ends(iteration, armed=True)
    hook.detach()
    assert [taken.op_name for taken in recorder.taken] == ["table"]


def test_wrapped_and_shared_buffers_are_recorded_once(recorder) -> None:
    """Neither a wrapper nor a second owner doubles a buffer."""
    inner = nn.Sequential(Net(), nn.Identity())
    inner[1].register_buffer("again", inner[0].table, persistent=False)
    run(nn.DataParallel(inner), recorder, 1)
    names = [taken.op_name for taken in recorder.taken if taken.argument == "buffer"]
    assert names == [
        "0.table",
        "0.bn.running_mean",
        "0.bn.running_var",
        "0.bn.num_batches_tracked",
    ]


def test_parameters_and_buffers_end_their_call_at_once(recorder) -> None:
    """Each is an operator by itself: settled when it was read, not held until later."""
    run(Net(), recorder, 1)
    names = [taken.op_name for taken in recorder.taken if taken.op_type == "Parameter"]
    settled = [name for name, raised in recorder.settlements if not raised]
    assert settled[2:] == names


class Growing(nn.Module):
    """A model that is not the same in every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        # A new tensor under the old name, as running averages out of place have it.
        self.mean = 0.5 * self.mean + x.detach()
        return self.first(x)


def test_buffers_and_parameters_added_later_are_recorded(recorder):
    """Law: walks are spared only while nothing changed; a buffer is read as it is now."""
    model = Growing()
    hook = attach_model(model, recorder, 0)

    def iteration(number: int) -> dict[str, list[float]]:
        recorder.taken.clear()
        hook.iteration_begins(number, armed=True)
        model(torch.ones(2)).sum().backward()
        hook.iteration_ends(number, armed=True)
        return {t.op_name: t.array.ravel().tolist() for t in recorder.taken if t.argument != "grad"}

    first = iteration(0)
    assert first["mean"] == [1, 1]
    assert iteration(1)["mean"] == [1.5, 1.5]
    model.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_buffer("count", torch.ones(1))
    found = iteration(2)
    names = {name for name in found if name.startswith("Default/network-Growing/first-Sequential/")}
    assert {name.rpartition("/")[2] for name in names} == {
        "Linear-op0",
        "ReLU-op0",
        "Sequential-op0",
    }
    assert {"first.0.weight", "count"} <= found.keys()
    assert "first.weight" not in found
    del model.count
    model.first[0].weight = nn.Parameter(torch.zeros(2, 2))
    found = iteration(3)
    assert "count" not in found
    assert found["first.0.weight"] == [0, 0, 0, 0]
    hook.detach()

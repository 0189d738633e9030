"""States of optimizers, named after the parameters of attached models."""

# pyright: reportArgumentType=false

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rankdump
from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def record(recorder, optimizer: object, *models: nn.Module) -> dict[str, np.ndarray]:
    hooks = [TorchModelHook(model, recorder, graph) for graph, model in enumerate(models)]
    hook = TorchOptimizerHook(recorder, lambda: hooks)
    assert hook.add_optimizer(optimizer)
    hook.iteration_begins(0, armed=True)
    hook.iteration_ends(0, armed=True)
    hook.detach()
    for each in hooks:
        each.detach()
    assert not recorder.warnings
    assert not recorder.lost
    assert {(taken.op_type, taken.side) for taken in recorder.taken} <= {
        ("OptimizerState", TensorSide.OUTPUT)
    }
    return {taken.op_name: taken.array for taken in recorder.taken}


def test_states_are_named_after_their_parameters(recorder) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    found = record(recorder, optimizer, model)
    assert sorted(found) == [
        f"Optimizer/0.{name}.{key}"
        for name in ("bias", "weight")
        for key in ("exp_avg", "exp_avg_sq")
    ]
    expected = optimizer.state[model[0].weight]["exp_avg"]
    np.testing.assert_array_equal(found["Optimizer/0.weight.exp_avg"], expected.numpy())


def test_momentum_is_recorded_and_nothing_before_the_first_step(recorder) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert record(recorder, optimizer, model) == {}
    train(model, optimizer)
    assert list(record(recorder, optimizer, model)) == ["Optimizer/weight.momentum_buffer"]


def test_master_weights_of_no_model_are_recorded_themselves(recorder) -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    master.grad = torch.ones_like(master)
    optimizer.step()
    found = record(recorder, optimizer, model)
    assert sorted(found) == ["Optimizer/group-0.0.master", "Optimizer/group-0.0.momentum_buffer"]
    np.testing.assert_array_equal(found["Optimizer/group-0.0.master"], master.detach().numpy())


def test_states_that_are_not_selected_are_not_read(recorder) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    recorder.wanted = lambda name, side: name.endswith("weight.exp_avg")
    assert list(record(recorder, optimizer, model)) == ["Optimizer/weight.exp_avg"]


def test_anything_with_groups_and_states_is_an_optimizer(recorder) -> None:
    """Libraries wrap optimizers in classes of their own."""
    hook = TorchOptimizerHook(recorder, list)
    assert hook.add_optimizer(SimpleNamespace(param_groups=[], state={}))
    assert not hook.add_optimizer(nn.Linear(1, 1))
    assert not hook.add_optimizer(None)
    rankdump.Session().optimizer(None)  # off: one branch


class FindingHook:
    """A hook that finds optimizers, and models that are attached."""

    def __init__(self, recorder, *models: nn.Module) -> None:
        self.recorder = recorder
        self.models = [TorchModelHook(model, recorder, graph) for graph, model in enumerate(models)]
        self.hook = TorchOptimizerHook(recorder, lambda: self.models)
        self.hook.find_optimizers()

    def end(self) -> list[str]:
        self.recorder.taken.clear()
        self.hook.iteration_ends(0, armed=True)
        assert not self.recorder.warnings
        return sorted(taken.op_name for taken in self.recorder.taken)


def sgd(*parameters: nn.Parameter) -> torch.optim.Optimizer:
    for each in parameters:
        each.grad = torch.ones_like(each)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_optimizers_that_step_are_found(recorder) -> None:
    """Also in iterations without a step, and until the hook is detached or they are freed."""
    model = nn.Linear(3, 2, bias=False)
    finding, optimizer = FindingHook(recorder, model), sgd(model.weight)
    assert finding.end() == []
    optimizer.step()
    for _ in range(2):
        assert finding.end() == ["Optimizer/weight.momentum_buffer"]
    finding.hook.detach()
    sgd(model.weight).step()
    del optimizer
    gc.collect()
    assert finding.end() == []


@pytest.mark.parametrize("armed", [True, False])
def test_optimizer_is_held_until_an_armed_iteration_ends(recorder, armed) -> None:
    """The last iteration of a script may end after the function that made the optimizer."""
    model = nn.Linear(3, 2, bias=False)
    finding = FindingHook(recorder, model)
    states = ["Optimizer/weight.momentum_buffer"] if armed else []
    optimizer = sgd(model.weight)
    finding.hook.iteration_begins(0, armed=armed)
    optimizer.step()
    del optimizer
    gc.collect()
    assert finding.end() == states
    gc.collect()
    assert finding.end() == [], "it was not released"
    optimizer = sgd(model.weight)
    optimizer.step()
    finding.hook.iteration_begins(1, armed=armed)
    del optimizer  # without a step in this iteration
    gc.collect()
    assert finding.end() == states
    finding.hook.detach()


def test_optimizer_that_the_script_named_is_not_recorded_twice(recorder) -> None:
    """Neither is one that steps inside of another one."""
    model = nn.Linear(3, 2, bias=False)
    finding, optimizer = FindingHook(recorder, model), sgd(model.weight)
    wrapper = SimpleNamespace(param_groups=optimizer.param_groups, state=optimizer.state)
    finding.hook.add_optimizer(wrapper)
    optimizer.step()
    assert finding.end() == ["Optimizer/weight.momentum_buffer"]
    finding.hook.detach()


def test_optimizers_of_copies_are_found_and_numbered(recorder) -> None:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    copies = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    finding, optimizers = FindingHook(recorder, model), [sgd(each) for each in copies]
    for each in optimizers:
        each.step()
    assert finding.end() == [
        "Optimizer/group-0.0.master",
        "Optimizer/group-0.0.momentum_buffer",
        "Optimizer/optimizer-1.group-0.0.master",
        "Optimizer/optimizer-1.group-0.0.momentum_buffer",
    ]
    finding.hook.detach()


def test_optimizers_of_other_models_are_left_out(recorder) -> None:
    """All trainable parameters of the attached model have an optimizer of their own."""
    model, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    finding = FindingHook(recorder, model)
    optimizers = sgd(other.weight), sgd(model.weight)
    for each in optimizers:
        each.step()
    assert finding.end() == ["Optimizer/weight.momentum_buffer"]
    finding.hook.detach()

"""States of optimizers, named after the parameters of attached models."""

# pyright: reportArgumentType=false

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import rankdump
from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.optimizer_states import TorchOptimizerHook, is_optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def record(recorder, optimizer: object, *models: nn.Module) -> dict[str, np.ndarray]:
    hooks = [TorchModelHook(model, recorder, graph) for graph, model in enumerate(models)]
    hook = TorchOptimizerHook(optimizer, recorder, lambda: hooks)
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


def test_anything_with_groups_and_states_is_an_optimizer() -> None:
    """Libraries wrap optimizers in classes of their own."""
    assert is_optimizer(SimpleNamespace(param_groups=[], state={}))
    assert not is_optimizer(nn.Linear(1, 1))
    assert not is_optimizer(None)
    rankdump.Session().optimizer(None)  # off: one branch

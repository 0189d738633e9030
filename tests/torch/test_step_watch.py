"""The watch for calls of a model and steps of its optimizers, in real training loops."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

from rankdump._compat.api_dump import StepCounter
from rankdump._frameworks.torch import api_framework
from rankdump._frameworks.torch.api_framework import TorchStepWatch

X = torch.ones(2, 3)


class StepRecorder:
    """The step of each call of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.steps = StepCounter()
        self.calls: list[int] = []
        self.watch = TorchStepWatch(model, self)

    def called(self, manner: str, *, trains: bool) -> None:
        self.steps.note_call(manner, trains=trains, has_optimizer=self.watch.has_optimizer)
        self.calls.append(self.steps.number)

    def stepped(self) -> None:
        self.steps.note_optimizer_step()


@pytest.fixture
def net() -> nn.Module:
    gc.collect()  # optimizers of other tests
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


@pytest.fixture
def watched(net: nn.Module) -> Iterator[Callable[..., StepRecorder]]:
    made: list[StepRecorder] = []

    def of(model: nn.Module = net) -> StepRecorder:
        made.append(StepRecorder(model))
        return made[-1]

    yield of
    for each in made:
        each.watch.remove()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(X).sum().backward()
    optimizer.step()


def test_step_watch_counts_steps_of_a_loop(net, watched):
    counted, optimizer = watched(), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        trained(net, optimizer)
    assert counted.calls == [0, 1, 2]


def test_step_watch_counts_accumulated_calls_as_one_step(net, watched):
    """Several micro-batches, and several calls before one backward, are one step."""
    optimizer, counted = torch.optim.Adam(net.parameters()), watched()
    for _ in range(2):
        for _ in range(3):
            net(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (net(X) - net(2 * X)).sum().backward()
    optimizer.step()
    assert counted.calls == [0, 0, 0, 1, 1, 1, 2, 2]


def test_step_watch_counts_several_optimizers_as_one_step(net, watched):
    counted = watched()
    first = torch.optim.SGD(net[0].parameters(), 0.1)
    second = torch.optim.AdamW(net[2].parameters())
    for _ in range(2):
        net(X).sum().backward()
        first.step()
        second.step()
    assert counted.calls == [0, 1]


def test_step_watch_counts_a_closure_within_its_step(net, watched):
    """L-BFGS calls the model as often as it likes."""
    counted, optimizer = watched(), torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(X) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    first = len(counted.calls)
    optimizer.step(closure)
    assert first > 1
    assert set(counted.calls[:first]) == {0}
    assert set(counted.calls[first:]) == {1}


def test_step_watch_counts_a_step_that_the_scaler_skips(net, watched):
    """Gradients that overflowed are discarded, and the next batch belongs to another step."""
    counted, optimizer = watched(), torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((net(X) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert counted.calls == [0, 1, 2]


def test_step_watch_counts_an_evaluation_in_separate_steps(net, watched):
    """With and without gradients, between two steps of the training."""
    counted, optimizer = watched(), torch.optim.SGD(net.parameters(), 0.1)
    trained(net, optimizer)
    net.eval()
    with torch.no_grad():
        net(X)
    net(X)
    net.train()
    trained(net, optimizer)
    assert counted.calls == [0, 1, 2, 3]


def test_step_watch_ignores_recomputations(net, watched):
    counted, optimizer = watched(), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        checkpoint(net, X, use_reentrant=False).sum().backward()
        optimizer.step()
    assert counted.calls == [0, 1]


def test_step_watch_counts_each_call_without_an_optimizer(net, watched):
    counted = watched()
    for _ in range(3):
        net(X).sum().backward()
    assert counted.calls == [0, 1, 2]


def test_step_watch_ignores_the_optimizer_of_another_model(net, watched):
    """As in a generator's step, in which the discriminator has one as well."""
    other = nn.Linear(1, 1)
    own, others = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, other))
    counted = watched()
    for _ in range(2):
        other(net(X).detach()).sum().backward()
        others.step()
        other(net(X)).sum().backward()
        own.step()
    assert counted.calls == [0, 0, 1, 1]


def test_step_watch_searches_for_optimizers_once(net, watched, monkeypatch):
    """The search reads every object of the process, so it must not run at each step."""
    other = nn.Linear(3, 1)
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other))
    counted = watched()
    looks: list[int] = []
    find_objects = api_framework.find_objects
    monkeypatch.setattr(
        api_framework, "find_objects", lambda *kinds: (looks.append(1), find_objects(*kinds))[1]
    )
    trained(other, theirs)
    for _ in range(3):
        trained(net, mine)
        trained(other, theirs)
    assert counted.calls == [0, 1, 2]
    assert len(looks) <= 2


def test_step_watch_counts_an_optimizer_of_copies(net, watched):
    """With manual mixed precision the optimizer's weights are not the model's."""
    counted = watched()
    copies = [parameter.detach().double().requires_grad_() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(copies, 0.1)
    for _ in range(2):
        for _ in range(2):
            net(X).sum().backward()
        optimizer.step()
    assert counted.calls == [0, 0, 1, 1]


def test_step_watch_restores_model_and_torch(net):
    """They are also restored if other code has patched the scaler meanwhile."""
    step, hooks = torch.amp.GradScaler.step, dict(_global_optimizer_post_hooks)
    before = (dict(net._forward_hooks), dict(net._forward_pre_hooks))
    first, second = StepRecorder(net), StepRecorder(net)
    first.watch.remove()
    second.watch.remove()
    net(X)
    assert (first.calls, second.calls) == ([], [])
    assert (dict(net._forward_hooks), dict(net._forward_pre_hooks)) == before
    assert dict(_global_optimizer_post_hooks) == hooks
    torch.amp.GradScaler.step = step

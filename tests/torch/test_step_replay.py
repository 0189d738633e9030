"""Replay of a step of torch models: same state after it as after one run, and what differs."""

from __future__ import annotations

import gc
import itertools
import linecache
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_post_hooks

from rankdump._core.determinism import ReplayReport
from rankdump._frameworks.torch import step_replay
from rankdump._frameworks.torch.model_hook import TorchModelHook
from rankdump._frameworks.torch.step_replay import JobState
from rankdump._session.framework_adapters import make_step_replay


class Net(nn.Module):
    """Has buffers, dropout, and a layer that draws from an own generator when it is noisy."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.noise = Noise(noise)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.noise(self.drop(self.norm(self.body(x)))))


class Noise(nn.Module):
    def __init__(self, noise: Callable[[], float]) -> None:
        super().__init__()
        self.make = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.make()


class TrainedNet:
    """A model with everything that a step changes."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        self.model = Net(noise)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.average = {"steps": 0}

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        x = torch.randn(8, 4) + random.random() + float(np.random.rand())
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.detach()


def read_numpy_state() -> bytes:
    state: Any = np.random.get_state()
    return state[1].tobytes() + repr(state[2:]).encode()


def replay(
    step: Callable[[], Any], *models: nn.Module, also: tuple[object, ...] = ()
) -> tuple[Any, ReplayReport]:
    found = make_step_replay(models, also, step, nullcontext, iteration=3, rank=0)
    return found.run(), found.report


def test_training_with_replays_has_the_bits_of_one_without() -> None:
    """Losses, weights, optimizer, scheduler, scaler, buffers and generators."""
    plain, replayed = TrainedNet(), None
    expected = [plain.step() for _ in range(4)]
    states = torch.get_rng_state(), random.getstate(), read_numpy_state()
    replayed = TrainedNet()
    found = [replay(replayed.step, replayed.model) for _ in range(4)]
    assert [report.is_deterministic for _, report in found] == [True] * 4, str(found[0][1])
    assert torch.equal(torch.stack([loss for loss, _ in found]), torch.stack(expected))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert read_numpy_state() == states[2]
    own, other = plain.model.state_dict(), replayed.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    first, second = plain.optimizer.state_dict(), replayed.optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for number, state in first["state"].items():
        assert all(torch.equal(value, second["state"][number][k]) for k, value in state.items())
    assert plain.scheduler.state_dict() == replayed.scheduler.state_dict()
    assert plain.scaler.state_dict() == replayed.scaler.state_dict()
    assert found[0][1].compared > 40
    assert str(found[0][1]).endswith("digests are the same")


def test_first_operator_that_differs_is_named_with_its_line() -> None:
    counter = itertools.count()
    job = TrainedNet(lambda: 0.001 * next(counter))
    loss, report = replay(job.step, job.model)
    first = report.differences[0]
    assert report.is_deterministic is False
    assert first.op_name == "Default/network-Net/noise-Noise/Noise-op0"
    assert (first.op_type, first.place) == ("Noise", "output.0")
    assert first.reason == "its inputs agree, and output.0 differs"
    line = linecache.getline(__file__, int(first.source.removeprefix(f"{__file__}:")))
    assert "self.head(self.noise(" in line
    assert first.op_name in str(report)
    # The gradient of what went before differs too, and the result that is returned is the first.
    assert {"Gradients/body.weight", "result"} <= {each.op_name for each in report.differences}
    plain = TrainedNet(lambda: 0.0)
    assert torch.equal(loss, plain.step())
    assert all(map(torch.equal, plain.model.parameters(), job.model.parameters()))


def test_gradients_that_were_there_are_added_to_once() -> None:
    """The step may be one of several micro-batches; gradients stay the same objects."""
    model = nn.Linear(3, 2)
    x = torch.ones(4, 3)
    model(x).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = gradient.clone()
    _, report = replay(lambda: model(x).sum().backward(), model)
    assert report.is_deterministic
    assert model.weight.grad is gradient
    assert torch.equal(gradient, 2 * before)


def test_new_gradients_keep_their_values_and_memory_that_a_module_replaces_comes_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count: Tensor
            self.register_buffer("count", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x * self.weight * self.count

    model = Counting()
    _, report = replay(lambda: model(torch.ones(2)).sum().backward(), model)
    assert report.is_deterministic
    assert model.count.tolist() == [1.0]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [1.0, 1.0]


def test_tensors_that_share_memory_stay_shared() -> None:
    base = torch.arange(6.0)
    model = nn.Linear(1, 1)
    model.register_buffer("whole", base)
    model.register_buffer("part", base[2:4])

    def step() -> None:
        base.add_(1)

    _, report = replay(step, model)
    assert report.is_deterministic
    assert base.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert model.get_buffer("part").tolist() == [3.0, 4.0]


def test_graph_of_an_earlier_forward_can_still_be_used() -> None:
    """State is written back past the counts of changes that autograd checks."""
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    earlier = model(model(x)).sum()
    replay(lambda: model(torch.ones(1, 2)).sum().backward(), model)
    earlier.backward()
    assert x.grad is not None


def test_error_of_the_first_run_propagates_and_restores_the_model() -> None:
    model = nn.Linear(2, 2)

    def step() -> None:
        model(torch.ones(1, 2))
        raise KeyError("of the script")

    with pytest.raises(KeyError, match="of the script"):
        replay(step, model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_error_of_the_second_run_is_a_finding_and_nothing_else() -> None:
    """As of a step that takes the next batch of an iterator."""
    model, batches = nn.Linear(2, 2), iter([torch.ones(1, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> float:
        loss = model(next(batches)).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    before = model.weight.detach().clone()
    result, report = replay(step, model)
    assert isinstance(result, float)
    assert (report.is_deterministic, report.differing) == (False, 0)
    assert report.raised.startswith("StopIteration")
    assert "the second run raised StopIteration" in str(report)
    assert torch.equal(model.weight, before - 0.5)


def test_another_batch_in_the_second_run_is_told_as_such() -> None:
    model, batches = nn.Linear(2, 2), iter([torch.ones(1, 2), torch.zeros(1, 2)])
    _, report = replay(lambda: model(next(batches)), model)
    assert report.differences[0].reason == (
        "input.0 differs, which was made between the operators that are observed"
    )


def test_other_objects_are_restored_where_they_are_given() -> None:
    class Average:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    average, own, drawn = Average(), torch.Generator(), np.random.default_rng()
    model = nn.Linear(2, 2)

    def step() -> float:
        average.value += 1
        x = torch.rand(1, 2, generator=own) + drawn.random()
        return float(model(x).sum().detach())

    _, report = replay(step, model, also=(average, own, drawn))
    assert report.is_deterministic
    assert average.value == 1
    _, report = replay(step, model)
    assert report.is_deterministic is False
    _, report = replay(step, model, also=("text",))
    assert report.skipped.endswith(
        "UnsupportedError: also has an object of type builtins.str, which has neither state_dict "
        "and load_state_dict nor get_state and set_state"
    )


def test_state_that_cannot_be_copied_lets_the_step_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls = nn.Linear(2, 2), list[int]()

    def run_out(*args: object) -> None:
        raise MemoryError("no memory")

    def step() -> str:
        calls.append(1)
        return "done"

    monkeypatch.setattr(step_replay._StorageCopy, "__init__", run_out)
    result, report = replay(step, model)
    assert (result, calls, report.is_deterministic) == ("done", [1], None)
    assert "skipped, the step ran once: its state cannot be copied: MemoryError" in str(report)
    assert not model._forward_hooks


def test_second_copy_that_fails_leaves_the_state_of_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 2)
    copies = list[JobState]()

    def copy_once(*about: Any) -> JobState:
        if copies:
            raise MemoryError("no memory")
        copies.append(JobState(*about))
        return copies[0]

    monkeypatch.setattr(step_replay, "JobState", copy_once)

    def step() -> None:
        with torch.no_grad():
            model.weight.add_(1)

    before = model.weight.detach().clone()
    _, report = replay(step, model)
    assert "MemoryError" in report.skipped
    assert torch.equal(model.weight, before + 1)


def test_equal_storages_are_copied_once() -> None:
    """Frozen parameters cost memory once, not for both states."""
    model = nn.Linear(64, 64)
    first = JobState([model])
    second = JobState([model], known=first)
    shared = {id(each.saved) for each in first._storages.values()}
    assert {id(each.saved) for each in second._storages.values()} == shared
    assert sum(each.saved.nbytes for each in first._storages.values()) >= 64 * 65 * 4
    with torch.no_grad():
        model.bias.add_(1)
    third = JobState([model], known=first)
    changed = [each for each in third._storages.values() if id(each.saved) not in shared]
    assert [each.saved.nbytes for each in changed] == [64 * 4]


def test_model_that_cannot_be_observed_lets_the_step_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No hook is left behind, on none of the models."""
    models, calls = [nn.Linear(2, 2), nn.Linear(2, 2)], list[int]()
    begin = TorchModelHook.iteration_begins

    def begin_first(self: TorchModelHook, iteration: int, armed: bool) -> None:
        if self.graph:
            raise RuntimeError("no")
        begin(self, iteration, armed)

    monkeypatch.setattr(TorchModelHook, "iteration_begins", begin_first)
    _, report = replay(lambda: calls.append(1), *models)
    assert calls == [1]
    assert report.skipped == "its models cannot be observed: RuntimeError: no"
    assert not any(model._forward_hooks for model in models)


def test_copies_are_freed_when_the_first_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = nn.Linear(2, 2), list[weakref.ref[JobState]]()

    def copy_once(*about: Any) -> JobState:
        state = JobState(*about)
        kept.append(weakref.ref(state))
        return state

    monkeypatch.setattr(step_replay, "JobState", copy_once)

    def step() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        replay(step, model)
    assert kept[0]() is None


def test_optimizer_that_cannot_be_found_lets_the_step_run_once() -> None:
    """Its state would advance two times."""
    job = TrainedNet()
    gc.collect()
    before = dict(_global_optimizer_post_hooks)
    gc.freeze()
    try:
        loss, report = replay(job.step, job.model)
    finally:
        gc.unfreeze()
    assert report.skipped == (
        "an optimizer of type torch.optim.adamw.AdamW was not there, or not found, before the step"
    )
    plain = TrainedNet()
    assert torch.equal(loss, plain.step())
    assert all(map(torch.equal, plain.model.parameters(), job.model.parameters()))
    assert before == dict(_global_optimizer_post_hooks)

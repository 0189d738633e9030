"""`attach` of loops that a script writes around an object, with stand-ins for these objects that
have the real ones' members: `make test-frameworks` has the real ones.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankdump
from rankdump.integrations import accelerate, deepspeed, fabric, torchtitan

from .conftest import SessionJournal

pytestmark = pytest.mark.torch
X = torch.ones(2, 3)
PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


class StandInAccelerator:
    """Accumulates over `every` batches as accelerate does."""

    def __init__(self, every: int) -> None:
        self.sync_gradients = True
        self.gradient_accumulation_steps = every
        self._entries = 0

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None]:
        self._entries += 1
        self.sync_gradients = self._entries % self.gradient_accumulation_steps == 0
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def end_training(self) -> None:
        pass


def train_with(accelerator: StandInAccelerator, net: nn.Module, batches: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(batches):
        with accelerator.accumulate(net):
            accelerator.backward(net(X).sum())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            net(X)


def test_accelerate_counts_entries_of_accumulate(net: nn.Module, session: SessionJournal) -> None:
    accelerator = StandInAccelerator(every=2)
    assert accelerate.attach(accelerator, net, session=session) is session
    train_with(accelerator, net, 5)
    accelerator.end_training()
    micro = ["micro 0", "micro 1"]
    assert session.calls == [0, *micro, 1, *micro, 2, "micro 0"]
    assert session.attached == [net]
    assert not net._forward_pre_hooks


def test_accelerate_counts_backward_passes_without_accumulate(
    net: nn.Module, session: SessionJournal
) -> None:
    accelerator = StandInAccelerator(every=1)
    accelerate.attach(accelerator, net, session=session, first_step=10)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in range(4):
        accelerator.backward(net(X).sum())
        if batch % 2:
            optimizer.step()
        net.eval()
        with torch.no_grad():
            net(X)
        net.train()
    # What accelerate does not know is known from the second batch on.
    assert session.calls == [10, "micro 1", 11, "micro 0", "micro 1"]


def test_accelerate_numbers_no_micro_batches_without_accumulation(
    net: nn.Sequential, session: SessionJournal
) -> None:
    accelerator = StandInAccelerator(every=1)
    accelerate.attach(accelerator, net, session=session)
    train_with(accelerator, net, 3)
    assert session.calls == [0, 1, 2]


class StandInFabric:
    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def setup(self, module: nn.Module) -> nn.Module:
        return FabricWrapper(module)


class FabricWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    @property
    def module(self) -> nn.Module:
        return self._forward_module

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)


def test_fabric_attaches_the_module_inside_its_wrapper(
    net: nn.Module, session: SessionJournal
) -> None:
    loop = StandInFabric()
    model = loop.setup(net)
    fabric.attach(loop, model, session=session)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        for _ in range(2):
            loop.backward(model(X).sum())
        optimizer.step()
    assert session.attached == [net]
    assert session.calls == [0, "micro 0", "micro 1", 1, "micro 0", "micro 1"]


def test_fabric_counts_where_only_parts_of_the_module_are_called(
    net: nn.Sequential, session: SessionJournal
) -> None:
    """As with a LightningModule's `training_step`, which Fabric calls without the module."""
    loop = StandInFabric()
    fabric.attach(loop, loop.setup(net), session=session)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        loop.backward(net[1](net[0](X)).sum())
        optimizer.step()
    assert [call for call in session.calls if isinstance(call, int)] == [0, 1, 2]


class StandInEngine:
    """Counts as DeepSpeed's engine does."""

    def __init__(self, module: nn.Module, accumulated: int, zero_stage: int = 0) -> None:
        self.module = module
        self.global_steps = self.micro_steps = 0
        self._accumulated = accumulated
        self._zero_stage = zero_stage

    def zero_optimization_stage(self) -> int:
        return self._zero_stage

    def gradient_accumulation_steps(self) -> int:
        return self._accumulated

    def step(self) -> None:
        self.micro_steps += 1
        self.global_steps += self.micro_steps % self._accumulated == 0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_deepspeed_follows_the_counters_of_the_engine(
    net: nn.Module, session: SessionJournal, accumulated: int
) -> None:
    engine = StandInEngine(net, accumulated)
    engine.global_steps = engine.micro_steps = 6  # after a resume
    deepspeed.attach(engine, session=session)
    for _ in range(2 * accumulated):
        engine.module(X)
        engine.step()
        engine.module.eval()
        engine.module(X)
        engine.module.train()
    micro = ["micro 0", "micro 1"] if accumulated == 2 else []
    assert session.calls == [6, *micro, 7, *micro]
    assert session.attached == [net]


def test_deepspeed_with_zero_warns_of_missing_gradients(
    net: nn.Module, session: SessionJournal, caplog: pytest.LogCaptureFixture
) -> None:
    deepspeed.attach(StandInEngine(net, 1), session=session)
    assert caplog.records == []
    for _ in range(2):
        deepspeed.attach(StandInEngine(net, 1, zero_stage=2), session=session)
    (record,) = caplog.records
    assert "records no gradients of parameters: ZeRO stage 2" in record.getMessage()


class StandInTrainer:
    """Calls its methods as the Trainer of torchtitan does, with a model of two stages."""

    def __init__(self, parts: list[nn.Module], accumulated: int) -> None:
        self.model_parts = parts
        self.gradient_accumulation_steps = accumulated
        self.step = 0
        self.closed = False

    def train(self, steps: int) -> None:
        while self.step < steps:
            self.step += 1
            self.train_step(iter(()))

    def train_step(self, data_iterator: object) -> None:
        for _ in range(self.gradient_accumulation_steps):
            assert self.forward_backward_step(input_dict={}) == "loss"

    def forward_backward_step(self, *, input_dict: object) -> str:
        return "loss"

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("accumulated", [1, 3])
def test_torchtitan_begins_a_step_with_each_train_step(
    net: nn.Module, session: SessionJournal, accumulated: int
) -> None:
    trainer = StandInTrainer([net, nn.Linear(1, 1)], accumulated)
    torchtitan.attach(trainer, session=session)
    trainer.train(2)
    trainer.close()
    micro = ["micro 0", "micro 1", "micro 2"] if accumulated == 3 else []
    assert session.calls == [0, *micro, 1, *micro]
    assert session.attached == trainer.model_parts
    assert trainer.closed
    assert not session.closed


def test_documented_loop_numbers_steps_and_micro_batches(
    net: nn.Sequential, session: SessionJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())[0]
    monkeypatch.setattr(rankdump, "attach", lambda model: session, raising=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    names = {"rankdump": rankdump, "model": net, "loss": torch.sum, "optimizer": optimizer}
    exec(text, {**names, "loader": [[X, X], [X]]})
    assert session.calls == [0, "micro 0", "micro 1", 1, "micro 0"]


def test_documented_loop_dumps_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's calls have the arguments that a session takes."""
    text = re.findall(r"(?s)```python\n(.*?)```", PAGE.read_text())[1]
    opened = create_autospec(rankdump.Session, instance=True)
    monkeypatch.setattr(rankdump.Session, "from_environment", lambda: opened)
    batches = [np.ones((2, 3))] * 2
    exec(text, {"rankdump": rankdump, "batches": batches, "weight": np.ones((3, 4))})
    assert [call[0] for call in opened.method_calls] == [*["step", "dump", "dump"] * 2, "close"]
    sides = [call.args[2:4] for call in opened.dump.call_args_list]
    assert sides == [("input", 0), ("output", 0)] * 2


def test_error_of_rankdump_reaches_no_loop(net: nn.Module, failing_session: SessionJournal) -> None:
    accelerator = StandInAccelerator(every=2)
    accelerate.attach(accelerator, net, session=failing_session)
    train_with(accelerator, net, 3)


def test_error_of_the_job_passes_through(net: nn.Module, session: SessionJournal) -> None:
    accelerator = StandInAccelerator(every=1)
    accelerate.attach(accelerator, net, session=session)
    with pytest.raises(RuntimeError, match="does not require grad"):
        accelerator.backward(torch.ones(1))


def test_copies_of_an_attached_model_are_plain(net: nn.Module, session: SessionJournal) -> None:
    """As for an exponential moving average of the weights."""
    loop = StandInFabric()
    fabric.attach(loop, net, session=session)
    copy.deepcopy(net)(X)
    assert session.calls == [0, "micro 0"]


@pytest.mark.parametrize(
    ("attach", "arguments", "message"),
    [
        (accelerate.attach, (3, X), "type builtins.int, without `accumulate`.*Accelerator"),
        (accelerate.attach, (StandInAccelerator(1),), "no model is given; allowed: torch.nn.Mod"),
        (accelerate.attach, (StandInAccelerator(1), X), "a model of type torch.Tensor is not"),
        (fabric.attach, (None,), "type builtins.NoneType, without `backward`.*lightning.Fabric"),
        (deepspeed.attach, (nn.Linear(1, 1),), "without `global_steps`.*deepspeed.initialize"),
        (torchtitan.attach, (nn.Linear(1, 1),), "without `train_step`.*torchtitan.trainer"),
    ],
)
def test_wrong_argument_is_named_with_what_is_allowed(
    attach: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        attach(*arguments)
    assert "\n" not in str(caught.value)

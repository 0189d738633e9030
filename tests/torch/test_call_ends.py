"""Ends of operator calls, on which triggers for overflows and exceptions decide."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.model_hook import attach_model

AT = "Default/network-"


class Overflowing(nn.Module):
    """Multiplies in place, beyond what the type can hold."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor)


class Cnn(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)
        self.scale = Overflowing(factor)
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(2 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.scale(self.bn(self.conv(x))))
        return self.fc(self.drop(torch.flatten(x, 1)).nan_to_num(0, 0, 0))


def test_overflow_is_found_with_its_inputs(deciding, observed) -> None:
    """The operator that first wrote infinities is known when its call is over, with the input
    it had before, in place or not; every call is settled once, after its tensors."""
    recorder, model = deciding, Cnn(3e38)
    kept: list[Tensor] = []
    model.scale.register_forward_pre_hook(lambda module, args: kept.append(args[0].clone()))
    with observed(model, recorder), torch.no_grad():
        model(torch.randn(2, 1, 8, 8) * 1e3)
    scale, act, drop = (
        f"{AT}Cnn/{name}-op0"
        for name in ("scale-Overflowing/Overflowing", "act-ReLU/ReLU", "drop-Dropout/Dropout")
    )
    assert recorder.overflowed == {scale, act, drop}
    assert recorder.settlements[2] == (scale, False)
    assert np.array_equal(recorder.one(scale, "input").array, kept[0].numpy())
    assert np.isinf(recorder.one(scale, "output").array).any()
    assert recorder.one(act, "input").data == recorder.one(scale, "output").data
    forward = [name for name, _ in recorder.settlements if name.startswith("Default/")]
    assert forward == recorder.names_by_end
    assert len(set(forward)) == len(forward) == 7
    assert not any(raised for _, raised in recorder.settlements)
    assert not recorder.warnings


def test_finite_model_has_no_overflow(deciding, observed) -> None:
    """Forward, backward, parameters and gradients of a finite step: nothing stands out."""
    recorder, model = deciding, Cnn(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with observed(model, recorder):
        model(torch.randn(2, 1, 8, 8, requires_grad=True)).sum().backward()
        optimizer.step()
    assert recorder.overflowed == set()
    settled = [name for name, _ in recorder.settlements]
    assert set(settled) == {name for name, _, _ in recorder.keys}


def test_overflow_in_the_backward_is_found(deciding, observed) -> None:
    """A gradient that is not finite is found with the operator that gave it, and its input."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    recorder, model = deciding, nn.Sequential(nn.Linear(2, 2), Root())
    with observed(model, recorder):
        nn.init.zeros_(model[0].bias)
        model(torch.zeros(1, 2)).sum().backward()
    root = "Gradients/" + AT + "Sequential/1-Root/Root-op0"
    assert root in recorder.overflowed
    assert recorder.one(root, "input").array.tolist() == [[1, 1]]
    assert "Gradients/0.weight" in recorder.overflowed


def test_overflow_of_a_gradient_counts_and_of_a_weight_does_not(deciding, observed) -> None:
    """What stands in a model is no overflow, whatever its value; what the backward gave is."""
    recorder, model = deciding, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    model.register_buffer("table", torch.tensor([torch.inf]), persistent=False)
    nn.init.constant_(model[1].weight, torch.inf)
    with observed(model, recorder):
        model[0].weight.grad = torch.full((2, 2), torch.nan)
    assert recorder.overflowed == {"Gradients/0.weight"}
    assert np.isinf(recorder.one("1.weight", "output").array).all()
    assert recorder.one("table", "output").constant


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        if x.sum() > 0:
            raise ValueError("no positive sums")
        return y


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Identity(), Fragile()))


FRAGILE = AT + "Sequential/0-Sequential/1-Fragile/Fragile-op0"


def test_error_is_reported_for_the_innermost_call_only(deciding, observed) -> None:
    """The operator an error comes from is told with its inputs; those around it are just over."""
    recorder, model = deciding, nested()
    recorder.by_reference = True
    with observed(model, recorder), pytest.raises(ValueError, match="no positive"):
        model(torch.ones(2))
    assert recorder.raised == [FRAGILE]
    assert recorder.keys == [(FRAGILE, "input", 0)]
    settled = [name for name, _ in recorder.settlements]
    inner, outer = AT + "Sequential/0-Sequential/Sequential-op0", AT + "Sequential/Sequential-op0"
    assert settled[1:] == [FRAGILE, inner, outer]
    assert not recorder.held


def test_input_changed_by_the_call_that_raised_is_lost(deciding, observed) -> None:
    """What the operator wrote over before it failed is a counted loss, never a wrong tensor."""

    class Spoiling(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.add_(1) @ y

    recorder, model = deciding, Spoiling()
    recorder.by_reference = True
    with observed(model, recorder), pytest.raises(RuntimeError):
        model(torch.ones(2, 3), torch.ones(2, 3))
    name = AT + "Spoiling/Spoiling-op0"
    assert recorder.raised == [name]
    assert recorder.keys == [(name, "input", 1)]
    assert recorder.lost == [(name, TensorSide.INPUT, "changed_in_place")]


class Wrapping(nn.Module):
    """What a container does about an error that came out of its part."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.part = Fragile()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.part(x)
        except ValueError as error:
            if self.answer == "again":
                raise
            if self.answer == "cause":
                raise RuntimeError("the part failed") from error
            if self.answer == "context":
                raise RuntimeError("the part failed")  # noqa: B904
            if self.answer == "inside":
                return self.part(-x)
        if self.answer == "own":
            raise ValueError("no positive sums")
        return self.part(-x)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        ("again", ["part-Fragile/Fragile-op0"]),
        ("cause", ["part-Fragile/Fragile-op0"]),
        ("context", ["part-Fragile/Fragile-op0"]),
        ("inside", ["part-Fragile/Fragile-op0"]),
        ("caught", ["part-Fragile/Fragile-op0"]),
        # Its own error, though it looks the same and may lie where the other one did.
        ("own", ["part-Fragile/Fragile-op0", "Wrapping-op0"]),
    ],
)
def test_error_is_reported_for_the_part_that_raised_it(deciding, observed, answer, raised) -> None:
    """A container raised only what did not come out of a part of it, however it is passed on."""
    recorder, model = deciding, nn.Sequential(Wrapping(answer))
    with observed(model, recorder):
        for _ in range(2):
            with contextlib.suppress(ValueError, RuntimeError):
                model(torch.ones(2))
    at = AT + "Sequential/0-Wrapping/"
    first = [name for name in recorder.raised if name.startswith(at)]
    assert first[: len(raised)] == [at + name for name in raised]
    assert len(recorder.raised) == 2 * len(raised)
    assert AT + "Sequential/Sequential-op0" not in recorder.raised


def test_calls_while_the_script_handles_an_error_have_not_raised(deciding, observed) -> None:
    """A model that is run inside an `except` block did not raise what is handled there."""
    recorder, model = deciding, nested()
    with observed(model, recorder):
        try:
            raise KeyError("elsewhere")
        except KeyError:
            model(-torch.ones(2))
            with pytest.raises(ValueError, match="no positive"):
                model(torch.ones(2))
    assert recorder.raised == [FRAGILE.replace("op0", "op1")]


def test_error_is_freed_when_the_script_releases_it(deciding, observed) -> None:
    """Nothing of ours keeps alive what a caught error held: out of memory can be recovered from."""
    kept: list[weakref.ref[Tensor]] = []

    class Hungry(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            large = x * 2
            kept.append(weakref.ref(large))
            raise MemoryError

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hungry = Hungry()

        def forward(self, x: Tensor) -> bool:
            with contextlib.suppress(MemoryError):
                self.hungry(x)
            return kept[0]() is None

    gc.disable()
    try:
        recorder, model = deciding, Patient()
        with observed(model, recorder):
            assert model(torch.ones(2))
    finally:
        gc.enable()
    assert recorder.raised == [AT + "Patient/hungry-Hungry/Hungry-op0"]


def test_compiled_region_that_raised_is_reported(deciding, observed) -> None:
    """The call that stands for a region raised, not the module inside, which is the same call."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        def fail(*args: Tensor) -> None:
            raise ValueError("compiled badly")

        return fail

    torch._dynamo.reset()
    recorder, model = deciding, nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend=backend)
    with observed(model, recorder), pytest.raises(ValueError, match="compiled badly"):
        model(torch.ones(1, 2))
    assert recorder.raised == [AT + "Sequential/0-Linear/Linear-op0"]


# -- backward operators


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y + z


def test_backward_ends_with_its_last_gradient(deciding, observed) -> None:
    """It is settled once, when the gradients of all that it read and that want one are there."""
    recorder, model = deciding, Two()
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with observed(model, recorder):
        first, second = model(x, y, torch.ones(1))
        (first + second).backward()
    name = "Gradients/" + AT + "Two/Two-op0"
    assert recorder.settlements.count((name, False)) == 1
    assert recorder.settled_with[name] == 4


class Passing(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y * 2


def test_backward_that_passes_a_gradient_through_ends(deciding, observed) -> None:
    """A tensor that is returned as it came has its gradient on both sides before the end."""
    recorder, model = deciding, Passing()
    x, y = torch.ones(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True)
    with observed(model, recorder):
        first, second = model(x, y)
        (second + first).backward()
    name = "Gradients/" + AT + "Passing/Passing-op0"
    assert recorder.settlements.count((name, False)) == 1
    assert recorder.settled_with[name] == 4


def test_backward_without_expected_gradients_ends_at_once(deciding, observed) -> None:
    """An operator on data alone, or whose results nobody wants, is over when it was seen."""
    recorder, model = deciding, nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    recorder.wanted = lambda name, side: side is TensorSide.INPUT
    with observed(model, recorder):
        model(torch.ones(1, 2)).sum().backward()
    gradients = {name for name, _ in recorder.settlements if name.startswith("Gradients/Default/")}
    assert gradients == {name for name in recorder.names if name.startswith("Gradients/")}
    assert len(gradients) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_backward_is_one_operator(deciding, observed, use_reentrant) -> None:
    """Gradients that hooks of the forward and of its recomputation see belong together."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region = Region()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, x * 1, use_reentrant=use_reentrant)

    recorder, model = deciding, Net()
    with observed(model, recorder):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    region = "Gradients/" + AT + "Net/region-Region/Region-op0"
    assert recorder.names.count(region) == 1
    assert recorder.settlements.count((region, False)) == 1
    assert recorder.settled_with[region] == 2
    recomputed = [name for name, _ in recorder.settlements if name.startswith("Recompute/")]
    assert recomputed == [name for name in recorder.names_by_end if name.startswith("Recompute/")]


def test_interrupted_calls_end_once(deciding) -> None:
    """What an interrupt left open is forgotten with its iteration."""

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    recorder, model = deciding, nn.Sequential(Interrupted())
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    assert recorder.settlements == []
    hook.iteration_begins(1, armed=True)
    hook.detach()
    assert recorder.settlements == []


def test_forward_calls_begin_before_their_tensors(recorder, observed) -> None:
    """Law: in the order in which they begin, outer ones first; a repeated call is none."""

    class Repeating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.fc, x, use_reentrant=False)

    entered_with: dict[str, int] = {}
    recorder.begin_call = lambda graph, name: entered_with.setdefault(name, len(recorder.taken))
    model = nn.Sequential(nn.Identity(), Repeating())
    with observed(model, recorder):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    names = ["Sequential", "0-Identity/Identity", "1-Repeating/Repeating"]
    names += ["1-Repeating/fc-Linear/Linear"]
    full = [f"{AT}Sequential/{name}-op0" for name in names]
    assert list(entered_with) == full
    first = {name: [t.op_name for t in recorder.taken].index(name) for name in full}
    assert all(entered_with[name] <= first[name] for name in full)
    assert any(name.startswith("Recompute/") for name, *_ in recorder.keys)


def test_hook_failure_warning_names_type_and_message(recorder, observed) -> None:
    """Law: a loss has all that its tensor would have had."""
    lost: list[tuple[object, ...]] = []
    recorder.count_loss = lambda *place: lost.append(place)
    model = nn.Linear(2, 2)
    with observed(nn.Sequential(model), recorder):
        model.weight.grad = torch.ones(2, 2).to_sparse()
    place = (0, "Parameter", "Gradients/0.weight", TensorSide.OUTPUT, 0, "unsupported_sparse")
    assert place in lost

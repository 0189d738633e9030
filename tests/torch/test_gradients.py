"""Gradients, parameters, and operators that are recomputed within the backward."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankdump._core.record import TensorSide
from rankdump._frameworks.operator_names import OperatorScope
from rankdump._frameworks.torch.internals import BackwardStep
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.recomputation import (
    ForwardContext,
    TorchOperatorCall,
    choose_repeated_call,
    find_region_start,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def test_gradients_equal_those_of_autograd(recorder, observed) -> None:
    """Gradients of an operator's inputs and results equal those of torch.autograd.grad."""
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    hidden = model.first(x)
    acted = torch.relu(hidden)
    result = model.last(acted)
    wanted = torch.autograd.grad(result.sum(), [x, hidden, acted, result])
    with observed(model, recorder):
        model(x).sum().backward()
    at = "Gradients/Default/network-Net/"
    for name, side, expected in [
        ("first-Linear/Linear-op0", "output", wanted[0]),
        ("first-Linear/Linear-op0", "input", wanted[1]),
        ("act-ReLU/ReLU-op0", "output", wanted[1]),
        ("act-ReLU/ReLU-op0", "input", wanted[2]),
        ("last-Linear/Linear-op0", "output", wanted[2]),
        ("last-Linear/Linear-op0", "input", wanted[3]),
        ("Net-op0", "output", wanted[0]),
        ("Net-op0", "input", wanted[3]),
    ]:
        assert np.array_equal(recorder.one(at + name, side).array, expected.numpy()), (name, side)
    backward = [name for name in recorder.names if name.startswith("Gradients/")]
    assert len(backward) == len(set(backward)) == 4
    assert backward.index(at + "last-Linear/Linear-op0") < backward.index(
        at + "first-Linear/Linear-op0"
    )
    assert x._backward_hooks is None or not x._backward_hooks
    assert not recorder.warnings


def test_gradient_hooks_hold_no_tensors(recorder, observed) -> None:
    """Activations are freed as early as without us."""
    import weakref

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with observed(model, recorder):
        kept: list[weakref.ref[Tensor]] = []
        handle = model[0].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
        result = model(torch.ones(1, 2))
        handle.remove()
        result.sum().backward()
        del result
        assert kept[0]() is None


def test_backward_run_twice_is_two_events(recorder, observed) -> None:
    """A second backward through the same call is recorded as such."""
    model = nn.Tanh()
    x = torch.ones(1, requires_grad=True)
    with observed(model, recorder):
        y = model(x)
        y.backward(retain_graph=True)
        y.backward()
    name = "Gradients/Default/network-Tanh/Tanh-op0"
    assert recorder.names.count(name) == 2
    assert recorder.keys.count((name, "output", 0)) == 2


def test_inference_and_frozen_parameters_have_no_gradients(recorder, observed) -> None:
    """Without gradients none are recorded, and there is no warning."""
    model = Net()
    model.first.requires_grad_(False)
    with observed(model, recorder):
        with torch.inference_mode():
            model(torch.ones(1, 3))
        model(torch.ones(1, 3)).sum().backward()
    names = {name for name, _, _ in recorder.keys if name.startswith("Gradients/")}
    assert "Gradients/first.weight" not in names
    assert "Gradients/last.weight" in names
    assert recorder.one("first.weight", "output").op_type == "Parameter"


def test_parameter_gradients_are_those_that_the_optimizer_uses(recorder, observed) -> None:
    """A gradient is the clipped one of the step; a parameter is its value after the step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with observed(model, recorder):
        for _ in range(3):  # accumulation: one iteration, one step
            (model(torch.ones(4, 2)).sum() * 100).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        used = model.weight.grad.clone()
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    gradient = recorder.one("Gradients/weight", "output")
    assert gradient.op_type == "Parameter"
    assert np.array_equal(gradient.array, used.numpy())
    weight = recorder.one("weight", "output")
    assert np.array_equal(weight.array, model.weight.detach().numpy())
    assert np.array_equal(weight.array, (before - 0.5 * used).numpy())


@pytest.mark.parametrize("named", [False, True])
def test_parameter_gradients_of_a_closure_are_those_of_its_own_step(
    recorder, observed, named
) -> None:
    """Law: the gradients of the step before, which the closure clears, are not this step's."""
    model, x = Net(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (model(x) * 100).sum().backward()
    stale = model.first.weight.grad.clone()
    found: list[Tensor] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        found.append(model.first.weight.grad.clone())
        return loss.item()

    with observed(model, recorder):
        optimizer.step(closure=closure) if named else optimizer.step(closure)
        optimizer.zero_grad()
    recorded = recorder.one("Gradients/first.weight", "output").array
    assert np.array_equal(recorded, found[-1].numpy())
    assert not np.array_equal(recorded, stale.numpy())


def test_parameter_gradients_without_an_optimizer_are_read_at_the_end(recorder, observed) -> None:
    """A hand-written update leaves its gradients to the end of the iteration."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with observed(model, recorder):
        model(torch.ones(1, 2)).sum().backward()
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters()).step()  # not ours
    assert recorder.one("Gradients/weight", "output").array.tolist() == [[1, 1]]
    assert recorder.keys.count(("Gradients/weight", "output", 0)) == 1


def test_sparse_gradient_is_counted_as_lost(recorder, observed) -> None:
    """An embedding's sparse gradient cannot be written, and is counted as lost."""
    model = nn.Embedding(4, 2, sparse=True)
    with observed(model, recorder):
        model(torch.tensor([1, 2])).sum().backward()
    assert ("Gradients/weight", TensorSide.OUTPUT, "unsupported_sparse") in recorder.lost


# -- recomputation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.lin(torch.tanh(x))))


class Checkpointed(nn.Module):
    """Regions that enter through a module or a function, one of them using its module twice."""

    def __init__(self, use_reentrant: bool, *, recompute: bool = True) -> None:
        super().__init__()
        self.one, self.shared, self.two = Block(), Block(), Block()
        self.use_reentrant, self.recompute = use_reentrant, recompute

    def twice(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x * 2))

    def forward(self, x: Tensor) -> Tensor:
        regions = (self.one, self.shared, self.twice, self.two, self.shared)
        for region in regions:
            if self.recompute:
                x = checkpoint(region, x, use_reentrant=self.use_reentrant)
            else:
                x = region(x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_has_the_number_of_its_forward(recorder, observed, use_reentrant) -> None:
    """Each call is repeated once, under its own number: the values are the forward's."""
    model = Checkpointed(use_reentrant)
    x = torch.randn(2, 4, requires_grad=True)
    with observed(model, recorder):
        model(x).sum().backward()
    forward = {t.op_name: t for t in recorder.taken if t.op_name.startswith("Default/")}
    repeated = [t for t in recorder.taken if t.op_name.startswith("Recompute/")]
    inputs = [t for t in repeated if t.side is TensorSide.INPUT]
    linears = [t.op_name for t in inputs if t.op_type == "Linear"]
    assert len(linears) == len(set(linears)) == 6
    given = {t.op_name: t for t in recorder.taken if t.side is TensorSide.INPUT}
    for again in inputs:
        name = again.op_name.removeprefix("Recompute/")
        assert name in forward
        assert again.data == given[name].data, name
    assert recorder.names.count("Default/network-Checkpointed/Checkpointed-op0") == 1
    assert len(recorder.events) == recorder.position
    assert not recorder.warnings


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_of_recomputed_calls_are_recorded_once(recorder, observed, use_reentrant) -> None:
    """Gradients carry the forward's number, are there once, and equal those without checkpoints."""

    def run(model: nn.Module) -> dict[tuple[str, str, int], bytes]:
        recorder.taken.clear()
        torch.manual_seed(3)
        x = torch.randn(2, 4, requires_grad=True)
        with observed(model, recorder):
            model(x).sum().backward()
        found = [t for t in recorder.taken if t.op_name.startswith("Gradients/Default/")]
        keyed = {(t.op_name, t.side.value, t.slot): t.data for t in found}
        assert len(keyed) == len(found)
        return keyed

    torch.manual_seed(2)
    model = Checkpointed(use_reentrant)
    checkpointed = run(model)
    model.recompute = False
    plain = run(model)
    inner = {key for key in plain if "/lin-Linear/" in key[0] or "/drop-Dropout/" in key[0]}
    assert len(inner) == 6 * 4
    assert {key: checkpointed.get(key) for key in inner} == {key: plain[key] for key in inner}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_several_backwards_finds_its_forwards(
    recorder, observed, use_reentrant
) -> None:
    """Micro-batches, each with its own backward, keep their numbers apart."""
    model = Checkpointed(use_reentrant)
    with observed(model, recorder):
        for _ in range(3):
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    given = {t.op_name: t.data for t in recorder.taken if t.side is TensorSide.INPUT}
    repeated = [name for name in given if name.startswith("Recompute/") and "Linear" in name]
    assert len(repeated) == 3 * 6
    for name in repeated:
        assert given[name] == given[name.removeprefix("Recompute/")], name


def test_forward_inside_a_backward_without_checkpoint_is_a_new_call(recorder, observed) -> None:
    """A module first called in a backward is a forward call, not a recomputation."""
    extra = nn.Tanh()

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return extra(gradient)

    with observed(extra, recorder):
        Calling.apply(torch.ones(1, requires_grad=True)).backward()
    assert recorder.names == ["Default/network-Tanh/Tanh-op0"]


def call(position: int, repeated: int = 0, **began_in) -> TorchOperatorCall:
    surroundings = ForwardContext(thread=1, **began_in)
    scope = OperatorScope("network-Net", "Net")
    names = scope.call_names(position)
    return TorchOperatorCall(scope, position, surroundings, names, None, repeated)


@pytest.mark.parametrize(
    ("calls", "same", "after", "expected"),
    [
        ([], (), None, None),
        ([call(5)], (), None, 5),
        ([call(1), call(4)], (1,), None, 1),
        ([call(1), call(4)], (1, 4), None, 4),
        ([call(1), call(4)], (4,), 0, 1),
        ([call(1), call(4), call(6)], (), 1, 4),
        ([call(1), call(4)], (), 9, 4),
        ([call(1), call(4, 1)], (), None, 1),
    ],
)
def test_repeated_call_is_chosen_by_region_and_data(calls, same, after, expected) -> None:
    """The repeated call follows from the region, else from data, else from repeat counts."""
    found = choose_repeated_call(calls, after=after, same_data=lambda c: c.position in same)
    assert (found and found.position) == expected


@pytest.mark.parametrize(
    ("program", "step", "start"),
    [
        ([], BackwardStep(0, 3, function=False), None),
        # Without a region around it the step tells nothing.
        ([call(1, next_node=0)], BackwardStep(0, 3, function=False), None),
        # Watched: the region of the call that made the node, from its first call.
        (
            [
                call(1, next_node=0),
                call(2, next_node=2, watcher=7),
                call(3, next_node=5, watcher=7),
                call(4, next_node=9, watcher=8),
            ],
            BackwardStep(0, 6, function=False),
            2,
        ),
        # Reentrant: what ran without gradients after the function's node was made.
        (
            [
                call(1, next_node=0),
                call(2, next_node=4, grad=False),
                call(3, next_node=4, grad=False),
                call(4, next_node=6, grad=False),
            ],
            BackwardStep(0, 3, function=True),
            2,
        ),
        # A function inside a watched region is no region of its own.
        (
            [call(1, next_node=0, watcher=7), call(2, next_node=4, watcher=7)],
            BackwardStep(0, 3, function=True),
            1,
        ),
    ],
)
def test_region_start_is_found_from_the_backward_step(program, step, start) -> None:
    """The node whose backward runs determines the repeated region."""
    assert find_region_start(program, step) == start


@pytest.mark.parametrize("at_once", [True, False])
def test_recomputations_of_four_threads_find_their_forwards(recorder, at_once) -> None:
    """Forward and backward of four threads at once or in turn, where one may have the identity of
    another that has ended: every repeated input is its forward's.
    """
    import threading

    model = nn.Sequential(Block(), Block())
    hook = attach_model(model, recorder, 0)
    hook.iteration_begins(0, armed=True)

    def work() -> None:
        for _ in range(5):
            x = torch.randn(2, 4, requires_grad=True)
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    hook.detach()
    given = {t.op_name: t.data for t in recorder.taken if t.side is TensorSide.INPUT}
    repeated = [name for name in given if name.startswith("Recompute/")]
    assert len([name for name in repeated if "Linear" in name]) == 4 * 5 * 2
    for name in repeated:
        assert given[name] == given[name.removeprefix("Recompute/")], name
    assert not recorder.warnings

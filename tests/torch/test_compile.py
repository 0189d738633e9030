"""Models compiled by torch.compile."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.armed_iteration import COMPILING
from torch import Tensor, nn

from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.module_tree import OTHER_COMPILED_WARNING

pytestmark = COMPILING


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Broken(Net):
    """Its forward breaks the graph in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        torch._dynamo.graph_break()
        return self.head(hidden)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def train(compiled: nn.Module, plain: nn.Module, recorder, *, attached: bool) -> list[Tensor]:
    torch.manual_seed(0)
    hook = attach_model(compiled, recorder, 0) if attached else None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        armed = step % 2 == 1
        recorder.armed = armed
        if hook is not None:
            hook.iteration_begins(step, armed)
        optimizer.zero_grad()
        loss = compiled(torch.randn(2, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if hook is not None:
            hook.iteration_ends(step, armed)
    if hook is not None:
        hook.detach()
    return [*losses, *(p.detach() for p in plain.parameters())]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Net, Broken])
def test_compiled_model_keeps_results_and_its_boundary_is_recorded(recorder, backend, kind) -> None:
    """Armed and unarmed iterations alternate: results are bit-identical, the model is recorded."""
    model = made(kind)
    expected = train(torch.compile(model, backend=backend), model, recorder, attached=False)
    torch._dynamo.reset()
    model = made(kind)
    got = train(torch.compile(model, backend=backend), model, recorder, attached=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    root = f"Default/network-{kind.__name__}/{kind.__name__}-op"
    assert recorder.names.count(root + "0") == 2  # one in each armed iteration
    assert root + "1" not in recorder.names
    keys = [key for key in recorder.keys if key[0] == root + "0"]
    assert keys == [(root + "0", "input", 0), (root + "0", "output", 0)] * 2
    assert "head.weight" in {name for name, _, _ in recorder.keys}
    assert [w for w in recorder.warnings if "torch.compile" in w]
    assert len(recorder.warnings) == 1


def test_operators_between_compiled_regions_are_recorded(recorder, observed) -> None:
    """After a graph break, modules that run outside the compiled regions are recorded."""
    model = made(Broken)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 4)
    expected = model(x)
    with observed(compiled, recorder):
        assert torch.equal(compiled(x), expected)
    for taken in recorder.taken:
        assert not np.isnan(taken.array).any()
    assert recorder.one("Default/network-Broken/Broken-op0", "output").shape == (2, 1)


@pytest.mark.parametrize("first_armed", [False, True])
def test_fullgraph_compilation_works_with_hooks(recorder, first_armed) -> None:
    """Compiling in an armed iteration gives one graph without us in it, as in an unarmed one."""
    model = made(Net)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(model.body, backend=backend, fullgraph=True)
    hook = attach_model(nn.Sequential(compiled), recorder, 0)
    for armed in (first_armed, not first_armed) * 6:
        recorder.armed = armed
        hook.iteration_begins(0, armed)
        compiled(torch.ones(2, 4))
    hook.detach()
    # The compiler guards on hooks, so it compiles again once, whatever comes after.
    assert 1 <= len(graphs) <= 2
    assert all(sorted(graph) == sorted(graphs[0]) for graph in graphs)
    assert not any("copy" in target or "frombuffer" in target for target in graphs[0])


def test_module_compiled_in_place_is_recorded_as_boundary(recorder, observed) -> None:
    """`module.compile()` is recorded as boundary, and restored afterwards."""
    model = made(Net)
    x = torch.randn(2, 4)
    expected = model(x)
    model.body.compile(backend="eager")
    call = model.body._compiled_call_impl
    with observed(model, recorder):
        assert model.body._compiled_call_impl is not call
        assert torch.equal(model(x), expected)
    assert model.body._compiled_call_impl is call
    body = "Default/network-Net/body-Sequential/Sequential-op0"
    assert np.array_equal(recorder.one(body, "input").array, x.numpy())
    assert recorder.one(body, "output").shape == (2, 4)
    assert "Default/network-Net/head-Linear/Linear-op0" in recorder.names


def test_compiled_function_around_a_model_keeps_results(recorder, observed) -> None:
    """A compiled function that calls an attached model neither breaks nor changes."""
    model = made(Net)
    x = torch.randn(2, 4)
    expected = model(x) * 2
    function = torch.compile(lambda value: model(value) * 2, backend="aot_eager", fullgraph=True)
    with observed(model, recorder):
        assert torch.equal(function(x), expected)
        model(x)
    assert recorder.names[0] == "Default/network-Net/Net-op0"


def test_export_and_trace_contain_no_hooks(recorder, observed) -> None:
    """Exporting or tracing in an armed iteration gives a program without us in it."""
    model = made(Net).eval()
    x = torch.randn(2, 4)
    with observed(model, recorder):
        program = torch.export.export(model, (x,))
        traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(program.module()(x), model(x))
    assert torch.equal(traced(x), model(x))
    text = str(program.graph) + str(traced.inlined_graph)
    assert "copy_" not in text


def test_operators_of_a_compiled_region_are_seen_where_it_runs_eagerly(recorder, observed) -> None:
    """What the warning about compiled regions advises."""
    model = made(Net)
    model.body.compile(backend="eager")
    x = torch.randn(2, 4)
    inner = "Default/network-Net/body-Sequential/0-Linear/Linear-op0"
    with observed(model, recorder):
        model(x)
        assert inner not in recorder.names
    assert any("set_stance('force_eager')" in text for text in recorder.warnings)
    with observed(model, recorder), torch.compiler.set_stance("force_eager"):
        model(x)
    assert inner in recorder.names


@pytest.mark.parametrize("attached", ["inner", "compiled", "plain"])
def test_model_that_was_compiled_by_another_object_is_a_warning(recorder, attached) -> None:
    """The hooks of the attached model do not run; a model that itself ran is not warned of."""
    torch._dynamo.utils.counters.clear()
    model = made(Net)
    compiled = torch.compile(model, backend="eager")
    seen = {"inner": model, "compiled": compiled, "plain": made(Net)}[attached]
    hook = attach_model(seen, recorder, 0)
    hook.iteration_begins(0, armed=True)
    if attached == "plain":
        seen(torch.ones(2, 4))
    compiled(torch.ones(2, 4)).sum().backward()
    hook.iteration_ends(0, armed=True)
    hook.detach()
    assert (OTHER_COMPILED_WARNING in recorder.warnings) == (attached == "inner")

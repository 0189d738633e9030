"""Descriptions of a model as a graph: nodes, edges, and source lines."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankdump
from rankdump._core.graph import GraphNode, TensorType
from rankdump._frameworks.model_observer import MAX_SOURCE_LINES, capture_source_lines
from rankdump._frameworks.torch.model_hook import attach_model

AT = "Default/network-"
RANKDUMP_FOLDER = f"{Path(str(rankdump.__file__)).parent}{os.sep}"


@pytest.fixture
def describing(recorder):
    recorder.is_describing = True
    return recorder


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 2, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(2)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return self.act(self.conv2(y) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.block = Residual()
        self.fc = nn.Linear(2 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(x))
        return self.fc(torch.flatten(x, 1))  # the last call


STEM = AT + "Net/stem-Conv2d/Conv2d-op0"
BLOCK = AT + "Net/block-Residual/"
CONV1, CONV2 = BLOCK + "conv1-Conv2d/Conv2d-op0", BLOCK + "conv2-Conv2d/Conv2d-op0"
BN = BLOCK + "bn1-BatchNorm2d/BatchNorm2d-op0"
ACT0, ACT1 = BLOCK + "act-ReLU/ReLU-op0", BLOCK + "act-ReLU/ReLU-op1"
FC, ROOT = AT + "Net/fc-Linear/Linear-op0", AT + "Net/Net-op0"


def makers(node: GraphNode) -> list[str]:
    """The inputs that operators or the outside made."""
    return [name for name in node.inputs if not name or "/" in name]


def run(model: nn.Module, recorder, observed, x: Tensor) -> None:
    with observed(model, recorder):
        model(x).sum().backward()


def test_graph_has_edges_of_a_residual_block(describing, observed) -> None:
    """A node's inputs are the innermost operators that made them, through in-place operators,
    views and arithmetic that no module does."""
    run(Net(), describing, observed, torch.randn(1, 1, 4, 4))
    assert {name: makers(describing.nodes[name]) for name in (CONV1, BN, ACT0, CONV2)} == {
        CONV1: [STEM],
        BN: [CONV1],
        ACT0: [BN],
        CONV2: [ACT0],
    }
    assert makers(describing.nodes[STEM]) == [""]
    assert makers(describing.nodes[BLOCK + "Residual-op0"]) == [STEM]
    assert sorted(makers(describing.nodes[ACT1])) == sorted([CONV2, STEM])
    assert makers(describing.nodes[FC]) == [ACT1]
    assert makers(describing.nodes[ROOT]) == [""]
    assert not describing.warnings


def test_graph_describes_every_operator_once(describing, observed) -> None:
    """Forward and backward: the nodes are exactly the operators that were events."""
    run(Net(), describing, observed, torch.randn(1, 1, 4, 4, requires_grad=True))
    assert set(describing.nodes) == set(describing.names)
    known = set(describing.nodes) | set(describing.parameters) | {""}
    assert all(set(node.inputs) <= known for node in describing.nodes.values())


def test_graph_node_has_type_module_and_results(describing, observed) -> None:
    """A node has type, outputs, arguments and parameters of its call."""
    run(Net(), describing, observed, torch.randn(2, 1, 4, 4))
    node = describing.nodes[CONV1]
    assert node.op_type == "Conv2d"
    assert node.outputs == (TensorType("float32", (2, 2, 2, 2)),)
    assert node.attributes["kernel_size"] == "(3, 3)"
    assert node.inputs[1:] == ("block.conv1.weight", "block.conv1.bias")
    weight = describing.parameters["block.conv1.weight"]
    assert weight.type == TensorType("float32", (2, 2, 3, 3))
    assert list(describing.parameters)[:2] == ["stem.weight", "stem.bias"]
    assert "block.bn1.running_mean" in describing.parameters


def test_gradient_nodes_read_the_gradient_nodes_of_their_readers(describing, observed) -> None:
    """A backward reads from the backwards of the operators that read its forward's result."""
    run(Net(), describing, observed, torch.randn(2, 1, 4, 4))

    def before(name: str) -> set[str]:
        return set(describing.nodes["Gradients/" + name].inputs)

    assert before(ROOT) == set()
    assert before(FC) == set()
    assert before(ACT1) == {"Gradients/" + FC}
    assert before(CONV2) == {"Gradients/" + ACT1}
    assert before(CONV1) == {"Gradients/" + BN}
    block = "Gradients/" + BLOCK + "Residual-op0"
    assert before(STEM) == {"Gradients/" + ACT1, "Gradients/" + CONV1, block}
    assert before(BLOCK + "Residual-op0") == {"Gradients/" + FC}
    conv = describing.nodes["Gradients/" + CONV1]
    assert conv.op_type == "Conv2d"
    assert conv.outputs == (TensorType("float32", (2, 2, 2, 2)),)
    assert conv.source == describing.nodes[CONV1].source


def test_source_lines_are_those_of_the_script(describing, observed) -> None:
    """The stack leads from this test to the line of the call, without torch or us."""
    run(Net(), describing, observed, torch.randn(1, 1, 4, 4))
    source = describing.nodes[FC].source
    assert source[-1].file == __file__
    assert (source[-1].function, source[-1].code) == (
        "forward",
        "return self.fc(torch.flatten(x, 1))  # the last call",
    )
    text = Path(__file__).read_text().splitlines()
    mine = [line for line in source if line.file == __file__]
    assert [line.function for line in mine][-3:] == [
        "test_source_lines_are_those_of_the_script",
        "run",
        "forward",
    ]
    assert all(text[line.line - 1].strip() == line.code for line in mine)
    inside = describing.nodes[CONV1].source
    assert [line.code for line in inside[-2:]] == [
        "x = self.block(self.stem(x))",
        "y = self.act(self.bn1(self.conv1(x)))",
    ]
    for node in describing.nodes.values():
        assert 0 < len(node.source) <= MAX_SOURCE_LINES
        assert not any("/torch/nn/" in line.file for line in node.source)
        assert not any(line.file.startswith(RANKDUMP_FOLDER) for line in node.source)


def test_source_lines_of_deep_stacks_are_the_innermost() -> None:
    """Of a recursion deeper than what is kept the outer frames are left out; code that exec made
    has lines without text."""

    def dive(depth: int) -> object:
        return dive(depth - 1) if depth else capture_source_lines()

    lines = dive(100)
    assert isinstance(lines, tuple)
    assert len(lines) == MAX_SOURCE_LINES
    assert {line.function for line in lines} == {"dive"}
    scope: dict[str, object] = {"lines_now": capture_source_lines}
    exec("def made():\n    return lines_now()\n", scope)
    made = scope["made"]()
    assert (made[-1].function, made[-1].line, made[-1].code) == ("made", 2, "")


def test_graph_without_gradients_finds_producers_by_identity_and_view(describing, observed) -> None:
    """Identity and views are traced without autograd; arithmetic between modules is not."""
    model = Net()
    for mode in (torch.no_grad, torch.inference_mode):
        describing.nodes.clear()
        with observed(model, describing), mode():
            model(torch.randn(1, 1, 4, 4))
        assert makers(describing.nodes[BN]) == [CONV1]
        assert makers(describing.nodes[ACT1]) == [""]
        assert makers(describing.nodes[FC]) == ([ACT1] if mode is torch.no_grad else [""])
        assert len(describing.nodes) == 9
    assert not describing.warnings


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never")


def test_graph_describes_a_call_that_raised(describing, observed) -> None:
    """A call that raised has inputs and source lines, and no outputs."""
    model = nn.Sequential(nn.Tanh(), Failing())
    with observed(model, describing), pytest.raises(ValueError, match="never"):
        model(torch.ones(1))
    node = describing.nodes[AT + "Sequential/1-Failing/Failing-op0"]
    assert node.inputs == (AT + "Sequential/0-Tanh/Tanh-op0",)
    assert node.outputs == ()
    assert node.source


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_graph_has_separate_nodes_for_recomputed_calls(describing, observed, use_reentrant) -> None:
    """A repeated call is a separate node with its forward's lines; gradients have nodes."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            self.last = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.inner, x, use_reentrant=use_reentrant))

    run(Checkpointed(), describing, observed, torch.ones(1, 2, requires_grad=True))
    linear = AT + "Checkpointed/inner-Sequential/0-Linear/Linear-op0"
    tanh = AT + "Checkpointed/inner-Sequential/1-Tanh/Tanh-op0"
    repeated = describing.nodes["Recompute/" + linear]
    assert repeated.source == describing.nodes[linear].source
    assert "Gradients/" + tanh in describing.nodes["Gradients/" + linear].inputs
    assert set(describing.nodes) == set(describing.names)
    assert not describing.warnings


def test_graph_describes_lazy_parameters_once_they_have_a_shape(describing, observed) -> None:
    """A lazy module's parameters are described when the iteration has given them a shape."""
    model = nn.Sequential(nn.LazyLinear(3))
    run(model, describing, observed, torch.ones(2, 5))
    assert describing.parameters["0.weight"].type == TensorType("float32", (3, 5))


def test_graph_has_edges_of_parameters_used_outside_their_module(describing, observed) -> None:
    """A weight that arithmetic reads is an input of the operators that read the result."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.embedding(x) @ self.embedding.weight.t())

    run(Tied(), describing, observed, torch.tensor([1, 2]))
    node = describing.nodes[AT + "Tied/act-Tanh/Tanh-op0"]
    embedding = AT + "Tied/embedding-Embedding/Embedding-op0"
    assert set(node.inputs) == {embedding, "embedding.weight"}


def test_graph_description_keeps_no_tensor_alive(describing) -> None:
    """Activations are freed as early as without us, and no reference outlives the iteration."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    hook = attach_model(model, describing, 0)
    hook.iteration_begins(0, armed=True)
    kept: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out)))
    gc.disable()
    try:
        result = model(torch.ones(1, 2))
        result.sum().backward()
        del result
        assert kept[0]() is None
    finally:
        gc.enable()
    hook.iteration_ends(0, armed=True)
    hook.detach()
    assert "Gradients/" + AT + "Sequential/0-Linear/Linear-op0" in describing.nodes


def test_graph_is_described_only_while_the_recorder_is_describing(
    recorder, observed, monkeypatch
) -> None:
    """In any other iteration no stack is walked and no edge is looked for."""

    def forbidden(**kwargs: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(
        "rankdump._frameworks.torch.graph_description.capture_source_lines", forbidden
    )
    run(Net(), recorder, observed, torch.randn(1, 1, 4, 4))
    assert not recorder.nodes
    assert not recorder.parameters
    assert not recorder.warnings


def test_failing_graph_description_loses_no_tensor(describing, observed, monkeypatch) -> None:
    """An internal error in describing is one warning; events and tensors are complete."""

    def broken(**kwargs: object) -> None:
        raise RuntimeError("no stack")

    monkeypatch.setattr("rankdump._frameworks.torch.graph_description.capture_source_lines", broken)
    model = nn.Sequential(nn.Tanh())
    run(model, describing, observed, torch.ones(1, requires_grad=True))
    (warning,) = describing.warnings
    assert warning == "a hook of rankdump failed, data may be missing: RuntimeError: no stack"
    assert len(describing.taken) == 8
    assert not describing.nodes

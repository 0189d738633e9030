"""Operators inside compiled regions, handed over by custom operators in the compiled code."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.armed_iteration import COMPILING
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from rankdump._core.record import TensorSide
from rankdump._frameworks.operator_names import list_call_leaves
from rankdump._frameworks.torch.compiled_regions import (
    TracedLeaf,
    TracedSide,
    compiled_call_receivers,
    format_side,
    parse_side,
)
from rankdump._frameworks.torch.model_hook import attach_model
from rankdump._frameworks.torch.module_tree import COMPILED_WARNING
from rankdump._frameworks.torch.tensors import CompiledTensor, make_compiled_source

pytestmark = [*COMPILING, pytest.mark.slow]

STEPS, ROWS, WIDTH = 4, 16, 8
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not (shutil.which("g++") or shutil.which("clang++")),
            reason="inductor needs a C++ compiler, and this machine has none",
        ),
    ),
]


@dataclasses.dataclass
class Parts:
    """A result with fields, one of them no tensor."""

    hidden: Tensor
    rest: tuple[Tensor, int]


class Inner(nn.Module):
    """Reads keyword inputs and nested containers, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float, extra: dict[str, list[Tensor]]) -> Parts:
        return Parts(self.linear(x) * scale + extra["a"][0], (x, 3))


class Block(nn.Module):
    """Fused by a compiler: pointwise chains, an in-place module, a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()
        self.gelu = nn.GELU()
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(self.norm(x), scale=2.0, extra={"a": [x]})
        hidden = self.relu(self.gelu(parts.hidden) + parts.rest[0])
        return self.head(self.twice(self.drop(self.twice(hidden))))


class Broken(Block):
    """Its forward breaks the graph in the middle, and draws no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x) * self.norm(x)
        torch._dynamo.graph_break()
        return self.head(self.gelu(hidden))


class Checkpointed(Block):
    """A part of the region is recomputed in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.twice, self.norm(x), use_reentrant=False))


class Vectorized(Block):
    """A part of the region is transformed by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.func.vmap(self.twice)(self.norm(x)))


class Branching(Block):
    """A part of the region is a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cond(x.sum() > 0, self.twice, self.gelu, (self.norm(x),)))


class Pointwise(Block):
    """Few modules: inductor calls g++ for each part that it fuses."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gelu(self.twice(x)))


@dataclasses.dataclass
class Run:
    """What a training computed, and how often something was compiled."""

    losses: list[float]
    compilations: int


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def train(
    kind: type[nn.Module],
    backend: str | None,
    recorder: Any = None,
    *,
    inside: bool = True,
    passes: int = 1,
    in_place: bool = False,
    autocast: bool = False,
) -> Run:
    """Train in iterations of which every second one is armed; backwards follow all forwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = kind()
    model, counter = plain, CompileCounterWithBackend(backend or "eager")
    if backend and in_place:
        plain.compile(backend=counter)
    elif backend:
        model = torch.compile(plain, backend=counter)
    hook = attach_model(model, recorder, 0, inside_compiled=inside) if recorder else None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(STEPS):
        armed = step % 2 == 1
        if hook is not None:
            recorder.armed = armed
            hook.iteration_begins(step, armed)
        optimizer.zero_grad()
        found: list[Tensor] = []
        for _ in range(passes):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found.append(model(torch.randn(ROWS, WIDTH)).float().square().mean())
        for loss in found:
            loss.backward()
        optimizer.step()
        losses += [loss.item() for loss in found]
        if hook is not None:
            hook.iteration_ends(step, armed)
    if hook is not None:
        hook.detach()
        assert not recorder.open
    return Run(losses, counter.frame_count)


def train_eager(kind: type[nn.Module], make_recorder: Callable[[], Any], **options: Any) -> Any:
    recorder = make_recorder()
    train(kind, None, recorder, **options)
    return recorder


@pytest.fixture
def make_recorder(recorder: Any) -> Callable[[], Any]:
    return type(recorder)


def assert_same_tensors(got: Any, expected: Any, tolerance: float) -> None:
    """Compare what two recorders took, tensor by tensor; of one key in the order of its calls."""
    assert Counter(got.keys) == Counter(expected.keys)
    assert sorted(got.settlements) == sorted(expected.settlements)
    places: dict[Any, list[Any]] = {}
    for taken in expected.taken:
        places.setdefault((taken.op_name, taken.side, taken.slot), []).append(taken)
    for taken in got.taken:
        other = places[taken.op_name, taken.side, taken.slot].pop(0)
        place = f"{taken.op_name} {taken.side} {taken.slot}"
        assert (taken.argument, taken.dtype) == (other.argument, other.dtype), place
        np.testing.assert_allclose(
            taken.array, other.array, rtol=tolerance, atol=tolerance, err_msg=place
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_of_a_region_are_recorded_as_in_eager_mode(recorder, make_recorder, backend):
    """Same names, slots, sides, values and ends of calls; nothing compiled for an armed step."""
    without = train(Block, backend)
    run = train(Block, backend, recorder)
    assert run.losses == without.losses
    assert run.compilations == without.compilations == 1
    assert not recorder.warnings
    assert not recorder.lost
    # Inductor draws other random numbers for a dropout than torch, so it is compared by itself.
    if backend != "inductor":
        assert_same_tensors(recorder, train_eager(Block, make_recorder), 0)
    else:
        assert Counter(recorder.keys) == Counter(train_eager(Block, make_recorder).keys)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_inside_a_region_are_those_of_eager_mode(recorder, make_recorder, backend):
    """Without random numbers, inductor's values differ from those of eager mode by rounding."""
    in_place = backend == "aot_eager"
    run = train(Broken, backend, recorder, in_place=in_place)
    assert run.losses == train(Broken, backend, in_place=in_place).losses
    tolerance = 1e-5 if backend == "inductor" else 0
    assert_same_tensors(recorder, train_eager(Broken, make_recorder), tolerance)


def find_taken(recorder: Any, name: str, side: TensorSide) -> list[Any]:
    return [taken for taken in recorder.taken if (taken.op_name, taken.side) == (name, side)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_belong_to_their_forward_call(recorder, make_recorder, backend):
    """Three forward passes, then three backward passes: each gradient has its call's number."""
    train(Block, backend, recorder, passes=3)
    assert_same_tensors(recorder, train_eager(Block, make_recorder, passes=3), 0)
    assert "Gradients/Default/network-Block/twice-Linear/Linear-op5" in recorder.names


@pytest.mark.parametrize("backend", BACKENDS[2:])
def test_reduced_precision_differs_by_its_rounding(recorder, backend):
    """Inductor keeps values of fused operators in float32; one that is recorded is rounded."""
    without = train(Pointwise, backend, autocast=True)
    run = train(Pointwise, backend, recorder, autocast=True)
    np.testing.assert_allclose(run.losses, without.losses, rtol=2**-6)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_graph_of_a_region_has_no_producers_from_reused_memory(recorder, backend):
    """Of an operator inside, parameters and types are described, and no generated code."""
    recorder.is_describing = True
    train(Block, backend, recorder)
    node = recorder.nodes["Default/network-Block/twice-Linear/Linear-op1"]
    assert node.inputs == ("", "twice.weight", "twice.bias")
    assert [kind.shape for kind in node.outputs] == [(ROWS, WIDTH)]
    files = {line.file for each in recorder.nodes.values() for line in each.source}
    assert __file__ in files
    assert not any("eval_with_key" in file or "torchinductor" in file for file in files)


def test_unarmed_iterations_record_nothing(recorder):
    model = torch.compile(Block(), backend="aot_eager")
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    recorder.armed = False
    hook.iteration_begins(0, armed=False)
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    hook.iteration_ends(0, armed=False)
    # A forward of an iteration that is not armed has no gradients in one that is.
    loss = model(torch.ones(ROWS, WIDTH)).sum()
    assert recorder.asked == 0
    recorder.armed = True
    hook.iteration_begins(1, armed=True)
    loss.backward()
    assert not recorder.taken
    hook.detach()
    assert compiled_call_receivers.get(0) is None


@pytest.mark.parametrize("kind", [Checkpointed, Vectorized, Branching])
def test_parts_without_custom_operators_are_named_once(recorder, kind):
    """Where torch fails to compile our operator, it is not inserted, and the region still runs."""
    run = train(kind, "aot_eager", recorder)
    assert run.losses == train(kind, "aot_eager").losses
    (warning,) = [text for text in recorder.warnings if "no custom operator there" in text]
    assert f"network-{kind.__name__}/twice-Linear" in warning
    names = set(recorder.names)
    assert f"Default/network-{kind.__name__}/twice-Linear/Linear-op0" not in names
    assert f"Default/network-{kind.__name__}/head-Linear/Linear-op0" in names


def test_region_compiled_before_is_reported(recorder):
    model = torch.compile(Block(), backend="aot_eager")
    model(torch.ones(ROWS, WIDTH))
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    model(torch.ones(ROWS, WIDTH))
    hook.iteration_ends(0, armed=True)
    (warning,) = recorder.warnings
    assert "attach the model before the first call of the region" in warning
    torch.compiler.reset()
    hook.iteration_begins(1, armed=True)
    model(torch.ones(ROWS, WIDTH))
    hook.iteration_ends(1, armed=True)
    hook.detach()
    assert "Default/network-Block/norm-LayerNorm/LayerNorm-op0" in recorder.names


def test_whole_graph_is_compiled_with_the_operators_in_it(recorder):
    """`fullgraph` accepts them, also in a compiled function around a model."""
    model, counter = Block(), CompileCounterWithBackend("aot_eager")
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    function = torch.compile(lambda x: model(x).sum(), backend=counter, fullgraph=True)
    for step in range(STEPS):
        recorder.armed = step % 2 == 1
        hook.iteration_begins(step, recorder.armed)
        function(torch.ones(ROWS, WIDTH)).backward()
        hook.iteration_ends(step, recorder.armed)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert sum("rankdump" in target for target in targets) >= 2 * len(list(model.modules()))
    root = "Default/network-Block/Block-op0"
    assert recorder.names.count(root) == recorder.names.count("Gradients/" + root) == 2
    taken = len(recorder.taken)
    hook.detach()
    function(torch.ones(ROWS, WIDTH))
    assert len(recorder.taken) == taken


def test_tensors_of_other_classes_are_counted(recorder):
    """torch has no rule for our operators on them, so they stay outside, with their reason."""
    model = nn.Sequential(nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager")
    hook = attach_model(compiled, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    compiled(TwoTensor(torch.ones(2), torch.ones(2)))
    hook.iteration_ends(0, armed=True)
    hook.detach()
    inner = "Default/network-Sequential/0-ReLU/ReLU-op0"
    lost = [each for each in recorder.lost if each[0] == inner]
    assert lost == [
        (inner, TensorSide.INPUT, "unsupported_tensor_class"),
        (inner, TensorSide.OUTPUT, "unsupported_tensor_class"),
    ]


def test_exports_and_copies_are_without_operators(recorder):
    model, x = Block().eval(), torch.ones(ROWS, WIDTH)
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        assert "rankdump" not in str(program.graph)
    torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)(x)
    assert not recorder.names
    hook.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_older_torch_is_refused_in_one_line(recorder, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    model = torch.compile(Block(), backend="aot_eager")
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    model(torch.ones(ROWS, WIDTH))
    hook.iteration_ends(0, armed=True)
    hook.detach()
    assert recorder.warnings == [
        "inside_compiled needs torch 2.13 or later, and this is 2.12.1: of compiled regions only "
        "the boundary is seen",
        COMPILED_WARNING,
    ]
    assert recorder.names == ["Default/network-Block/Block-op0"]


def test_error_inside_a_region_passes_through(recorder):
    """The region fails by itself, and the next iteration is recorded as any other."""
    model = torch.compile(nn.Sequential(nn.Embedding(4, 2), nn.ReLU()), backend="aot_eager")
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    model(torch.tensor([1]))
    with pytest.raises(IndexError):
        model(torch.tensor([9]))
    hook.iteration_ends(0, armed=True)
    hook.iteration_begins(1, armed=True)
    model(torch.tensor([2]))
    hook.iteration_ends(1, armed=True)
    hook.detach()
    assert not recorder.open
    ends = dict(recorder.settlements)
    assert ends["Default/network-Sequential/Sequential-op1"] is True
    assert recorder.names.count("Default/network-Sequential/1-ReLU/ReLU-op0") == 2


def test_failing_recorder_does_not_reach_the_region(recorder, monkeypatch):
    def fail(observation: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(recorder, "observe", fail)
    without = train(Block, "aot_eager")
    assert train(Block, "aot_eager", recorder).losses == without.losses
    assert any("a hook of rankdump failed" in text for text in recorder.warnings)


def test_side_of_a_call_is_read_as_it_was_written():
    leaves = (TracedLeaf(0, "args.0", "g"), TracedLeaf(2, "kwargs.a b.0", "u"))
    text = format_side(3, "network-Net/a b-Linear", "output", True, leaves)
    assert parse_side(text) == TracedSide(
        3, "network-Net/a b-Linear", TensorSide.OUTPUT, True, leaves
    )


def test_slots_of_a_traced_call_are_those_of_an_eager_one(recorder):
    """Law: both list the leaves of arguments alike; else a tensor has another name inside."""
    args = ((torch.ones(1), None, [torch.ones(2), 3]), Parts(torch.ones(3), (torch.ones(4), 1)))
    kwargs = {"mask": {"x": torch.ones(5), 7: "text"}, "flag": True}

    class Reader(nn.Module):
        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return torch.ones(1)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def forward(self) -> Tensor:
            return self.reader(*args, **kwargs)

    model = torch.compile(Caller(), backend="eager", fullgraph=True)
    hook = attach_model(model, recorder, 0, inside_compiled=True)
    hook.iteration_begins(0, armed=True)
    model()
    hook.detach()
    expected = [
        (leaf.slot, leaf.argument)
        for leaf in list_call_leaves(args, kwargs)
        if isinstance(leaf.value, Tensor)
    ]
    name = "Default/network-Caller/reader-Reader/Reader-op0"
    found = find_taken(recorder, name, TensorSide.INPUT)
    assert [(taken.slot, taken.argument) for taken in found] == expected


def test_source_of_compiled_code_lasts_as_a_copy():
    """Compiled code reuses memory without counting changes: a reference would show other values."""
    tensor = torch.ones(4)
    source = make_compiled_source(tensor)
    assert isinstance(source, CompiledTensor)
    assert source.get_version() is None
    assert source.has_changed()
    lasting = source.make_memory_source()
    tensor.zero_()
    assert lasting.copy_elements() == torch.ones(4).numpy().tobytes()

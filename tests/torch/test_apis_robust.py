"""API dumps of unusual scripts, which must run as they do without rankdump."""

# torch types what stands in a module as `Tensor | Module`, and compiled modules as functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import armed_iteration
from support.process_groups import end_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.api_framework import TorchApiHook
from rankdump._frameworks.torch.module_tree import COMPILED_WARNING


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.gelu(self.first(x)) * 2)


def watched(
    recorder, model: nn.Module | None = None, **options
) -> AbstractContextManager[TorchApiHook]:
    return armed_iteration.watched(recorder, model, **{"retain_backward": True, **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_api_calls_with_narrow_types_are_recorded(recorder, dtype) -> None:
    x = torch.ones(4)
    with watched(recorder):
        x.to(dtype).view(2, 2).float()
    dtypes = [taken.dtype for taken in recorder.taken]
    narrow = str(dtype).removeprefix("torch.")
    assert dtypes == ["float32", narrow, narrow, narrow, narrow, "float32"]
    assert not recorder.lost


def test_api_hook_does_not_change_autocast(recorder) -> None:
    model, x = Net(), torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        with watched(recorder, model):
            found = model(x)
            found.sum().backward()
    assert torch.equal(found, expected)
    assert {t.dtype for t in recorder.taken if t.side == "output"} == {"bfloat16"}


def test_unreadable_tensors_of_api_calls_are_counted(recorder) -> None:
    """Complex, sparse, empty, expanded and meta tensors; unreadable ones are counted."""
    with watched(recorder, filter_data=False):
        torch.add(torch.ones(2, dtype=torch.complex64), 1)
        torch.mul(torch.eye(3).to_sparse(), 2)
        torch.add(torch.ones(0), 1)
        torch.add(torch.ones(1).expand(4), 1)
        torch.add(torch.ones(2, device="meta"), 1)
        torch.sort(torch.tensor([2, 1]))
    assert {reason for _, _, reason in recorder.lost} == {"unsupported_sparse", "no_data"}
    assert [t.array.tolist() for t in recorder.taken if t.op_type == "Torch_sort"] == [
        [2, 1],
        [1, 2],
        [1, 0],
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_modules_within_modules_are_calls(recorder, fused) -> None:
    """An encoder layer, its fused path as well, computes what it computes without us."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    model.train(not fused)
    x = torch.randn(2, 3, 8)
    grad = torch.no_grad if fused else torch.enable_grad
    with grad():
        expected = model(x)
        with watched(recorder, model):
            found = model(x)
    assert torch.equal(found, expected)
    seen = {t.op_type for t in recorder.taken}
    whole = {"NN_TransformerEncoderLayer", "LAYER_0"}
    assert seen == whole if fused else seen > whole | {"NN_MultiheadAttention", "NN_LayerNorm"}
    assert not any(kind.startswith(("Tensor", "Torch", "Functional")) for kind in seen)


def test_api_calls_of_threads_are_recorded(recorder) -> None:
    """Calls of several threads at once: each number once, each result its own input doubled."""
    model = Net()

    def work(value: float) -> None:
        for _ in range(20):
            model(torch.full((1, 4), value)).sum().backward()

    with watched(recorder, model, layers_once=True):
        threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    keys = [(t.op_name, t.argument) for t in recorder.taken]
    assert len(keys) == len(set(keys))
    doubled = [
        t for t in recorder.taken if t.op_type == "Tensor___mul__" and "_forward" in t.op_name
    ]
    assert len(doubled) == 2 * 4 * 20
    outputs = {t.op_name: t.array for t in doubled if t.side == "output"}
    inputs = {t.op_name: t.array for t in doubled if t.side == "input"}
    assert all(np.array_equal(inputs[name] * 2, outputs[name]) for name in outputs)


def test_error_of_the_script_passes_through(recorder) -> None:
    """It is the script's own; what it came out of is said to have raised, and all goes on."""
    model = nn.Sequential(nn.Linear(4, 4))
    with watched(recorder, model):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        torch.sigmoid(torch.ones(2))
    raised = [name for name, raised in recorder.settlements if raised]
    assert raised == ["Torch_matmul_0_forward", "NN_Linear_0_forward"]
    assert "Torch_sigmoid_0_forward" in recorder.names


def test_internal_error_does_not_reach_the_script(recorder) -> None:
    """A scope that fails costs what it was asked about, and is said."""

    def broken(call: object) -> bool:
        raise ValueError("no")

    model = Net()
    hook = TorchApiHook(model, recorder, 0, ApiOptions(scope=broken))
    hook.iteration_begins(0, armed=True)
    assert torch.equal(model(torch.ones(1, 4)), hooked_off(hook, model))
    assert recorder.warnings == ["a hook of rankdump failed, data may be missing: ValueError: no"]
    assert not recorder.taken


def hooked_off(hook: TorchApiHook, model: nn.Module) -> Tensor:
    hook.detach()
    return model(torch.ones(1, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_of_functions_keep_results(recorder) -> None:
    """torch.func gives the same results, with batches and gradients within gradients."""
    x = torch.randn(3, 4)

    def energy(row: Tensor) -> Tensor:
        return torch.sin(row).mul(row).sum()

    expected = torch.func.vmap(torch.func.grad(energy))(x), torch.func.hessian(energy)(x[0])
    with watched(recorder):
        found = torch.func.vmap(torch.func.grad(energy))(x), torch.func.hessian(energy)(x[0])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_functions_that_torch_calls_for_the_script_are_recorded(recorder) -> None:
    """A function that torch calls for the script counts, also in code excluded from compilation."""
    x = torch.ones(2, requires_grad=True)
    with watched(recorder):
        checkpoint(functional.gelu, x, use_reentrant=True)
        torch.func.vmap(torch.sin)(x.detach()[None])
        graph = torch.fx.symbolic_trace(Net())
        recorder.taken.clear()
        graph(torch.ones(1, 4))
    assert recorder.entries[:2] == ["Functional_gelu_0_forward", "Torch_sin_0_forward"]
    traced = {t.op_name for t in recorder.taken}
    assert traced >= {"Functional_gelu_2_forward", "Tensor___mul___0_forward"}


def test_modes_of_the_script_may_begin_and_end_within_ours(recorder) -> None:
    """A mode that begins or ends while ours is installed removes only itself."""
    model, theirs = Net(), Watching()
    theirs.__enter__()
    device = torch.device("cpu")
    device.__enter__()
    hook = TorchApiHook(model, recorder, 0)
    hook.iteration_begins(0, armed=True)
    model(torch.ones(2, 4))
    device.__exit__(None, None, None)
    theirs.__exit__(None, None, None)
    heard = len(theirs.heard)
    with torch.device("meta"):
        assert torch.randn(2).is_meta
    with Watching() as other:
        torch.sigmoid(torch.ones(2))
        hook.detach()
        assert armed_iteration.modes() == [other]
    assert not armed_iteration.modes()
    assert len(theirs.heard) == heard > 0
    assert "sigmoid" in other.heard
    assert "gelu" in theirs.heard
    assert not recorder.warnings
    assert {"Functional_gelu_0_forward", "Torch_sigmoid_0_forward"} <= set(recorder.names)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
class TestCompiled:
    pytestmark = armed_iteration.COMPILING

    @pytest.fixture(autouse=True)
    def fresh_compiler(self) -> None:
        torch._dynamo.reset()

    def test_compiled_function_is_neither_read_nor_compiled_again(self, recorder, backend) -> None:
        """It is compiled whole; nothing inside is a call, the calls around it are."""

        def inside(x: Tensor, weight: Tensor) -> Tensor:
            return functional.linear(functional.gelu(x @ weight), weight)

        compiled = torch.compile(inside, backend=backend, fullgraph=True)
        x, weight = torch.ones(4, 4), torch.randn(4, 4, requires_grad=True)
        expected = inside(x, weight)
        found = expected
        with watched(recorder):
            for _ in range(3):
                found = torch.sigmoid(compiled(x, weight))
                found.sum().backward()
        assert torch.equal(found, torch.sigmoid(expected))
        assert {t.op_type for t in recorder.taken} == {"Torch_sigmoid", "Tensor_sum"}
        assert recorder.warnings == [COMPILED_WARNING]

    @pytest.mark.parametrize("in_place", [False, True])
    def test_compiled_module_is_neither_read_nor_compiled_again(
        self, recorder, backend, in_place
    ) -> None:
        """Its boundary hides it, and the region is not compiled again because of us."""
        graphs = torch._dynamo.utils.counters["stats"]
        model = nn.Sequential(Net(), nn.ReLU())
        x = torch.ones(3, 4)
        expected = model(x)
        if in_place:
            model[0].compile(backend=backend, fullgraph=True)
        else:
            model[0] = torch.compile(model[0], backend=backend, fullgraph=True)
        model(x)
        compiled = graphs["unique_graphs"]
        with watched(recorder, model):
            found = [model(x) for _ in range(3)]
        assert all(torch.equal(expected, each) for each in (*found, model(x)))
        assert graphs["unique_graphs"] == compiled
        assert {t.op_type for t in recorder.taken} == {"LAYER_0", "LAYER_1", "NN_ReLU"}
        assert recorder.warnings == [COMPILED_WARNING]


def test_copied_models_and_a_detached_model_have_no_hooks(recorder) -> None:
    """A copy of the model has nothing of ours; detached, the model and torch have neither."""
    model = Net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with watched(recorder, model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model(torch.ones(1, 4))
        seen = len(recorder.events)
        for each in copies:
            torch.nn.utils.parameters_to_vector(each.parameters())
    for name, module in model.named_modules():
        now = dict(vars(module))
        assert {key: now[key] for key in before[name]} == before[name]
    count = len(recorder.events)
    for each in (*copies, model):
        each(torch.ones(1, 4))
    assert len(recorder.events) == count >= seen
    assert not armed_iteration.modes()


def test_calls_of_an_evaluation_are_no_repetitions(recorder) -> None:
    """An evaluation is recorded like any other pass, and nothing of it as a repetition."""
    model = Net()
    with watched(recorder, model), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 4))
    assert "NN_Linear_3_forward" in recorder.names
    assert not [t for t in recorder.taken if "recompute" in t.argument]
    assert not [name for name in recorder.names if "_backward" in name]


def test_calls_in_generators_are_recorded(recorder) -> None:
    """A mode in an open generator disturbs neither the script's modes nor ours."""

    def batches() -> Generator[Tensor]:
        with torch.no_grad():
            for value in range(3):
                yield torch.full((1, 4), float(value)) * 2

    model = Net()
    with watched(recorder, model):
        for x in batches():
            model(x)
    assert [n for n in recorder.names if n.startswith("Tensor___mul__") and "forward" in n] == [
        f"Tensor___mul___{number}_forward" for number in range(6)
    ]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_autograd_functions_are_recorded(recorder) -> None:
    """Calls inside autograd functions are recorded, also in the backward, not as repetitions."""
    x = torch.ones(2, requires_grad=True)
    with watched(recorder):
        Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert {"Tensor___mul___0_forward", "Tensor___mul___1_forward"} <= set(recorder.names)
    assert not [t for t in recorder.taken if "recompute" in t.argument]


@pytest.fixture
def alone(tmp_path: Path) -> Generator[None]:
    """A job of one rank."""
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    end_group()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrappers_of_distributed_training_make_no_calls(recorder, alone, wrap) -> None:
    """Names are those without the wrapper, its collectives are events, results stay the same."""

    def run(*, attached: bool) -> list[float]:
        torch.manual_seed(0)
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with watched(recorder, model) if attached else nullcontext():
            for _ in range(2):
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    assert run(attached=True) == run(attached=False)
    recorder.wait_for_ends()
    collectives = {event.collective.kind.name for event in recorder.events if event.collective}
    # The broadcast agrees on buckets. On a single rank the other wrapper has no collectives.
    reducer = {"ALL_REDUCE", "BROADCAST"}
    assert collectives == (reducer if wrap is DistributedDataParallel else set())
    calls = [name for name in recorder.names if name.startswith(("Tensor", "Torch", "Functional"))]
    stems = ("Functional_gelu", "Tensor___mul__", "Tensor_sum")
    forward = {f"{stem}_{number}_forward" for stem in stems for number in (0, 1)}
    assert {name for name in calls if name.endswith("forward")} == forward
    assert "LAYER_first_forward" in recorder.names


def test_collectives_of_a_wrapper_added_later_are_recorded(recorder, alone) -> None:
    """Its collectives are recorded from the first call of the wrapped model on."""
    model = Net()
    with watched(recorder, model):
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped(torch.ones(2, 4)).sum().backward()
    collectives = [event.collective for event in recorder.events if event.collective]
    assert [each.kind.name for each in collectives].count("ALL_REDUCE") == 2

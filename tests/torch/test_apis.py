"""API calls of torch as records: names, places, values, gradients, stacks, numbers."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import json
import linecache
import math
import operator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.armed_iteration import watched
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from rankdump._frameworks.api_calls import ApiOptions
from rankdump._frameworks.torch.api_framework import TorchApiHook
from rankdump._frameworks.torch.apis.api_recorder import REPEATED_BACKWARD_WARNING
from rankdump._layout.api_tree import ApiCall, join_tensor_name, parse_place

GOLDEN = Path(__file__).parents[1] / "golden" / "troubleshooter" / "1.0.17-all" / "rank0"


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return functional.relu(x + y)


class SmallNet(nn.Module):
    """The network of the golden dump."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.drop = nn.Dropout(0.0)
        self.fc1 = nn.Linear(4 * 4 * 4, 16)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        x = self.blocks(x)
        x = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)
        x = self.act(self.fc1(self.drop(x)))
        x = torch.matmul(x, self.fc2.weight.t()) + self.fc2.bias
        return functional.log_softmax(x, dim=-1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(2, 3, 8, 8, generator=generator)
    return images, torch.randint(0, 10, (2,), generator=generator)


def train(steps: int, recorder, options: ApiOptions | None, *, first: int = 0) -> list[float]:
    """Train the golden network; the calls of steps before `first` are only counted."""
    torch.manual_seed(0)
    net = SmallNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    recorder.armed = False
    hook = None if options is None else TorchApiHook(net, recorder, 0, options)
    losses = []
    for step in range(steps):
        images, labels = batch(step)
        recorder.armed = hook is not None and step >= first
        if hook is not None:
            hook.iteration_begins(step, recorder.armed)
        optimizer.zero_grad()
        loss = functional.nll_loss(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if hook is not None:
            hook.iteration_ends(step, recorder.armed)
    if hook is not None:
        hook.detach()
    return losses


def names(recorder) -> list[str]:
    return [join_tensor_name(t.op_name, parse_place(t.argument)) for t in recorder.taken]


def test_api_hook_records_the_golden_dump(recorder) -> None:
    """Names, order, shapes and statistics are those of troubleshooter."""
    lines = (GOLDEN / "torch_api_dump_info.json").read_text().splitlines()
    golden = [json.loads(line) for line in lines]
    losses = train(2, recorder, ApiOptions(retain_backward=True, layers_once=True))
    assert names(recorder) == [record[0] for record in golden]
    for taken, (_, _, marks, dtype, shape, statistics) in zip(recorder.taken, golden, strict=True):
        assert f"torch.{taken.dtype}" == dtype
        assert list(taken.shape) == shape
        assert parse_place(taken.argument).recomputed is bool(marks)
        values = taken.array.astype(np.float64)
        found = [values.max(), values.min(), values.mean()]
        assert np.allclose(found, statistics, rtol=1e-4, atol=1e-5)
    assert losses == train(2, recorder, None)
    assert not recorder.warnings
    assert not recorder.open


def test_api_call_is_an_event_with_a_stack(recorder) -> None:
    """Calls are events in program order, each ends once, and forward calls have stacks."""
    train(1, recorder, ApiOptions(retain_backward=True))
    forward = [name for name in recorder.names if name.endswith("_forward")]
    assert forward[:2] == ["LAYER_stem_forward", "NN_Conv2d_0_forward"]
    assert recorder.entries == forward
    # A mark keeps the dots of its module's path: the stack file has them.
    assert [name.replace(".", "_") for name in recorder.stacks] == forward
    assert "LAYER_blocks.0.conv_forward" in recorder.stacks
    assert [name for name, _ in recorder.settlements if name.endswith("_forward")] == forward
    assert {raised for _, raised in recorder.settlements} == {False}


def test_api_call_numbers_continue_over_iterations(recorder) -> None:
    """Iterations that are not armed only count calls."""
    train(3, recorder, ApiOptions(), first=2)
    seen = {taken.op_name for taken in recorder.taken}
    assert {f"NN_Conv2d_{number}_forward" for number in (6, 7, 8)} <= seen
    assert "Tensor_permute_2_forward" in seen
    assert not {"NN_Conv2d_5_forward", "Tensor_permute_1_forward"} & seen


@pytest.mark.parametrize(("once", "marks"), [(True, 11), (False, 22)])
def test_layer_marks_are_recorded_at_each_call_or_once(recorder, once, marks) -> None:
    """A module is marked at each call, or once; a container's mark follows what is inside it."""
    train(2, recorder, ApiOptions(layers_once=once))
    found = [t for t in recorder.taken if t.op_type.startswith("LAYER_")]
    assert len(found) == marks
    assert {(t.shape, t.argument, float(t.array[0])) for t in found} == {((1,), "input", 0.0)}
    order = [t.op_name for t in recorder.taken]
    last = order.index("Functional_relu_0_forward")
    assert order.index("LAYER_blocks_0_forward") > last > order.index("LAYER_blocks_0_bn_forward")


OPERATORS = {
    "x + y": "Tensor___add__",
    "x.add(y)": "Tensor_add",
    "torch.add(x, y)": "Torch_add",
    "x * 2": "Tensor___mul__",
    "2 * x": "Tensor___rmul__",
    "1 - x": "Tensor___rsub__",
    "x / y": "Tensor___truediv__",
    "x ** 2": "Tensor___pow__",
    "-x": "Tensor___neg__",
    "x > y": "Tensor___gt__",
    "x == y": "Tensor___eq__",
    "x @ y": "Tensor___matmul__",
    "x.softmax(-1)": "Tensor_softmax",
    "functional.relu(x)": "Functional_relu",
    "functional.gelu(x)": "Functional_gelu",
    "functional.logsigmoid(x)": "Functional_logsigmoid",
    "functional.sigmoid(x)": "Functional_sigmoid",
    "functional.linear(x, y)": "Functional_linear",
    "functional.conv1d(x[None], y[:, :, None])": "Functional_conv1d",
    "functional.scaled_dot_product_attention(x, y, x)": ("Functional_scaled_dot_product_attention"),
    "torch.relu(x)": "Torch_relu",
    "torch.einsum('ij,jk->ik', x, y)": "Torch_einsum",
    "torch.linalg.norm(x)": "Torch_linalg_norm",
    "x.half()": "Tensor_half",
    "torch.cat([x, y])": "Torch_cat",
    "torch.ops.aten.tanh(x)": "Torch_tanh",
    "nn.LogSoftmax(dim=-1)(x)": "Functional_log_softmax",
    "-functional.relu(x)": "Functional_relu Tensor___neg__",
    "2 * functional.relu(x)": "Functional_relu Tensor___rmul__",
    "math.sqrt(4) * torch.relu(x)": "Torch_relu Tensor___rmul__",
    "2 * x.mul(2)": "Tensor_mul Tensor___rmul__",
    "float(len(x)) + x.add(1)": "Tensor_add Tensor___radd__",
    "x.mul(y) * torch.relu(x)": "Tensor_mul Torch_relu Tensor___mul__",
    "sum([x, y])": "Tensor___radd__ Tensor___add__",
    "operator.mul(2, x)": "Tensor___rmul__",
    "operator.add(x, y)": "Tensor___add__",
    "1 / x": "Tensor_reciprocal Tensor___mul__",
    "1 / nn.Parameter(x)": "Tensor_reciprocal Tensor___mul__",
    "x + nn.Parameter(y)": "Tensor___add__",
    "2 ** x": "Torch_pow",
    "x // 2": "Torch_floor_divide",
    "2 // x": "Torch_floor_divide",
    "2 % x": "Torch_remainder",
    "x % 2": "Tensor___mod__",
    "2 < x": "Tensor___gt__",
    "2 > x": "Tensor___lt__",
    "1 == x": "Tensor___eq__",
    "abs(x)": "Tensor___abs__",
    "x.abs()": "Tensor_abs",
    "x.neg()": "Tensor_neg",
    "x.pow(2)": "Tensor_pow",
    "x.lt(2)": "Tensor_lt",
    "x.__rmul__(2)": "Tensor___rmul__",
    "functional.softsign(x)": "Functional_softsign",
}


@pytest.mark.parametrize("text", OPERATORS)
def test_api_names_of_callables(recorder, text) -> None:
    """Operators, methods and functions have troubleshooter's names if it lists them."""
    space = {"x": torch.ones(2, 2), "y": torch.ones(2, 2), "torch": torch, "nn": nn}
    space |= {"functional": functional, "math": math, "operator": operator}
    exec(f"def call(x, y):\n    return {text}", space)
    with watched(recorder, filter_data=False):
        space["call"](space["x"], space["y"])
    assert recorder.names == [f"{name}_0_forward" for name in OPERATORS[text].split()]


def test_queries_and_creations_are_not_api_calls(recorder) -> None:
    """Queries, descriptions, copies, conversions of values, and rankdump's own calls."""
    x = torch.ones(3, 1, requires_grad=True)
    with watched(recorder, filter_data=False):
        _ = x.shape, x.size(0), x.dim(), x.numel(), len(x), x.dtype, x.device, x.is_cuda, x.grad
        _ = x.detach(), x.clone(), x.contiguous(), x[0], x.tolist(), x.data, x.T, repr(x), str(x)
        _ = torch.zeros(2), torch.tensor([1.0]), torch.ones_like(x), torch.is_tensor(x)
        _ = x[0].item(), bool(x.detach()[0] > 2), x.requires_grad_(), f"{x.detach()[0, 0]:.1f}"
    assert recorder.names == ["Tensor___gt___0_forward"]


class StrangeOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * 0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, StrangeOptimizer])
def test_calls_in_an_optimizer_step_are_not_recorded(recorder, kind) -> None:
    """Nor are those in zero_grad; calls of a closure are the script's."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], foreach=False) if kind is torch.optim.AdamW else kind([parameter])
    with watched(recorder):
        (parameter * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        lbfgs = torch.optim.LBFGS([parameter], max_iter=1)
        lbfgs.step(lambda: (parameter * 2).sum())
    assert [n for n in recorder.names if "_mul_" in n or "add" in n] == [
        "Tensor___mul___0_forward",
        "Tensor___mul___1_forward",
    ]


class Keywords(nn.Module):
    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return torch.add(input=x, other=extra["bias"])


def test_api_arguments_have_places(recorder) -> None:
    """Positions, keywords and parts of results; numbers are dumped without the filter."""
    x = torch.arange(6.0).reshape(2, 3)
    with watched(recorder, filter_data=False):
        torch.cat([x, x], dim=1)
        torch.max(x, 1)
        torch.clamp(x, min=0.5, max=4)
    seen = [(t.op_name, t.argument, t.dtype, t.shape) for t in recorder.taken]
    assert seen == [
        ("Torch_cat_0_forward", "input.0.0", "float32", (2, 3)),
        ("Torch_cat_0_forward", "input.0.1", "float32", (2, 3)),
        ("Torch_cat_0_forward", "input.1:=dim:int", "int64", ()),
        ("Torch_cat_0_forward", "output", "float32", (2, 6)),
        ("Torch_max_0_forward", "input.0", "float32", (2, 3)),
        ("Torch_max_0_forward", "input.1:int", "int64", ()),
        ("Torch_max_0_forward", "output.0", "float32", (2,)),
        ("Torch_max_0_forward", "output.1", "int64", (2,)),
        ("Torch_clamp_0_forward", "input.0", "float32", (2, 3)),
        ("Torch_clamp_0_forward", "input.1:=min:float", "float64", ()),
        ("Torch_clamp_0_forward", "input.2:=max:int", "int64", ()),
        ("Torch_clamp_0_forward", "output", "float32", (2, 3)),
    ]


def test_module_calls_with_nested_results_and_keywords(recorder) -> None:
    """An LSTM's states are `output.1.0`; a module's keywords have names."""
    model = nn.ModuleDict({"lstm": nn.LSTM(2, 3), "words": Keywords()})
    with watched(recorder, model):
        model["lstm"](torch.ones(4, 1, 2))
        model["words"](torch.ones(2), extra={"bias": torch.ones(2)})
    places = [t.argument for t in recorder.taken if t.op_type == "NN_LSTM"]
    assert places == ["input.0", "output.0", "output.1.0", "output.1.1"]
    added = [t.argument for t in recorder.taken if t.op_type == "Torch_add"]
    assert added == ["input.0:=input", "input.1:=other", "output"]


def test_repeated_backward_is_a_warning_once(recorder) -> None:
    x = torch.ones(2, requires_grad=True)
    hook = TorchApiHook(nn.Sequential(), recorder, 0, ApiOptions(retain_backward=True))
    hook.iteration_begins(0, armed=True)
    y = (x * 2).sum()
    for retain in (True, True, False):
        y.backward(retain_graph=retain)
    hook.detach()
    assert recorder.names.count("Tensor___mul___0_backward") == 3
    assert recorder.warnings == [REPEATED_BACKWARD_WARNING]


def test_filter_data_leaves_only_float_tensors_with_a_shape(recorder) -> None:
    """By default only floating-point tensors with a shape and elements are recorded."""
    with watched(recorder):
        for tensor in (
            torch.ones(2, dtype=torch.int64),
            torch.ones(2, dtype=torch.complex64),
            torch.tensor(True),
            torch.tensor(1.0),
            torch.ones(0),
            torch.ones(2),
        ):
            torch.add(tensor, tensor)
    assert [t.op_name for t in recorder.taken] == ["Torch_add_5_forward"] * 3
    assert len(recorder.events) == 6


def test_api_input_has_its_value_from_before_the_call(recorder) -> None:
    """Calls in place have their input from before and their output from after the call."""
    with watched(recorder):
        x = torch.tensor([-1.0, 2.0])
        x += 1
        x.mul_(3)
        functional.relu(x, inplace=True)
    values = [(t.op_type, t.array.tolist()) for t in recorder.taken]
    assert values == [
        ("Tensor___iadd__", [-1.0, 2.0]),
        ("Tensor___iadd__", [0.0, 3.0]),
        ("Tensor_mul_", [0.0, 3.0]),
        ("Tensor_mul_", [0.0, 9.0]),
        ("Functional_relu", [0.0, 9.0]),
        ("Functional_relu", [0.0, 9.0]),
    ]


def test_scope_option_is_called_once_per_call(recorder) -> None:
    """A call outside the scope is no event, nor is its backward; numbers stay the same."""
    asked: list[ApiCall] = []

    def relu(call: ApiCall) -> bool:
        asked.append(call)
        return call.api == "relu" and call.number == 1

    train(2, recorder, ApiOptions(retain_backward=True, scope=relu), first=0)
    assert set(names(recorder)) == {
        "Functional_relu_1_forward_input.0",
        "Functional_relu_1_forward_output",
        "Functional_relu_1_backward_input",
    }
    assert set(recorder.names) == {"Functional_relu_1_forward", "Functional_relu_1_backward"}
    stems = [call.name for call in asked if call.kind != "LAYER"]
    assert len(stems) == len(set(stems))
    assert {call.direction for call in asked} == {"forward"}
    assert ApiCall("LAYER", "blocks_0_conv", 0) in asked


def test_call_stacks_show_script_lines(recorder) -> None:
    """Frames of the user with source lines, innermost first; code without a source has no line."""
    linecache.clearcache()
    space = {"functional": functional, "x": torch.ones(2)}
    with watched(recorder):
        functional.silu(torch.ones(2))
        exec("def inner():\n    functional.silu(x)\ninner()", space)
    first = recorder.stacks["Functional_silu_0_forward"]
    line = test_call_stacks_show_script_lines.__code__.co_firstlineno + 5
    assert first[0] == (
        f"File {__file__}, line {line}, in test_call_stacks_show_script_lines, \n"
        " functional.silu(torch.ones(2))"
    )
    assert not [text for text in first if "/torch/nn/" in text or "/client/rankdump/" in text]
    second = recorder.stacks["Functional_silu_1_forward"]
    assert second[0] == "File <string>, line 2, in inner, \n"
    assert second[1] == "File <string>, line 3, in <module>, \n"


def test_call_stacks_without_filter_have_frames_of_torch(recorder) -> None:
    """Without the filter torch's frames are listed, and still none of rankdump."""
    with watched(recorder, filter_stack=False):
        functional.silu(torch.ones(2))
    stack = recorder.stacks["Functional_silu_0_forward"]
    assert "handle_torch_function" in stack[0]
    assert not [text for text in stack if "/client/rankdump/" in text]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.region(x)
            else:
                x = checkpoint(self.region, x, use_reentrant=self.use_reentrant)
        return self.last(x)

    def region(self, x: Tensor) -> Tensor:
        return functional.gelu(self.first(x)) * 2


@pytest.mark.parametrize("method", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_calls_are_recorded_as_repetitions(recorder, use_reentrant, method) -> None:
    """Repeated calls have numbers of their own and a mark, gradients those of the first call."""

    def run(reentrant: bool | None) -> dict[str, bytes]:
        recorder.taken.clear()
        torch.manual_seed(2)
        model = Checkpointed(reentrant)
        with watched(recorder, model, retain_backward=True):
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
            loss.backward() if method else torch.autograd.backward(loss)
        backward = [t for t in recorder.taken if t.op_name.endswith("_backward")]
        found = {t.op_name: t.data for t in backward}
        assert len(found) == len(backward)
        return found

    plain = run(None)
    assert set(plain) == {
        *(f"{stem}_{n}_backward" for n in (0, 1) for stem in ("Functional_gelu", "Tensor___mul__")),
        *(f"NN_Linear_{n}_backward" for n in (0, 1, 2)),
    }
    assert run(use_reentrant) == plain
    repeated = {t.op_name for t in recorder.taken if parse_place(t.argument).recomputed}
    assert {"NN_Linear_3_forward", "Functional_gelu_2_forward", "NN_Linear_4_forward"} <= repeated
    assert not {"NN_Linear_2_forward", "Functional_gelu_1_forward"} & repeated
    assert not any(raised for _, raised in recorder.settlements)


def test_calls_of_loader_workers_are_not_recorded(recorder) -> None:
    """Calls in a loader's processes are not the script's."""
    loader = DataLoader([torch.ones(2)] * 4, batch_size=2, num_workers=1)
    with watched(recorder):
        batches = list(loader)
        torch.sigmoid(batches[0])
    assert {t.op_type for t in recorder.taken} == {"Torch_sigmoid"}


def test_layer_marks_once_are_independent_of_marks_at_each_call(recorder) -> None:
    """A dump of statistics, then one of files: each layer has its file all the same."""
    hook = TorchApiHook(net := SmallNet(), recorder, 0, ApiOptions(layers_once=False))
    hook.iteration_begins(0, True)
    net(batch(0)[0])
    hook.record_with(recorder, ApiOptions(layers_once=True))
    recorder.taken.clear()
    net(batch(0)[0])
    net(batch(0)[0])
    hook.detach()
    marks = [taken.op_name for taken in recorder.taken if taken.op_type.startswith("LAYER_")]
    assert len(marks) == len(set(marks)) == 11

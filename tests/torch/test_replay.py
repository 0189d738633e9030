"""Replay of dumped calls: torch's own results are within their bounds, and wrong ones are not."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foreign_dumps import write_dump
from support.tree_builder import TreeBuilder
from torch.nn import functional

import rankdump
from rankdump._analysis.replay import (
    FLOAT_FORMATS,
    find_inner_unit,
    judge_result,
    replay_calls,
)
from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide
from rankdump._frameworks.torch.replayed_apis import (
    REPLAYED_APIS,
    RoundingUnits,
    compute_replay,
    find_replay_rule,
)
from rankdump.errors import CorruptedError, RankdumpError, UnsupportedError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "linear": (functional.linear, ((3, 40), (5, 40), (5,)), {}),
    "matmul": (torch.matmul, ((2, 3, 40), (2, 40, 4)), {}),
    "bmm": (torch.bmm, ((2, 3, 40), (2, 40, 4)), {}),
    "addmm": (torch.addmm, ((4,), (3, 40), (40, 4)), {"alpha": 0.5}),
    "conv2d": (functional.conv2d, ((2, 3, 8, 8), (4, 3, 3, 3), (4,)), {"padding": 1}),
    "sum": (torch.sum, ((5, 40),), {"dim": 1}),
    "mean": (torch.mean, ((5, 40),), {}),
    "add": (torch.add, ((5, 40), (5, 40)), {"alpha": 0.3}),
    "sub": (torch.sub, ((5, 40), (5, 40)), {}),
    "mul": (torch.mul, ((5, 40), (5, 40)), {}),
    "div": (torch.div, ((5, 40), (5, 40)), {}),
    "exp": (torch.exp, ((5, 40),), {}),
    "tanh": (torch.tanh, ((5, 40),), {}),
    "sigmoid": (torch.sigmoid, ((5, 40),), {}),
    "gelu": (functional.gelu, ((5, 40),), {}),
    "silu": (functional.silu, ((5, 40),), {}),
    "mish": (functional.mish, ((5, 40),), {}),
    "softplus": (functional.softplus, ((5, 40),), {}),
    "relu": (torch.relu, ((5, 40),), {}),
    "cat": (lambda a, b: torch.cat([a, b]), ((5, 4), (3, 4)), {}),
    "softmax": (functional.softmax, ((5, 40),), {"dim": -1}),
    "log_softmax": (functional.log_softmax, ((5, 40),), {"dim": -1}),
    "layer_norm": (functional.layer_norm, ((5, 40), [40], (40,), (40,)), {}),
    "rms_norm": (functional.rms_norm, ((5, 40), [40], (40,)), {"eps": 1e-6}),
    "batch_norm": (
        functional.batch_norm,
        ((6, 3, 4), (3,), "positive", (3,), (3,)),
        {"training": True},
    ),
    "mse_loss": (functional.mse_loss, ((5, 40), (5, 40)), {}),
    "scaled_dot_product_attention": (
        functional.scaled_dot_product_attention,
        ((2, 6, 16), (2, 6, 16), (2, 6, 16)),
        {"is_causal": True},
    ),
}


def make_arguments(shapes, dtype, seed, scale):
    """Return tensors of random elements, in one type."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        if isinstance(shape, list):
            found.append(shape)
        elif shape == "positive":
            found.append(torch.rand(3, generator=generator).to(dtype) + 0.5)
        else:
            found.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return found


def as_array(value):
    return value.to(torch.float32).numpy() if isinstance(value, torch.Tensor) else value


def judge(api, arguments, keywords, result, dtype, **units):
    """Return the verdict on a result of a call."""
    arrays = [as_array(each) for each in arguments]
    given = [arrays] if api == "cat" else arrays
    inner, unit = find_inner_unit(dtype), FLOAT_FORMATS[dtype].unit
    rule = find_replay_rule(api)
    assert rule is not None
    (found,) = compute_replay(rule, given, keywords, RoundingUnits(inner, unit, **units))
    return judge_result(as_array(result), found.value.numpy(), found.error.numpy(), dtype)


@pytest.mark.parametrize("api", CALLS)
@settings(max_examples=20)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 1 << 30),
    st.sampled_from([0.01, 1.0, 8.0]),
)
def test_results_of_torch_are_within_their_bounds(api, dtype, seed, scale):
    """Law: a correct kernel is never called wrong, whatever the values and the type."""
    function, shapes, keywords = CALLS[api]
    arguments = make_arguments(shapes, DTYPES[dtype], seed, scale)
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    verdict = judge(api, arguments, keywords, function(*copies, **keywords), dtype)
    assert verdict.is_within, verdict


@pytest.mark.parametrize("api", CALLS)
def test_wrong_elements_are_found(api):
    """One element that is off by a hundredth of the largest one is beyond its bound."""
    function, shapes, keywords = CALLS[api]
    arguments = make_arguments(shapes, torch.float32, 1, 1.0)
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    result = function(*copies, **keywords)
    flat = result.reshape(-1)
    flat[-1] += 0.01 * float(result.abs().max())
    verdict = judge(api, arguments, keywords, result, "float32")
    assert (verdict.beyond, verdict.place) == (1, tuple(extent - 1 for extent in result.shape))


def test_bound_follows_the_length_of_a_sum_and_the_type():
    """gamma(n) of Higham: a hundred times the elements, about a hundred times the bound."""
    bounds = {}
    for count in (100, 10_000):
        ones = np.ones(count, np.float32)
        bounds[count] = judge(
            "sum", [torch.from_numpy(ones)], {}, torch.tensor(0.0), "float32"
        ).bound
    assert bounds[10_000] / bounds[100] == pytest.approx(100 * 100, rel=0.05)
    half = judge("sum", [torch.ones(100)], {}, torch.tensor(100.0), "bfloat16")
    assert half.bound == pytest.approx(100 * 2**-8, rel=0.05)


def test_tf32_and_reduced_precision_widen_bounds():
    ones = [torch.ones(4, 8), torch.ones(4, 8)]
    wrong = torch.full((4, 4), 8.004)
    assert not judge("linear", ones, {}, wrong, "float32").is_within
    assert judge("linear", ones, {}, wrong, "float32", operand=2**-11).is_within
    half = torch.full((4, 4), 8.05)
    assert not judge("linear", ones, {}, half, "bfloat16").is_within
    assert judge("linear", ones, {}, half, "bfloat16", partial=2**-7).is_within


@pytest.mark.parametrize(
    ("dumped", "exact", "is_within"),
    [
        (np.inf, 1e39, True),
        (-np.inf, 1e39, False),
        (np.inf, 1.0, False),
        (np.nan, 1.0, False),
        (np.nan, np.nan, True),
        (1.0, np.nan, False),
        (0.0, 1e-39, True),
        (np.inf, np.inf, True),
    ],
)
def test_values_that_are_not_finite(dumped, exact, is_within):
    a, b, error = (np.array([value], np.float64) for value in (dumped, exact, 0.0))
    assert judge_result(a, b, error, "float32").is_within is is_within


def test_every_rule_takes_a_name_in_each_spelling():
    assert all(find_replay_rule(api) is not None for api in REPLAYED_APIS)
    for name in ("__add__", "add_", "__iadd__", "__radd__", "mul_", "__rsub__", "__matmul__"):
        assert find_replay_rule(name) is not None, name
    for name in ("dropout", "eval", "__class__", "__reduce__", "load", "rand", "all_reduce", ""):
        assert find_replay_rule(name) is None, name


# -- dumps


@pytest.fixture
def tensors(tmp_path):
    return write_dump("msprobe-tensor", tmp_path)


def test_calls_of_msprobe_are_replayed(tensors):
    """Every forward call of the dump that is on the list is within its rounding."""
    dump = rankdump.open(tensors)
    done = []
    for name in dict.fromkeys(entry.op_name for entry in dump.tensors(operator="*_forward")):
        with suppress(UnsupportedError):
            (found,) = replay_calls(dump, name)
            assert found.is_within, found
            done.append(found.name.removesuffix("_0_forward"))
    assert sorted(done) == [
        *("Functional_embedding", "Functional_layer_norm", "Functional_linear", "Tensor___mul__"),
        *("Tensor_float", "Tensor_mean", "Tensor_square", "Tensor_to", "Torch_cat", "Torch_split"),
    ]


def write_api_call(tree: TreeBuilder, rank: int, result: np.ndarray) -> None:
    """Write a call of linear as an API dump has it."""
    rng = np.random.default_rng(0)
    name, kind = "Functional_linear_0_forward", "Functional_linear"
    shapes = {"input.0": (3, 8), "input.1": (4, 8), "input.2:=bias": (4,)}
    for slot, (place, shape) in enumerate(shapes.items()):
        values = rng.normal(size=shape).astype(np.float32)
        tree.tensor(
            *(rank, 0, name, values), side=TensorSide.INPUT, slot=slot, op_type=kind, argument=place
        )
    tree.tensor(rank, 0, name, result, op_type=kind, argument="output")
    tree.complete(rank, 0)


@pytest.fixture
def two_ranks(tmp_path):
    """Two ranks with the same call; a bit of the second one's result is flipped."""
    tree, rng = TreeBuilder(tmp_path / "tree"), np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 8), (4, 8), (4,)))
    result = a @ b.T + c
    write_api_call(tree, 0, result)
    flipped = result.copy()
    flipped.view(np.uint32)[1, 2] ^= 1 << 18
    write_api_call(tree, 1, flipped)
    return tree.root


def test_text_that_an_api_dump_lacks_is_found(tmp_path):
    """The approximation of gelu is a text; with the default the result would be called wrong."""
    tree, x = TreeBuilder(tmp_path / "tree"), torch.linspace(-3, 3, 64)
    name, kind = "Functional_gelu_0_forward", "Functional_gelu"
    values = functional.gelu(x, approximate="tanh").numpy()
    tree.tensor(*(0, 0, name, x.numpy()), side=TensorSide.INPUT, op_type=kind, argument="input.0")
    tree.tensor(0, 0, name, values, op_type=kind, argument="output")
    tree.complete(0, 0)
    (found,) = replay_calls(rankdump.open(tree.root), name)
    assert found.is_within
    assert found.notes[-1].startswith("approximate='tanh' is assumed")


def test_rank_with_the_wrong_result_is_named(two_ranks, capsys):
    """The last line says on which rank a kernel was wrong, and on which it was not."""
    assert run_command_line(["replay", str(two_ranks), "Functional_linear_0_forward"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Functional_linear_0_forward, rank 0, iteration 0: within rounding"
    assert "at (1,2):" in lines[3]
    assert lines[3].endswith("1 of 12 elements are beyond")
    assert lines[-1] == (
        "2 calls replayed: not within the rounding of its type on rank 1; within it on rank 0"
    )
    words = ["replay", str(two_ranks), "Functional_linear_0_forward", "--rank", "0", "--json"]
    assert run_command_line(words) == 0
    (call,) = json.loads(capsys.readouterr().out)["calls"]
    assert (call["rank"], call["within"]) == (0, True)
    output = call["outputs"][0]
    assert (output["output"], output["shape"], output["beyond"]) == ("output.0", [3, 4], 0)
    assert 0 <= output["share"] <= 1


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Functional_dropout_0_forward", "no call Functional_dropout_0_forward; calls of torch"),
        ("Functional_linear_0_backward", "is no forward call of torch's API"),
        ("Default/fc/Linear-op0", "is no forward call of torch's API"),
        ("Tensor___gt___0_forward", "are not replayed; docs/comparing.md lists"),
    ],
)
def test_what_is_not_replayed_is_one_line(name, match, tensors, capsys):
    assert run_command_line(["replay", str(tensors), name]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert match in line


def test_statistics_are_not_enough(tmp_path):
    dump = rankdump.open(write_dump("msprobe-statistics", tmp_path))
    with pytest.raises(CorruptedError, match="on rank 0-1 the dump has statistics, but no tensors"):
        list(replay_calls(dump, "Functional_linear_0_forward"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda call: call["input_args"].pop(), "cannot be replayed from the arguments"),
        (lambda call: call["input_args"].append({"type": "slice"}), "not in the dump, slice"),
        (lambda call: call["input_kwargs"].update(weird={"type": "int", "value": 1}), "weird"),
        (lambda call: call["input_args"][1].update(data_name="x.pt"), "the file of input 1"),
    ],
)
def test_hostile_arguments_are_one_line(change, match, tensors):
    path = tensors / "step0" / "proc1" / "dump.json"
    body = json.loads(path.read_text())
    call = body["data"][
        "Torch.cat.0.forward" if "append" in match else "Functional.linear.0.forward"
    ]
    change(call)
    if "pop" in change.__code__.co_names:
        call["input_args"].pop()
    path.write_text(json.dumps(body))
    with pytest.raises(RankdumpError, match=match) as caught:
        list(replay_calls(rankdump.open(tensors), "Functional_linear_0_forward"))
    assert "\n" not in str(caught.value)


def test_lost_leaf_of_a_list_is_named(tmp_path):
    """An API dump with filtered data has no numbers, so lists have holes."""
    tree = TreeBuilder(tmp_path / "tree")
    values = np.ones(2, np.float32)
    name, kind = "Torch_cat_0_forward", "Torch_cat"
    tree.tensor(0, 0, name, values, side=TensorSide.INPUT, op_type=kind, argument="input.0.1")
    tree.tensor(0, 0, name, values, op_type=kind, argument="output")
    tree.complete(0, 0)
    with pytest.raises(CorruptedError, match="filter_data=False"):
        list(replay_calls(rankdump.open(tree.root), name))

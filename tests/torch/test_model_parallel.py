"""Layouts of parameters of Megatron and DeepSpeed, by stand-ins with the attributes of theirs."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankdump._core.tensor_layout import LayoutSource, TensorLayout, find_block_ranges
from rankdump._frameworks.torch.parameters import find_parameter_layouts

RANK, WORLD = 3, 8
TENSOR_RANKS = [2, 3]


@pytest.fixture(autouse=True)
def pretended_job() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of Megatron that knows the groups."""
    group = dist.new_group(TENSOR_RANKS)
    state: Any = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: group
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)


def find_layout(model: nn.Module, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
    named = list(model.named_parameters())
    finder = find_parameter_layouts(model, named).get(id(dict(named)[name]))
    return None if finder is None else finder(shape)


def divide(parameter: Any, dimension: int, stride: int = 1) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dimension, stride


@pytest.mark.usefixtures("megatron")
def test_partition_attributes_place_a_parameter() -> None:
    linear = nn.Linear(6, 4)
    divide(linear.weight, 0)
    layout = find_layout(linear, "weight", (4, 6))
    assert layout is not None
    assert (layout.source, layout.global_shape, layout.global_offset) == (
        LayoutSource.MEGATRON,
        (8, 6),
        (4, 0),
    )
    assert str(layout) == "tp 1/2 Shard(0) of [8, 6]"
    assert layout.mesh.list_ranks() == (2, 3)
    assert find_layout(linear, "bias", (4,)) is None


@pytest.mark.usefixtures("megatron")
def test_partition_stride_interleaves() -> None:
    """A fused gate and up projection: each rank has a half of both."""
    linear = nn.Linear(6, 4)
    divide(linear.weight, 0, stride=2)
    layout = find_layout(linear, "weight", (4, 6))
    assert layout is not None
    assert str(layout) == "tp 1/2 StridedShard(0, 2) of [8, 6]"
    assert find_block_ranges(layout, (4, 6)) == [[range(2, 4), range(6, 8)], [range(6)]]


def test_parameter_without_known_group_has_no_layout() -> None:
    linear = nn.Linear(6, 4)
    divide(linear.weight, 0)
    assert find_layout(linear, "weight", (4, 6)) is None


@dataclass
class ShardedTensor:
    """Attributes of megatron.core.dist_checkpointing.mapping.ShardedTensor."""

    key: str
    data: Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None


class Layer(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.fields = fields

    def sharded_state_dict(self, prefix: str = "") -> dict[str, object]:
        weight = self.inner.weight
        found = ShardedTensor("layers.inner.weight", weight.data, **self.fields)
        return {f"{prefix}inner.weight": found, "extra": {"version": object()}}


@pytest.mark.usefixtures("megatron")
def test_sharded_state_dict_knows_more_than_attributes() -> None:
    """Its key is the name in the whole model; an axis in front numbers the layer."""
    layer = Layer(
        local_shape=(4, 6),
        global_shape=(12, 8, 6),
        global_offset=(5, 4, 0),
        axis_fragmentations=(12, 2, 1),
        prepend_axis_num=1,
    )
    divide(layer.inner.weight, 0)
    layout = find_layout(nn.Sequential(layer), "0.inner.weight", (4, 6))
    assert layout is not None
    assert (layout.logical_name, layout.global_shape, layout.global_offset) == (
        "layers.inner.weight[5]",
        (8, 6),
        (4, 0),
    )
    assert str(layout) == "tp 1/2 Shard(0) of [8, 6]"


@pytest.mark.usefixtures("megatron")
def test_sharded_state_dict_that_contradicts_the_tensor_is_not_used() -> None:
    fields: dict[str, Any] = {"local_shape": (4, 6), "axis_fragmentations": None}
    layer = Layer(global_shape=(8, 6), global_offset=(7, 0), **fields)
    assert find_layout(layer, "inner.weight", (4, 6)) is None


def partition(parameter: Any, rank_elements: list[float]) -> None:
    """Attributes of a parameter of ZeRO-3 that is not gathered."""
    parameter.ds_id, parameter.ds_shape = 0, parameter.shape
    parameter.ds_numel = parameter.numel()
    parameter.ds_process_group = dist.group.WORLD
    parameter.ds_tensor = torch.tensor(rank_elements)
    parameter.ds_tensor.ds_numel = len(rank_elements)
    parameter.data = torch.empty(0)


def test_partition_of_zero_is_recorded_in_place_of_the_parameter(recorder, observed) -> None:
    """10 elements of 8 ranks: two each, and three ranks have padding alone."""
    linear = nn.Linear(5, 2, bias=False)
    partition(linear.weight, [6.0, 7.0])
    with observed(linear, recorder):
        pass
    (taken,) = recorder.taken
    assert (taken.op_name, taken.array.tolist(), recorder.lost) == ("weight", [6, 7], [])
    layout = find_layout(linear, "weight", (2,))
    assert layout is not None
    assert (layout.source, layout.global_shape, layout.flat_range, layout.padding) == (
        LayoutSource.DEEPSPEED,
        (2, 5),
        (6, 8),
        0,
    )


def test_padding_of_zero_is_no_part_of_the_parameter() -> None:
    linear = nn.Linear(7, 1, bias=False)
    partition(linear.weight, [6.0, 0.0])
    layout = find_layout(linear, "weight", (2,))
    assert layout is not None
    assert (layout.flat_range, layout.padding) == ((6, 7), 1)
    gathered = find_layout(linear, "weight", (1, 7))
    assert gathered is not None
    assert str(gathered) == "zero 3/8 Replicate of [1, 7]"

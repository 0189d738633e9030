"""Local elements of distributed tensors, and their layouts, on rank 5 of a pretended job of 8."""

# torch types what stands in a module as `Tensor | Module`.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportPrivateImportUsage=false, reportIndexIssue=false

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.armed_iteration import watched
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
    make_block_layout,
    make_rank_mesh,
)
from rankdump._frameworks.torch import layouts, tensors
from rankdump._frameworks.torch.layouts import find_local_shard
from rankdump._frameworks.torch.module_tree import find_class_name
from rankdump._frameworks.torch.tensors import TorchObserver, TorchTensor, make_torch_source

RANK = 5


@pytest.fixture(scope="module", autouse=True)
def pretended_job() -> Iterator[None]:
    """Collectives of this backend return at once, with any result."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=8)
    yield
    dist.destroy_process_group()
    layouts._layouts.clear()
    layouts._meshes.clear()


@pytest.fixture(scope="module")
def plane() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def distributed(mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Any]) -> DTensor:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    local, at = _compute_local_shape_and_global_offset(
        shape, mesh.shape, list(mesh.get_coordinate() or ()), placements
    )
    part = whole
    for dimension, (begin, extent) in enumerate(zip(at, local, strict=True)):
        part = part.narrow(dimension, begin if extent else 0, extent)
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def read(tensor: Tensor) -> TorchTensor:
    source = make_torch_source(tensor)
    assert isinstance(source, TorchTensor), source
    return source


def test_dtensor_is_read_as_its_local_shard(plane: DeviceMesh) -> None:
    """The elements are those of this rank, and the layout places them."""
    source = read(distributed(plane, (8, 6), [Shard(0), Shard(1)]))
    assert (source.shape, source.byte_count) == ((4, 2), 32)
    assert torch.frombuffer(bytearray(source.copy_elements()), dtype=torch.float32).tolist() == [
        row * 6 + column for row in range(4, 8) for column in (2, 3)
    ]
    assert source.layout == TensorLayout(
        LayoutSource.DTENSOR,
        (8, 6),
        (4, 2),
        RankMesh("dp_tp", ("dp", "tp"), (2, 4), 0, (4, 1)),
        (1, 1),
        (MeshPlacement(PlacementKind.SHARD, 0), MeshPlacement(PlacementKind.SHARD, 1)),
    )


def test_every_placement_is_described(plane: DeviceMesh) -> None:
    tensor = distributed(plane, (8,), [_StridedShard(0, split_factor=4), Shard(0)])
    layout = read(tensor).layout
    assert layout is not None
    assert str(layout) == "dp 1/2 StridedShard(0, 4), tp 1/4 Shard(0) of [8]"
    assert layout.global_offset == (3,)
    line = init_device_mesh("cpu", (8,))
    layout = read(distributed(line, (3, 2), [Partial("avg")])).layout
    assert layout is not None
    assert layout.is_partial
    assert str(layout) == "dim0 5/8 Partial(avg) of [3, 2]"
    layout = read(distributed(plane["tp"], (), [Replicate()])).layout
    assert layout is not None
    assert (str(layout), layout.mesh.list_ranks()) == ("tp 1/4 Replicate of []", (4, 5, 6, 7))


def test_offsets_are_those_of_torch() -> None:
    """For any mesh, placements and extents, also uneven ones."""
    some = random.Random(0)
    for _ in range(2000):
        shape = tuple(some.randint(1, 13) for _ in range(some.randint(1, 3)))
        mesh = tuple(some.randint(1, 4) for _ in range(some.randint(1, 3)))
        coordinate = tuple(some.randrange(extent) for extent in mesh)
        dimensions = [some.randrange(len(shape)) for _ in mesh]
        placements = [
            some.choice(
                [
                    Replicate(),
                    Partial("sum"),
                    Shard(at),
                    _StridedShard(at, split_factor=some.randint(2, 3)),
                ]
            )
            for at in dimensions
        ]
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        ranks = make_rank_mesh("", ("",) * len(mesh), mesh, range(math.prod(mesh)))
        described = tuple(map(layouts._describe_placement, placements))
        layout = make_block_layout(LayoutSource.DTENSOR, shape, local, ranks, coordinate, described)
        assert layout is not None, (shape, mesh, coordinate, placements)
        assert 0 in local or layout.global_offset == offset, (shape, mesh, coordinate, placements)


def test_layout_is_made_once(plane: DeviceMesh) -> None:
    tensor = distributed(plane, (8, 6), [Shard(0), Replicate()])
    assert read(tensor).layout is read(tensor.clone()).layout
    assert read(tensor + 1).layout == read(tensor).layout


def test_plain_tensors_never_reach_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: Tensor) -> None:
        raise AssertionError(tensor)

    monkeypatch.setattr(tensors, "find_local_shard", fail)
    assert read(torch.ones(2)).layout is None
    assert read(nn.Parameter(torch.ones(2))).layout is None
    assert make_torch_source(torch.ones(2).to_sparse()) == "unsupported_sparse"


def test_rank_outside_of_the_mesh_records_and_counts_nothing(recorder) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    for tensor in (
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(()), mesh, [Replicate()]),
    ):
        assert make_torch_source(tensor) is None
        TorchObserver(recorder, 0).record_state("weight", "parameter", tensor)
    assert (recorder.taken, recorder.lost, recorder.warnings) == ([], [], [])


def test_shard_of_another_size_has_no_layout(plane: DeviceMesh) -> None:
    """A layout that contradicts the elements would be rejected by the agent."""
    odd = DTensor.from_local(
        torch.ones(3), plane["tp"], [Shard(0)], run_check=False, shape=(8,), stride=(1,)
    )
    source = read(odd)
    assert (source.shape, source.layout) == ((3,), None)


def test_running_collective_is_read_when_it_is_complete() -> None:
    pending = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert isinstance(pending, AsyncCollectiveTensor)
    shard = find_local_shard(pending)
    assert shard is not None
    assert (type(shard.tensor), shard.layout, pending.completed) == (Tensor, None, False)
    assert read(pending).shape == (3,)
    local = DTensor.from_local(pending, init_device_mesh("cpu", (8,)), [Replicate()])
    assert read(local).layout is not None


def test_source_keeps_its_layout_when_it_is_read_again(plane: DeviceMesh) -> None:
    tensor = distributed(plane, (8, 6), [Shard(0), Replicate()])
    source = read(tensor)
    assert source.make_memory_source().layout is source.layout
    again = source.read_again()
    assert isinstance(again, TorchTensor)
    assert again.layout is source.layout
    assert not source.has_changed()
    tensor.to_local().add_(1)
    assert source.has_changed()
    assert source.make_head_source(3).layout is None


def test_class_of_a_sharded_module_is_the_original_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    assert type(model[0]).__name__ == "FSDPLinear"
    assert [find_class_name(model), find_class_name(model[0])] == ["Sequential", "Linear"]


def test_gradient_of_a_dtensor_is_recorded(plane: DeviceMesh, recorder) -> None:
    observer = TorchObserver(recorder, 0)
    gradient = distributed(plane, (8, 6), [Shard(0), Replicate()])
    observer.record_gradient("Gradients/weight", gradient)
    (taken,) = recorder.taken
    assert (taken.side, taken.shape, recorder.lost) == (TensorSide.OUTPUT, (4, 6), [])


def test_calls_of_apis_record_local_shards(plane: DeviceMesh, recorder) -> None:
    tensor = distributed(plane, (8, 6), [Shard(0), Replicate()])
    with watched(recorder):
        torch.add(tensor, tensor)
    assert [(taken.op_name, taken.shape) for taken in recorder.taken] == [
        ("Torch_add_0_forward", (4, 6))
    ] * 3
    assert recorder.lost == []


def test_model_with_dtensor_activations_records_gradients(
    plane: DeviceMesh, recorder, observed
) -> None:
    """Inputs, outputs and gradients of a module that computes with DTensors."""
    model = nn.Sequential(nn.Tanh())
    tensor = distributed(plane, (8, 6), [Shard(0), Shard(1)]).requires_grad_()
    with observed(model, recorder):
        model(tensor).square().sum().backward()
    assert {taken.shape for taken in recorder.taken} == {(4, 2)}
    assert {taken.op_name.partition("/")[0] for taken in recorder.taken} == {
        "Default",
        "Gradients",
    }
    assert (recorder.lost, recorder.warnings) == ([], [])

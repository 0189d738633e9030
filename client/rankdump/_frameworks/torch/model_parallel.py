"""Layouts of parameters that Megatron divides by tensor parallelism and DeepSpeed by ZeRO-3, from
the attributes of the parameters. Neither package is imported, and nothing communicates.

Sources: Megatron-LM, core/tensor_parallel/layers.py (`tensor_model_parallel`, `partition_dim`,
`partition_stride`) and core/dist_checkpointing/mapping.py (ShardedTensor); DeepSpeed,
runtime/zero/partition_parameters.py (`ds_tensor`, `ds_shape`, `ds_numel`, `ds_process_group`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
    make_block_layout,
    make_rank_mesh,
)
from rankdump._frameworks.torch.layouts import LayoutFinder

# Attributes of other packages have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_PARALLEL_STATE = "megatron.core.parallel_state"


def is_megatron_imported() -> bool:
    """Return whether the job uses Megatron's groups."""
    return _PARALLEL_STATE in sys.modules


def iterate_attribute_layouts(
    named: Sequence[tuple[str, Parameter]],
) -> Iterator[tuple[Tensor, LayoutFinder]]:
    """Yield the parameters that carry attributes of Megatron or DeepSpeed, with their layouts."""
    for _, parameter in named:
        if getattr(parameter, "ds_tensor", None) is not None:
            yield parameter, partial(_find_zero_layout, parameter)
        elif getattr(parameter, "tensor_model_parallel", False):
            yield parameter, partial(_find_megatron_layout, parameter)


def select_partition(parameter: Tensor) -> Tensor:
    """Return the tensor that has a parameter's elements on this rank.

    While ZeRO-3 has not gathered a parameter, its own tensor is empty.
    """
    partition = getattr(parameter, "ds_tensor", None)
    return parameter if partition is None or parameter.numel() else partition


def iterate_sharded_state(model: Module) -> Iterator[tuple[Tensor, LayoutFinder]]:
    """Yield the parameters that Megatron's `sharded_state_dict` describes, with their layouts.

    It makes references for a checkpoint and copies no parameter.
    """
    describe: Any = getattr(model, "sharded_state_dict", None)
    if not callable(describe):
        for child in model.children():
            yield from iterate_sharded_state(child)
        return
    parameters = {each.data_ptr(): each for each in model.parameters() if each.numel()}
    for entry in _iterate_leaves(describe()):
        data: Any = getattr(entry, "data", None)
        if isinstance(data, Tensor) and hasattr(entry, "global_offset"):
            parameter = parameters.get(data.data_ptr())
            if parameter is not None:
                yield parameter, partial(_find_state_layout, entry, parameter)


def _iterate_leaves(state: object) -> Iterator[object]:
    if isinstance(state, Mapping):
        for part in cast("Mapping[object, object]", state).values():
            yield from _iterate_leaves(part)
    elif isinstance(state, (list, tuple)):
        for part in cast("Sequence[object]", state):
            yield from _iterate_leaves(part)
    else:
        yield state


def _find_megatron_layout(parameter: Any, shape: tuple[int, ...]) -> TensorLayout | None:
    """Return the layout by the attributes: `partition_stride` pieces are divided, each alike."""
    mesh, coordinate = _describe_tensor_group(parameter)
    dimension, stride = int(parameter.partition_dim), int(parameter.partition_stride)
    if not mesh.shape or not 0 <= dimension < len(shape):
        return None
    whole = list(shape)
    whole[dimension] *= mesh.shape[0]
    placement = MeshPlacement(PlacementKind.SHARD, dimension)
    if stride > 1:
        placement = MeshPlacement(PlacementKind.STRIDED_SHARD, dimension, stride)
    return make_block_layout(
        LayoutSource.MEGATRON, tuple(whole), shape, mesh, coordinate, (placement,)
    )


def _find_state_layout(entry: Any, parameter: Any, shape: tuple[int, ...]) -> TensorLayout:
    """Return the layout of a ShardedTensor; an axis in front numbers layers and joins the name."""
    prepended = int(entry.prepend_axis_num or 0)
    whole, offset = tuple(entry.global_shape)[prepended:], tuple(entry.global_offset)[prepended:]
    name = "".join(f"[{at}]" for at in tuple(entry.global_offset)[:prepended])
    mesh, coordinate = _describe_tensor_group(parameter)
    extents = zip(whole, entry.local_shape, strict=True)
    cuts = [at for at, (extent, held) in enumerate(extents) if extent > held]
    placements = (MeshPlacement(PlacementKind.REPLICATE),) * len(coordinate)
    if mesh.shape and len(cuts) == 1:
        placements = (MeshPlacement(PlacementKind.SHARD, cuts[0]),)
    elif cuts:
        # Other groups divide it as well: the offset is known, the mesh is not.
        mesh, coordinate, placements = _make_own_mesh(), (), ()
    flat = entry.flattened_range
    held = () if flat is None else (int(flat.start), int(flat.stop))
    return TensorLayout(
        LayoutSource.MEGATRON,
        whole,
        offset,
        mesh,
        coordinate,
        placements,
        held,
        0,
        f"{entry.key}{name}",
    )


def _find_zero_layout(parameter: Any, shape: tuple[int, ...]) -> TensorLayout | None:
    """Return the layout of a parameter of ZeRO-3: the partition while it is not gathered."""
    whole, total = tuple(parameter.ds_shape), int(parameter.ds_numel)
    mesh, coordinate = _describe_group(getattr(parameter, "ds_process_group", None), "zero")
    if not mesh.shape:
        return None
    if shape == whole:
        placement = MeshPlacement(PlacementKind.REPLICATE)
        return make_block_layout(
            LayoutSource.DEEPSPEED, whole, shape, mesh, coordinate, (placement,)
        )
    size = int(parameter.ds_tensor.ds_numel)
    start = min(size * coordinate[0], total)
    stop = min(start + size, total)
    placement = MeshPlacement(PlacementKind.SHARD, 0)
    return TensorLayout(
        LayoutSource.DEEPSPEED,
        whole,
        (0,) * len(whole),
        mesh,
        coordinate,
        (placement,),
        (start, stop),
        size - (stop - start),
    )


def _describe_tensor_group(parameter: Any) -> tuple[RankMesh, tuple[int, ...]]:
    """Return the group that divides a parameter; experts may have one of their own."""
    state: Any = sys.modules.get(_PARALLEL_STATE)
    is_expert = getattr(parameter, "allreduce", True) is False
    names = ("get_expert_tensor_parallel_group",) if is_expert else ()
    for name in (*names, "get_tensor_model_parallel_group"):
        get_group: Any = getattr(state, name, None)
        if get_group is not None:
            return _describe_group(get_group(), "tp")
    return _make_own_mesh(), ()


def _describe_group(group: Any, name: str) -> tuple[RankMesh, tuple[int, ...]]:
    if not (dist.is_available() and dist.is_initialized()):
        return _make_own_mesh(), ()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return make_rank_mesh(name, (name,), (len(ranks),), ranks), (ranks.index(dist.get_rank()),)


def _make_own_mesh() -> RankMesh:
    """Return a mesh without dimensions, of this rank alone: it is not known who has the rest."""
    is_used = dist.is_available() and dist.is_initialized()
    return RankMesh("", (), (), dist.get_rank() if is_used else 0)

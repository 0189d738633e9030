"""Layouts of parameters that are divided without DTensor, read from private attributes; if one is
missing, there is no layout. No package except torch is imported, and nothing communicates.

FSDP2 has a sharded parameter in the place of a gathered one, FSDP1 flat parameters and the original
ones that are views into them (torch.distributed.fsdp: _flat_param.FlatParameter and
_fully_shard.FSDPParam, torch 2.4 to 2.13). Megatron divides parameters by tensor parallelism
(Megatron-LM, core/tensor_parallel/layers.py: `tensor_model_parallel`, `partition_dim`,
`partition_stride`; core/dist_checkpointing/mapping.py: ShardedTensor), DeepSpeed by ZeRO-3
(runtime/zero/partition_parameters.py: `ds_tensor`, `ds_shape`, `ds_numel`, `ds_process_group`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
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

# These modules of torch have no stubs, and attributes of other packages no types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

_SHARD = MeshPlacement(PlacementKind.SHARD, 0)
_REPLICATE = MeshPlacement(PlacementKind.REPLICATE)
_PARALLEL_STATE = "megatron.core.parallel_state"


def iterate_fsdp2_groups(model: Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 gathers and reduces together."""
    seen: set[int] = set()
    for module in model.modules():
        get_state: Any = getattr(type(module), "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state(module)
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def find_sharded_parameters(model: Module) -> dict[int, Parameter]:
    """Return FSDP2's sharded parameters by the identity of the gathered ones.

    A module that is not resharded after its forward still has the gathered parameters, but
    optimizers have the sharded ones.
    """
    found: dict[int, Parameter] = {}
    for group in iterate_fsdp2_groups(model):
        for each in group.fsdp_params:
            gathered = getattr(each, "_unsharded_param", None)
            if gathered is not None:
                found[id(gathered)] = each.sharded_param
    return found


def iterate_fsdp1_handles(model: Module) -> Iterator[tuple[Module, Any]]:
    """Yield the modules that FSDP1 wraps a model in, each with the handle of its flat parameter."""
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        if hasattr(getattr(handle, "flat_param", None), "_shard_param_infos"):
            yield module, handle


def iterate_fsdp1_layouts(model: Module) -> Iterator[tuple[Tensor, LayoutFinder]]:
    """Yield the parameters of FSDP1 with the function that finds their layouts."""
    for module, handle in iterate_fsdp1_handles(model):
        flat: Any = handle.flat_param
        shard = _FlatShard(module, handle)
        yield flat, shard.find_flat_layout
        originals = [*(flat._params or ()), *(flat._shared_params or ())]
        for number, original in enumerate(originals[: len(flat._shapes)]):
            yield original, partial(shard.find_original_layout, number)


class _FlatShard:
    """One rank's shard of a flat parameter."""

    def __init__(self, module: Any, handle: Any) -> None:
        self._flat = handle.flat_param
        self._is_sharded = bool(handle.uses_sharded_strategy)
        self._rank, self._world = int(handle.rank), int(handle.world_size)
        self._mesh, self._coordinate = _describe_groups(module, handle)

    def find_flat_layout(self, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout of the flat parameter itself, whose tensor has this shape."""
        total = self._flat._unpadded_unsharded_size.numel()
        if shape == (total,) and not (self._is_sharded and self._world > 1):
            return self._make_replica((total,), shape)
        size = prod(shape)
        if len(shape) != 1 or size != self._flat._sharded_size.numel():
            return None
        start = min(self._rank * size, total)
        stop = min(start + size, total)
        return self._make_range((total,), (start,), (start, stop), size - (stop - start))

    def find_original_layout(self, number: int, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout of an original parameter, which is a view into the flat one."""
        whole = tuple(self._flat._shapes[number])
        if not self._is_sharded:
            return self._make_replica(whole, shape)
        info = self._flat._shard_param_infos[number]
        start = info.intra_param_start_idx if info.in_shard else 0
        stop = info.intra_param_end_idx + 1 if info.in_shard else 0
        if shape != (stop - start,):
            # The parameter is gathered now.
            return self._make_replica(whole, shape)
        return self._make_range(whole, _unravel(start, whole), (start, stop), 0)

    def _make_replica(self, whole: tuple[int, ...], shape: tuple[int, ...]) -> TensorLayout | None:
        placements = (_REPLICATE,) * len(self._coordinate)
        return make_block_layout(
            LayoutSource.FSDP1, whole, shape, self._mesh, self._coordinate, placements
        )

    def _make_range(
        self, whole: tuple[int, ...], at: tuple[int, ...], held: tuple[int, int], padding: int
    ) -> TensorLayout:
        placements = (_REPLICATE,) * (len(self._coordinate) - 1) + (_SHARD,)
        return TensorLayout(
            LayoutSource.FSDP1, whole, at, self._mesh, self._coordinate, placements, held, padding
        )


def _describe_groups(module: Any, handle: Any) -> tuple[RankMesh, tuple[int, ...]]:
    """Return the mesh of a flat parameter's ranks, and this rank's coordinate in it.

    A hybrid strategy shards in one group, and has replicas in another. The ranks of all other
    groups follow from the two groups of this rank by adding an offset.
    """
    sharding = dist.get_process_group_ranks(handle.process_group)
    replicas: Any = getattr(module, "_inter_node_pg", None)
    if replicas is None:
        mesh = make_rank_mesh("fsdp", ("fsdp",), (len(sharding),), sharding)
        return mesh, (int(handle.rank),)
    own = sharding[handle.rank]
    copies = dist.get_process_group_ranks(replicas)
    ranks = [copy + shard - own for copy in copies for shard in sharding]
    names, shape = ("replicate", "shard"), (len(copies), len(sharding))
    return make_rank_mesh("fsdp", names, shape, ranks), (copies.index(own), int(handle.rank))


def _unravel(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element from its number in C order."""
    index: list[int] = []
    for extent in reversed(shape):
        index.append(at % extent if extent else 0)
        at //= extent or 1
    return tuple(reversed(index))


def is_megatron_imported() -> bool:
    """Return whether the job uses Megatron's groups."""
    return _PARALLEL_STATE in sys.modules


def iterate_attribute_layouts(
    named: Sequence[tuple[str, Parameter]],
) -> Iterator[tuple[Tensor, LayoutFinder]]:
    """Yield the parameters that have attributes of Megatron or DeepSpeed, with their layouts."""
    for _, parameter in named:
        if getattr(parameter, "ds_tensor", None) is not None:
            yield parameter, partial(_find_zero_layout, parameter)
        elif getattr(parameter, "tensor_model_parallel", False):
            yield parameter, partial(_find_megatron_layout, parameter)


def select_partition(parameter: Tensor) -> Tensor:
    """Return the tensor that holds the elements of a parameter on this rank.

    While ZeRO-3 has not gathered a parameter, its own tensor is empty.
    """
    partition = getattr(parameter, "ds_tensor", None)
    return parameter if partition is None or parameter.numel() else partition


def iterate_sharded_state(model: Module) -> Iterator[tuple[Tensor, LayoutFinder]]:
    """Yield the parameters that Megatron's `sharded_state_dict` describes, with their layouts.

    That method creates references for a checkpoint and copies no parameter.
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
    """Return the layout according to Megatron's attributes: each of `partition_stride` pieces is
    divided in the same way.
    """
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
    """Return the layout of a ShardedTensor; an axis that it prepends is the number of a layer,
    which becomes part of the name.
    """
    prepended = int(entry.prepend_axis_num or 0)
    whole, offset = tuple(entry.global_shape)[prepended:], tuple(entry.global_offset)[prepended:]
    name = "".join(f"[{at}]" for at in tuple(entry.global_offset)[:prepended])
    mesh, coordinate = _describe_tensor_group(parameter)
    extents = zip(whole, entry.local_shape, strict=True)
    cuts = [at for at, (extent, held) in enumerate(extents) if extent > held]
    placements = (_REPLICATE,) * len(coordinate)
    if mesh.shape and len(cuts) == 1:
        placements = (MeshPlacement(PlacementKind.SHARD, cuts[0]),)
    elif cuts:
        # Other groups divide the tensor too, so the offset is known but not the mesh.
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
    """Return the layout of a parameter of ZeRO-3: that of the partition while the parameter is not
    gathered.
    """
    whole, total = tuple(parameter.ds_shape), int(parameter.ds_numel)
    mesh, coordinate = _describe_group(getattr(parameter, "ds_process_group", None), "zero")
    if not mesh.shape:
        return None
    if shape == whole:
        return make_block_layout(
            LayoutSource.DEEPSPEED, whole, shape, mesh, coordinate, (_REPLICATE,)
        )
    size = int(parameter.ds_tensor.ds_numel)
    start = min(size * coordinate[0], total)
    stop = min(start + size, total)
    return TensorLayout(
        LayoutSource.DEEPSPEED,
        whole,
        (0,) * len(whole),
        mesh,
        coordinate,
        (_SHARD,),
        (start, stop),
        size - (stop - start),
    )


def _describe_tensor_group(parameter: Any) -> tuple[RankMesh, tuple[int, ...]]:
    """Return the mesh of the group that divides a parameter, and this rank's coordinate; experts
    may have a group of their own.
    """
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
    """Return a mesh without dimensions that has only this rank, because it is not known who has the
    other parts.
    """
    is_used = dist.is_available() and dist.is_initialized()
    return RankMesh("", (), (), dist.get_rank() if is_used else 0)

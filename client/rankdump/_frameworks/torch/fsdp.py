"""Parameters that torch's two kinds of FSDP shard: the sharded one in the place of a gathered one
(FSDP2), and layouts of flat parameters and of the original ones that are views into them (FSDP1).

Attributes of FSDP are private to torch (torch.distributed.fsdp: _flat_param.FlatParameter and
_fully_shard.FSDPParam, torch 2.4 to 2.13); where one is missing there is no layout. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

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

# These modules of torch have no stubs.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_SHARD = MeshPlacement(PlacementKind.SHARD, 0)
_REPLICATE = MeshPlacement(PlacementKind.REPLICATE)


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

    A module that is not resharded after its forward still has the gathered ones, but optimizers
    have the others.
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
        """Return the layout of the flat parameter itself; `shape` is that of its tensor."""
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
        """Return the layout of an original parameter, a view into the flat one."""
        whole = tuple(self._flat._shapes[number])
        if not self._is_sharded:
            return self._make_replica(whole, shape)
        info = self._flat._shard_param_infos[number]
        start = info.intra_param_start_idx if info.in_shard else 0
        stop = info.intra_param_end_idx + 1 if info.in_shard else 0
        if shape != (stop - start,):
            # It is gathered now.
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

    A hybrid strategy shards in one group, and has replicas in another: the ranks of all groups are
    those of the two groups of this rank, shifted.
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
    """Return the index of an element by its number in C order."""
    index: list[int] = []
    for extent in reversed(shape):
        index.append(at % extent if extent else 0)
        at //= extent or 1
    return tuple(reversed(index))

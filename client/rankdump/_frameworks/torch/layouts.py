"""Local elements of tensors that torch distributes over ranks, and the layout that says which part
of the whole tensor they are. This module never communicates: it starts no collective, and waits for
one only if the collective's own result is read.

A layout depends only on the specification of a DTensor and the shape of its local tensor; it is
determined once for both and then looked up. Other tensors do not need this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rankdump._core.bounded_cache import look_up, remember
from rankdump._core.tensor_layout import (
    MAX_MESH_NAME_CHARACTERS,
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
    find_layout_fault,
    make_block_layout,
    make_rank_mesh,
)
from rankdump._frameworks.torch.internals import disable_observation

# DTensor's specification and meshes are private to torch or partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_MAX_LAYOUTS = 1 << 14
_MAX_MESHES = 1 << 8
_REPLICATE = MeshPlacement(PlacementKind.REPLICATE)


LayoutFinder: TypeAlias = "Callable[[tuple[int, ...]], TensorLayout | None]"
"""Returns the layout of a tensor, given the shape that it has now."""


class CheckedLayout:
    """Layout of a tensor whose shape rarely changes; it is determined once for each shape."""

    def __init__(self, find_layout: LayoutFinder) -> None:
        self._find_layout = find_layout
        self._shape: tuple[int, ...] | None = None
        self._layout: TensorLayout | None = None

    def __call__(self, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout; None if there is none that agrees with the shape."""
        if shape != self._shape:
            layout = self._find_layout(shape)
            # The layout is checked here because the agent rejects a record with a contradictory
            # layout.
            valid = layout is not None and not find_layout_fault(layout, shape)
            self._shape, self._layout = shape, layout if valid else None
        return self._layout


class LocalShard(NamedTuple):
    """The elements of a distributed tensor on this rank."""

    tensor: Tensor
    layout: TensorLayout | None
    """Layout of the elements; None if the tensor's specification contradicts its elements."""
    is_outside: bool = False
    """Whether this rank is outside of the tensor's mesh and so has no part of it."""


def find_local_shard(tensor: Tensor) -> LocalShard | None:
    """Return the local elements of a distributed tensor; None if the tensor is not distributed.

    The result of a functional collective that is still running is waited for, because its elements
    cannot be read before. On an accelerator the stream waits and not the host. The job's own wait
    then finds the collective complete.
    """
    kind = _find_class(type(tensor))
    if not kind:
        return None
    if kind == _ASYNC_TENSOR:
        return LocalShard(_wait_for_elements(tensor), None)
    distributed: Any = tensor
    spec, local = distributed._spec, distributed._local_tensor
    described = _look_up_layout(spec, tuple(local.shape))
    if described.is_outside:
        return LocalShard(local, None, is_outside=True)
    if _find_class(type(local)) == _ASYNC_TENSOR:
        local = _wait_for_elements(local)
    return LocalShard(local, described.layout)


def find_distribution(tensor: Tensor) -> TensorLayout | None:
    """Return the layout of the local tensor of a DTensor, without waiting; None for any other
    tensor.
    """
    if _find_class(type(tensor)) != _DTENSOR:
        return None
    distributed: Any = tensor
    return _look_up_layout(distributed._spec, tuple(distributed._local_tensor.shape)).layout


def strip_distribution(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without waiting for it; any other tensor unchanged."""
    distributed: Any = tensor
    return distributed._local_tensor if _find_class(type(tensor)) == _DTENSOR else tensor


_DTENSOR, _ASYNC_TENSOR = "DTensor", "AsyncCollectiveTensor"


@lru_cache(maxsize=1 << 8)
def _find_class(kind: type) -> str:
    """Return the name of the one of torch's two classes that a class derives from; empty if
    neither.

    Classes are compared by name, because a job that uses neither need not import them.
    """
    for base in kind.__mro__:
        if base.__name__ in (_DTENSOR, _ASYNC_TENSOR) and base.__module__.startswith(
            "torch.distributed."
        ):
            return base.__name__
    return ""


def _wait_for_elements(tensor: Any) -> Tensor:
    with disable_observation():
        return torch.ops._c10d_functional.wait_tensor(tensor.elem)


class _DescribedShard(NamedTuple):
    """Layout of a specification, which may be None; a cache must distinguish that from a miss."""

    layout: TensorLayout | None
    is_outside: bool


_layouts: dict[tuple[object, tuple[int, ...]], _DescribedShard] = {}
_meshes: dict[object, RankMesh] = {}


def _look_up_layout(spec: Any, shape: tuple[int, ...]) -> _DescribedShard:
    # A look-up is fast: a specification caches its hash, and all results of an operator have the
    # same object.
    key = (spec, shape)
    known = _layouts.get(key)
    if known is None:
        is_outside = spec.mesh.get_coordinate() is None
        layout = None if is_outside else describe_spec(spec, shape)
        known = remember(_layouts, key, _DescribedShard(layout, is_outside), _MAX_LAYOUTS)
    return known


def describe_spec(spec: Any, shape: tuple[int, ...]) -> TensorLayout | None:
    """Return the layout of a local tensor of this shape under a DTensorSpec.

    The result is None if the specification contradicts the shape, as after `DTensor.from_local`
    with parts of any size.
    """
    with disable_observation():
        mesh = look_up(_meshes, spec.mesh, lambda: describe_mesh(spec.mesh), _MAX_MESHES)
    return make_block_layout(
        LayoutSource.DTENSOR,
        tuple(spec.tensor_meta.shape),
        shape,
        mesh,
        tuple(spec.mesh.get_coordinate()),
        tuple(map(_describe_placement, spec.placements)),
    )


def describe_mesh(mesh: Any) -> RankMesh:
    """Return the mesh of ranks of a DeviceMesh; its name is made from the names of its
    dimensions.
    """
    most = MAX_MESH_NAME_CHARACTERS
    names = [name[:most] for name in mesh.mesh_dim_names or ("",) * mesh.ndim]
    whole = "_".join(filter(None, names))[:most]
    return make_rank_mesh(whole, names, tuple(mesh.shape), mesh.mesh.flatten().tolist())


def _describe_placement(placement: Any) -> MeshPlacement:
    kind = type(placement).__name__
    if kind in ("_StridedShard", "StridedShard"):
        return MeshPlacement(
            PlacementKind.STRIDED_SHARD, placement.dim, int(placement.split_factor)
        )
    if placement.is_shard():
        return MeshPlacement(PlacementKind.SHARD, placement.dim)
    if placement.is_partial():
        reduction = str(placement.reduce_op)[:MAX_MESH_NAME_CHARACTERS]
        return MeshPlacement(PlacementKind.PARTIAL, reduction=reduction)
    return _REPLICATE

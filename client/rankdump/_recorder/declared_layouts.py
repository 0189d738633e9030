"""Layouts that a script declares for tensors by name, in the terms of DTensor: checks of the
script's arguments, the layout of this rank's part, and the application to observed tensors. A
declaration also covers the gradient of its tensor. No method raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.tensor_layout import (
    MAX_MESH_DIMENSIONS,
    MAX_MESH_NAME_CHARACTERS,
    MAX_MESH_RANKS,
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
    find_layout_fault,
    make_block_layout,
    make_rank_mesh,
)

PLACEMENT_FORMS = "Replicate, Shard(dim), StridedShard(dim, split_factor), Partial(reduction)"
_PLACEMENT = re.compile(
    r"(?P<replicate>Replicate)(\(\))?|Shard\((?P<shard>\d+)\)"
    r"|_?StridedShard\((?P<strided>\d+), *(?P<factor>[1-9]\d*)\)|Partial\((?P<partial>\w{1,64})\)"
)
_MAX_LOGICAL_NAME_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class LayoutDeclaration:
    """Declaration of a tensor's layout, as it applies to this rank."""

    global_shape: tuple[int, ...]
    mesh: RankMesh
    coordinate: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]
    global_offset: tuple[int, ...] | None = None
    """Index of the first element of this rank's part; None if the placements determine it."""
    logical_name: str = ""

    def make_layout(self, shape: tuple[int, ...]) -> TensorLayout | str:
        """Return the layout of a local tensor of this shape, or a text that says what contradicts
        it.
        """
        source, whole, name = LayoutSource.USER, self.global_shape, self.logical_name
        place = (self.mesh, self.coordinate, self.placements)
        if self.global_offset is None:
            found = make_block_layout(source, whole, shape, *place, name)
        else:
            found = TensorLayout(source, whole, self.global_offset, *place, logical_name=name)
        if found is None:
            cuts = ", ".join(map(str, self.placements)) or "no placement"
            return f"shape {list(shape)} is not that of a part of {list(whole)} under {cuts}"
        return find_layout_fault(found, shape) or found


def declare_layout(
    rank: int,
    global_shape: Sequence[int],
    mesh: Mapping[str, int],
    placements: Mapping[str, str],
    *,
    ranks: Sequence[int] | None = None,
    global_offset: Sequence[int] | None = None,
    logical_name: str = "",
) -> LayoutDeclaration | str | None:
    """Return the declaration for a rank, or one line that says what is wrong with the arguments.

    `mesh` has the extent of each mesh dimension by name, `ranks` the global ranks of the mesh in C
    order (by default from 0 on). The result is None for a rank that is not in the mesh.
    """
    fault = _find_type_fault(mesh, placements) or _find_number_fault(
        global_shape, mesh, global_offset
    )
    if fault:
        return fault
    if len(logical_name) > _MAX_LOGICAL_NAME_CHARACTERS or "\0" in logical_name:
        most = _MAX_LOGICAL_NAME_CHARACTERS
        return f"logical_name is not allowed; allowed: at most {most} characters without NUL"
    count = prod(mesh.values())
    members = range(count) if ranks is None else ranks
    if not _are_counts(members) or len(set(members)) != count or len(members) != count:
        return f"ranks={list(members)!r} is not allowed; allowed: {count} different ranks, for mesh"
    unknown = sorted(set(placements) - set(mesh))
    if unknown:
        return f"placements has {unknown[0]!r}; allowed: dimensions of mesh: {', '.join(mesh)}"
    parsed = [_parse_placement(placements.get(name, "Replicate")) for name in mesh]
    for name, placement in zip(mesh, parsed, strict=True):
        if placement is None or placement.dimension >= max(len(global_shape), 1):
            return (
                f"placements[{name!r}]={placements[name]!r} is not allowed; allowed: "
                f"{PLACEMENT_FORMS}, for {len(global_shape)} dimensions"
            )
    if rank not in members:
        return None
    shape = tuple(mesh.values())
    return LayoutDeclaration(
        tuple(global_shape),
        make_rank_mesh(
            "_".join(mesh)[:MAX_MESH_NAME_CHARACTERS], tuple(mesh), shape, tuple(members)
        ),
        _find_coordinate(members.index(rank), shape),
        tuple(each for each in parsed if each is not None),
        None if global_offset is None else tuple(global_offset),
        logical_name,
    )


def _find_type_fault(mesh: object, placements: object) -> str:
    """Return which argument is not a dictionary with names as keys; a script may pass anything."""
    for title, given, allowed in (
        ("mesh", mesh, "extents by name, as {'dp': 2, 'tp': 4}"),
        ("placements", placements, "texts by dimension of mesh, as {'tp': 'Shard(0)'}"),
    ):
        if not isinstance(given, Mapping) or not all(
            isinstance(name, str) for name in cast("Mapping[object, object]", given)
        ):
            return f"{title}={given!r} is not allowed; allowed: {allowed}"
    return ""


def _find_number_fault(global_shape: object, mesh: Mapping[str, int], global_offset: object) -> str:
    if not _are_counts(global_shape):
        return f"global_shape={global_shape!r} is not allowed; allowed: whole numbers from 0 on"
    if global_offset is not None and not _are_counts(global_offset):
        return f"global_offset={global_offset!r} is not allowed; allowed: whole numbers from 0 on"
    most = MAX_MESH_NAME_CHARACTERS
    names_fit = all(0 < len(name) <= most and "\0" not in name for name in mesh)
    extents_fit = _are_counts(list(mesh.values())) and min(mesh.values(), default=1) > 0
    if not names_fit or not extents_fit or len(mesh) > MAX_MESH_DIMENSIONS:
        return (
            f"mesh={dict(mesh)!r} is not allowed; allowed: at most {MAX_MESH_DIMENSIONS} names of "
            f"up to {most} characters, with extents from 1 on"
        )
    if prod(mesh.values()) > MAX_MESH_RANKS:
        return f"mesh={dict(mesh)!r} is not allowed; allowed: at most {MAX_MESH_RANKS} ranks"
    return ""


def _are_counts(numbers: object) -> bool:
    return isinstance(numbers, (list, tuple, range)) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 63
        for each in cast("Sequence[object]", numbers)
    )


def _parse_placement(text: object) -> MeshPlacement | None:
    found = _PLACEMENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    if found["shard"] is not None:
        return MeshPlacement(PlacementKind.SHARD, int(found["shard"]))
    if found["strided"] is not None:
        factor = int(found["factor"])
        return MeshPlacement(PlacementKind.STRIDED_SHARD, int(found["strided"]), factor)
    if found["partial"] is not None:
        return MeshPlacement(PlacementKind.PARTIAL, reduction=found["partial"])
    return MeshPlacement(PlacementKind.REPLICATE)


def _find_coordinate(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of the element with index `place` in C order."""
    coordinate: list[int] = []
    for extent in reversed(shape):
        coordinate.append(place % extent)
        place //= extent
    return tuple(reversed(coordinate))


_OPERATORS_PREFIX = "Default/"
_OTHER_SIDE = {TensorSide.INPUT: TensorSide.OUTPUT, TensorSide.OUTPUT: TensorSide.INPUT}


class DeclaredLayouts:
    """Layout declarations of one session."""

    def __init__(self, warn_once: Callable[[str], None]) -> None:
        self._warn_once = warn_once
        self.declarations: dict[tuple[str, TensorSide, int], LayoutDeclaration] = {}
        """Declarations by operator, side and slot. While it is empty, a tensor costs one branch."""
        self._made: dict[tuple[LayoutDeclaration, tuple[int, ...]], TensorLayout | str] = {}

    def add(
        self, op_name: str, side: TensorSide, slot: int, declaration: LayoutDeclaration
    ) -> None:
        """Declare the layout of a tensor; the last declaration for a tensor counts."""
        self.declarations[op_name, side, slot] = declaration
        # An operator's backward reads the gradients of the outputs that its forward wrote, so the
        # sides are exchanged; the gradient of a parameter is the only output of its backward
        # operator.
        is_operator = op_name.startswith(_OPERATORS_PREFIX)
        gradient_side = _OTHER_SIDE[side] if is_operator else side
        self.declarations[GRADIENTS_PREFIX + op_name, gradient_side, slot] = declaration

    def apply_to(self, observation: TensorObservation) -> None:
        """Set the layout of an observed tensor, if one was declared and fits the tensor's shape."""
        name, side, slot = observation.op_name, observation.side, observation.slot
        declaration = self.declarations.get((name, side, slot))
        if declaration is None:
            return
        source = observation.tensor
        layout = self._make_layout(declaration, source.shape)
        if isinstance(layout, str):
            self._warn_once(f"layout of {name} {side.value} {slot} is not recorded: {layout}")
        else:
            source.layout = layout

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout that was declared for a parameter, if it fits this shape."""
        declaration = self.declarations.get((name, TensorSide.OUTPUT, 0))
        layout = None if declaration is None else self._make_layout(declaration, shape)
        return None if isinstance(layout, str) else layout

    def _make_layout(
        self, declaration: LayoutDeclaration, shape: tuple[int, ...]
    ) -> TensorLayout | str:
        key = (declaration, shape)
        layout = self._made.get(key)
        if layout is None:
            layout = self._made[key] = declaration.make_layout(shape)
        return layout

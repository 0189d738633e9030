"""Layouts that a script declares: the part of each rank, and one line for wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest

from rankdump._core.tensor_layout import LayoutSource, TensorLayout
from rankdump._recorder.declared_layouts import LayoutDeclaration, declare_layout

GIVEN: dict[str, Any] = {
    "global_shape": (8, 6),
    "mesh": {"dp": 2, "tp": 2},
    "placements": {"tp": "Shard(0)"},
}


def declare(rank: int, **changed: Any) -> LayoutDeclaration:
    found = declare_layout(rank, **{**GIVEN, **changed})
    assert isinstance(found, LayoutDeclaration), found
    return found


def test_declared_layout_places_each_rank() -> None:
    layouts = [declare(rank).make_layout((4, 6)) for rank in range(4)]
    assert [str(layout) for layout in layouts] == [
        f"dp {dp}/2 Replicate, tp {tp}/2 Shard(0) of [8, 6]" for dp in range(2) for tp in range(2)
    ]
    for layout, at in zip(layouts, (0, 4, 0, 4), strict=True):
        assert isinstance(layout, TensorLayout)
        assert (layout.source, layout.global_offset) == (LayoutSource.USER, (at, 0))


def test_declared_ranks_and_offset_count() -> None:
    declared = declare(7, mesh={"ep": 2}, placements={}, ranks=[5, 7], global_offset=(1, 2))
    layout = declared.make_layout((2, 2))
    assert isinstance(layout, TensorLayout)
    assert (layout.coordinate, layout.mesh.list_ranks()) == ((1,), (5, 7))
    assert layout.global_offset == (1, 2)
    assert declare_layout(6, (4,), {"ep": 2}, {}, ranks=[5, 7]) is None


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("StridedShard(1, 2)", "StridedShard(1, 2)"),
        ("Partial(sum)", "Partial(sum)"),
        ("Replicate()", "Replicate"),
    ],
)
def test_every_placement_can_be_declared(text: str, formatted: str) -> None:
    assert str(declare(0, placements={"dp": text}).placements[0]) == formatted


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"global_shape": (8, -1)}, "global_shape=(8, -1) is not allowed"),
        ({"global_shape": 8}, "global_shape=8 is not allowed"),
        ({"global_offset": ("a", 0)}, "global_offset=('a', 0) is not allowed"),
        ({"mesh": 3}, "mesh=3 is not allowed; allowed: extents by name"),
        ({"placements": "Shard(0)"}, "placements='Shard(0)' is not allowed; allowed: texts by"),
        ({"placements": {"tp": 0}}, "placements['tp']=0 is not allowed"),
        ({"logical_name": "a" * 5000}, "logical_name is not allowed; allowed: at most 4096"),
        ({"mesh": {"tp": 0}}, "mesh={'tp': 0} is not allowed"),
        ({"mesh": {"tp": 1 << 20}, "placements": {}}, "at most 65536 ranks"),
        ({"ranks": [0, 1, 2, 2]}, "ranks=[0, 1, 2, 2] is not allowed; allowed: 4 different ranks"),
        ({"placements": {"pp": "Shard(0)"}}, "placements has 'pp'; allowed: dimensions of mesh: "),
        ({"placements": {"tp": "Shard"}}, "placements['tp']='Shard' is not allowed; allowed: Repl"),
        ({"placements": {"tp": "Shard(2)"}}, "placements['tp']='Shard(2)' is not allowed"),
    ],
)
def test_wrong_declaration_is_one_line(changed: dict[str, Any], line: str) -> None:
    found = declare_layout(0, **{**GIVEN, **changed})
    assert isinstance(found, str)
    assert line in found
    assert "\n" not in found


def test_shape_that_contradicts_a_declaration_is_named() -> None:
    assert declare(0).make_layout((3, 6)) == (
        "shape [3, 6] is not that of a part of [8, 6] under Replicate, Shard(0)"
    )
    assert declare(0, global_offset=(7, 0)).make_layout((4, 6)) == (
        "block of shape [4, 6] at [7, 0] in shape [8, 6]"
    )

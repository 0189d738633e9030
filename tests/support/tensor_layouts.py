"""Layouts of tensors: a strategy that draws one, and the layout of a row block."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)

_uint32 = st.integers(0, 2**32 - 1)
_letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
"""Unpaired surrogates cannot be sent, and a NUL is refused in names."""
_words = st.text(_letters, max_size=9)
_placements = st.builds(MeshPlacement, st.sampled_from(PlacementKind), _uint32, _uint32, _words)


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int]) -> TensorLayout:
    """A block of that shape somewhere in a tensor, on a mesh of up to three dimensions."""
    space = draw(st.lists(st.integers(0, 99), min_size=len(shape), max_size=len(shape)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    ranks = draw(st.permutations(range(prod(mesh_shape))))
    names = tuple(draw(st.sampled_from(["", "dp", "tp"])) for _ in mesh_shape)
    return TensorLayout(
        draw(st.sampled_from([each for each in LayoutSource if each is not LayoutSource.SAMPLE])),
        tuple(map(sum, zip(shape, space, strict=True))),
        tuple(draw(st.integers(0, extent)) for extent in space),
        make_rank_mesh(draw(_words), names, mesh_shape, ranks),
        tuple(draw(st.integers(0, extent - 1)) for extent in mesh_shape),
        tuple(draw(_placements) for _ in mesh_shape),
        logical_name=draw(st.text(_letters, max_size=20)),
    )


def shard_rows(
    rank: int, offset: int, global_shape: tuple[int, ...], *, ranks: int = 2
) -> TensorLayout:
    """Return the layout of a block of rows that begins at `offset`, on a mesh `dp`."""
    return TensorLayout(
        LayoutSource.DTENSOR,
        global_shape,
        (offset, *(0 for _ in global_shape[1:])),
        make_rank_mesh("world", ("dp",), (ranks,), range(ranks)),
        (rank,),
        (MeshPlacement(PlacementKind.SHARD, 0),),
    )

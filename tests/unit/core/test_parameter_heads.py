"""Heads of parameters: what ranks digest of them adds up, in any layout."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_layouts import shard_rows

from rankdump._core.tensor_fingerprint import HeadPlacement, compute_digest, place_head
from rankdump._core.tensor_layout import LayoutSource, RankMesh, TensorLayout

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def digest(
    elements: np.ndarray, layout: TensorLayout | None, most: int
) -> tuple[int, HeadPlacement]:
    placed = place_head("float32", elements.shape, layout, most)
    assert placed is not None
    # Only what the placement counts is read: the rest is replaced.
    flat = np.full(elements.size, np.nan, np.float32)
    flat[: placed.elements] = elements.reshape(-1)[: placed.elements]
    return compute_digest(flat.ctypes.data, placed.fingerprint), placed


def make_layout(shape: tuple[int, ...], offset: tuple[int, ...], **more: object) -> TensorLayout:
    mesh = RankMesh("", (), ())
    return TensorLayout(LayoutSource.USER, shape, offset, mesh, (), (), **more)  # type: ignore[arg-type]


@given(shape=shapes, most=st.integers(1, 60), data=st.data())
def test_shards_of_a_head_add_up(shape: tuple[int, ...], most: int, data: st.DataObject):
    """Blocks along any dimension, and parts of the flattened tensor."""
    whole = np.arange(prod(shape), dtype=np.float32).reshape(shape) + 1
    expected, placed = digest(whole, None, most)
    assert placed.part == ""
    assert placed.elements <= max(most, 1)
    cut = data.draw(st.integers(0, whole.size))
    flat = whole.reshape(-1)
    pieces = [
        digest(flat[at:end], make_layout(shape, (0,) * len(shape), flat_range=(at, end)), most)
        for at, end in ((0, cut), (cut, flat.size))
    ]
    assert sum(found for found, _ in pieces) % (1 << 64) == expected
    for dimension, extent in enumerate(shape):
        cut = data.draw(st.integers(0, extent))
        pieces = []
        for at, end in ((0, cut), (cut, extent)):
            offset = tuple(at if d == dimension else 0 for d in range(len(shape)))
            part = np.take(whole, range(at, end), axis=dimension)
            pieces.append(digest(part, make_layout(shape, offset), most))
        assert sum(found for found, _ in pieces) % (1 << 64) == expected
        assert sum(placed.elements for _, placed in pieces) == placed.elements


def test_change_within_the_head_is_seen():
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    changed, behind = whole.copy(), whole.copy()
    changed[1, 5] += 1
    behind[2, 0] += 1
    before, placed = digest(whole, None, 13)
    assert placed.elements == 12
    assert digest(changed, None, 13)[0] != before == digest(behind, None, 13)[0]


def test_part_names_what_a_rank_has_of_the_head():
    rows = np.ones((2, 3), np.float32)
    assert digest(rows, shard_rows(0, 2, (8, 3)), 9)[1].part == "2:3/3,0:3/3"
    assert digest(rows, shard_rows(0, 4, (8, 3)), 9)[1].elements == 0


def test_types_without_kernels_have_no_head():
    assert place_head("float8_e5m2", (2,), None, 9) is None
    placed = place_head("complex64", (2, 3), None, 3)
    assert placed is not None
    assert placed.elements == 3
    assert placed.fingerprint.indices.extents == (6,)

"""Tensors of the whole model from parts of ranks: the ways to join them, and which is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_pairs import read_all

from rankdump._analysis.compare.joined_tensors import (
    ActivationKind,
    JoinWay,
    find_drift,
    list_join_ways,
    opened_joined_pair,
)
from rankdump._analysis.compare.report import DumpedTensor, ElementTolerances
from rankdump._analysis.compare.tensor_blocks import ArrayElements
from rankdump._analysis.reader.tree import Entry
from rankdump._core.record import TensorKey, TensorSide

Array: TypeAlias = "npt.NDArray[Any]"
Writer: TypeAlias = "Callable[..., DumpedTensor]"
FORWARD = "Default/network-Net/fc-Linear/Linear-op0"
BACKWARD = f"Gradients/{FORWARD}"


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write the arrays of ranks, and return the tensor that has them as its parts."""
    written = 0

    def write_parts(*arrays: Array, op_type: str = "Linear", name: str = FORWARD) -> DumpedTensor:
        nonlocal written
        entries: list[Entry] = []
        for rank, array in enumerate(arrays):
            written += 1
            path = tmp_path / f"{written}.npy"
            np.save(path, array)
            key = TensorKey(rank, "net", 0, 0, written, op_type, name, TensorSide.OUTPUT, 0)
            entries.append(Entry(tmp_path, path.name, key, path.stat().st_size))
        parts = tuple(entries) if len(entries) > 1 else ()
        shape = None if parts else arrays[0].shape
        tensor = DumpedTensor(TensorSide.OUTPUT, 0, "out", "float32", shape, entry=entries[0])
        return tensor._replace(parts=parts)

    return write_parts


def make_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Joined(NamedTuple):
    """A joined tensor, read whole."""

    array: Array
    findings: tuple[str, ...]
    copies: list[Array]
    drift: str
    """With the usual tolerances."""


def join(a: DumpedTensor, b: DumpedTensor, *, atol: float = 1e-4) -> tuple[Joined, Joined]:
    with opened_joined_pair(a, b) as found:
        assert not isinstance(found, str), found
        left, right = (
            Joined(
                read_all(each.elements).copy(),
                each.findings,
                [read_all(copy).copy() for copy in each.copies],
                find_drift(each, ElementTolerances(atol=atol)),
            )
            for each in found
        )
        return left, right


def join_arrays(way: JoinWay, arrays: Sequence[Array]) -> Array:
    return read_all(way.join([ArrayElements(array) for array in arrays]))


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    dimension=st.integers(0, 2),
    cuts=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_parts_along_a_dimension_join_to_the_whole(
    shape: list[int], dimension: int, cuts: list[int]
):
    dimension %= len(shape)
    shape[dimension] = sum(cuts)
    whole = make_array(*shape)
    parts = np.split(whole, np.cumsum(cuts)[:-1], axis=dimension)
    ways = list_join_ways([part.shape for part in parts], kind=ActivationKind.VALUE)
    fitting = [way for way in ways if way.shape == whole.shape]
    assert any(np.array_equal(join_arrays(way, parts), whole) for way in fitting)
    for way in ways:
        assert join_arrays(way, parts).shape == way.shape


@given(extents=st.permutations([2, 3, 1]), sizes=st.tuples(*[st.integers(1, 3)] * 3))
def test_parts_on_a_mesh_of_two_dimensions_join_to_the_whole(
    extents: list[int], sizes: tuple[int, int, int]
):
    inner, outer, _ = extents
    whole = make_array(
        *(size * count for size, count in zip(sizes, (outer, inner, 1), strict=True))
    )
    rows = np.split(whole, outer, axis=0)
    parts = [part for row in rows for part in np.split(row, inner, axis=1)]
    ways = list_join_ways([part.shape for part in parts], kind=ActivationKind.VALUE)
    joined = [join_arrays(way, parts) for way in ways if way.shape == whole.shape]
    assert any(np.array_equal(each, whole) for each in joined)


def test_parts_are_joined_as_the_other_side_has_them(write: Writer):
    whole = make_array(8, 4)
    blocks, turns = np.split(whole, 2), [whole[0::2], whole[1::2]]
    for parts, text in ((blocks, "joined along"), (turns, "joined in turns along")):
        left, right = join(write(*parts), write(whole))
        assert np.array_equal(left.array, whole)
        assert left.findings == (f"a: ranks 0-1 {text} dimension 0, inferred from elements",)
        assert right.findings == ()


@pytest.mark.parametrize("dimension", [0, 1])
def test_parts_in_zigzag_are_the_whole(write: Writer, dimension: int):
    """Context parallelism gives a rank a chunk from the beginning and one from the end."""
    whole = make_array(16, 16)
    chunks = np.split(whole, 8, axis=dimension)
    parts = [np.concatenate([chunks[at], chunks[7 - at]], axis=dimension) for at in range(4)]
    left, _ = join(write(*parts), write(whole))
    assert np.array_equal(left.array, whole)
    text = f"a: ranks 0-3 joined in zigzag along dimension {dimension}, inferred from elements"
    assert left.findings == (text,)


def test_sample_of_a_large_tensor_decides_as_all_of_it_would(write: Writer):
    """Elements that no sample has still count where several ways fit it."""
    whole = np.zeros((1 << 16, 16), np.float32)
    whole[12345], whole[-12345] = 1.0, 2.0
    turns = [whole[0::2], whole[1::2]]
    left, _ = join(write(*turns), write(whole))
    assert np.array_equal(left.array, whole)
    noisy = whole + make_array(*whole.shape)
    for parts in (np.split(noisy, 2), [noisy[0::2], noisy[1::2]]):
        left, _ = join(write(*parts), write(noisy * np.float32(1 + 1e-4)))
        assert np.array_equal(left.array, noisy)


def test_both_sides_may_have_parts(write: Writer):
    whole = make_array(12, 4)
    for counts in ((2, 3), (2, 2)):
        first, second = (write(*np.split(whole, count)) for count in counts)
        left, right = join(first, second)
        assert np.array_equal(left.array, right.array)
        assert np.array_equal(left.array, whole)


def test_likelier_way_is_used_where_rounding_decides(write: Writer):
    """Ranks of two jobs agree in whatever way they are joined."""
    whole = make_array(4, 3)
    noisy = whole + np.float32(1e-7) * make_array(4, 3, seed=1)
    left, right = join(write(*np.split(whole, 2)), write(*np.split(noisy, 2)))
    assert (left.array.shape, right.array.shape) == ((4, 3), (4, 3))
    assert [each.drift for each in (left, right)] == ["", ""]


def test_ranks_of_a_group_that_have_the_same_part_are_one(write: Writer):
    first, second = make_array(2, 4), make_array(2, 4, seed=1)
    left, _ = join(write(first, first, second, second), write(np.concatenate([first, second])))
    assert np.array_equal(left.array, np.concatenate([first, second]))


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, np.int64, np.float16])
def test_parts_of_any_type_join(write: Writer, dtype: type[np.generic]):
    """Of complex numbers the imaginary parts count as well."""
    whole: Array = np.stack([np.arange(8), np.arange(8) % 3 == 1], axis=1).astype(dtype)
    if dtype is np.complex64:
        whole = whole * np.complex64(1j)
    left, right = join(write(*np.split(whole, 2)), write(whole))
    assert left.array.dtype == right.array.dtype == dtype
    assert np.array_equal(left.array, whole)
    assert "joined along dimension 0" in left.findings[0]


def test_gradients_of_parts_are_divided_by_their_number_if_that_fits(write: Writer):
    whole = make_array(4, 3)
    parts = [2 * part for part in np.split(whole, 2)]
    left, _ = join(write(*parts, name=BACKWARD), write(whole, name=BACKWARD))
    np.testing.assert_allclose(left.array, whole)
    assert "joined along dimension 0 and divided by 2" in left.findings[0]
    # Values of a forward pass are never divided.
    left, _ = join(write(*parts), write(whole))
    np.testing.assert_allclose(left.array, 2 * whole)


def test_loss_of_a_rank_is_a_term_of_a_mean(write: Writer):
    one, two, three = (np.full((), number, np.float32) for number in (1, 2, 3))
    left, _ = join(write(one, three), write(two))
    assert left.array.tolist() == 2.0
    assert "averaged" in left.findings[0]


def test_terms_of_a_sum_are_a_missing_reduction(write: Writer):
    terms = [make_array(4, 3, seed=seed) for seed in range(2)]
    left, _ = join(write(*terms), write(terms[0] + terms[1]))
    assert np.array_equal(left.array, terms[0])
    assert left.drift == (
        "replicas on ranks 0-1 of a are terms of the sum that the other side has: a reduction is "
        "missing"
    )


def test_parameters_are_replicas_whatever_fits(write: Writer):
    half = make_array(4, 3)
    parts = write(half, half + 0.5, op_type="Parameter", name="fc.weight")
    other = write(half + 0.25, op_type="Parameter", name="fc.weight")
    left, _ = join(parts, other)
    assert np.array_equal(left.array, half)
    assert [each.shape for each in left.copies] == [(4, 3)]
    assert left.drift == ("replicas on ranks 0-1 of a differ by at most 0.5")
    assert join(parts, other, atol=1)[0].drift == ""


def test_shapes_that_do_not_fit_are_named(write: Writer):
    parts = write(make_array(3, 4), make_array(3, 4, seed=1))
    with opened_joined_pair(parts, write(make_array(8, 4))) as found:
        assert found == (
            "no way to join the ranks gives one shape: "
            "a [3, 4] or [6, 4] or [3, 8] against b [8, 4]"
        )

"""Outcomes of the comparison of a pair of tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from support.tensor_layouts import shard_rows
from support.tensor_pairs import pair, path_of, tensor
from support.tree_builder import TreeBuilder

from rankdump._analysis.compare import pair_comparison as module
from rankdump._analysis.compare.pair_comparison import compare_pair, decide_without_reading
from rankdump._analysis.compare.report import (
    ComparisonSettings,
    DumpedTensor,
    ElementTolerances,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.reader.tree_walk import locate
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import make_sample_layout

SETTINGS = ComparisonSettings()
ONES = np.ones((2, 3), np.float32)
NAN, INF = math.nan, math.inf


def verdict(folder, a, b, settings: ComparisonSettings = SETTINGS, codec: str = "none"):
    return compare_pair(pair(folder, "x", np.asarray(a), np.asarray(b), codec=codec), settings)


def figures(**known: float) -> DumpedTensor:
    named = {name.replace("_", " "): value for name, value in known.items()}
    return DumpedTensor(TensorSide.OUTPUT, 0, "", "float32", (4,), statistics=named)


def test_equal_digests_are_equal_without_reading_files(tmp_path):
    """The same digest, type and shape are the same bytes; the files may be gone by now."""
    a = tensor(tmp_path, "a", ONES, digest=True)
    b = tensor(tmp_path, "b", ONES, digest=True)
    for each in (a, b):
        path_of(each).unlink()
    assert compare_pair(TensorPair(a, b), ComparisonSettings()).verdict is TensorVerdict.SAME
    for other in (b._replace(dtype="int32"), b._replace(digest="0" * 32), b._replace(shape=None)):
        assert (
            compare_pair(TensorPair(a, other), ComparisonSettings()).verdict
            is TensorVerdict.UNREADABLE
        )


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_verdicts_of_elements(codec, tmp_path):
    def found(a, b):
        return verdict(tmp_path, a, b, codec=codec).verdict

    assert found(ONES, ONES) is TensorVerdict.SAME
    assert found(ONES, ONES * np.float32(1.00001)) is TensorVerdict.NORMAL
    assert found(ONES, ONES * 2) is TensorVerdict.DIFFERENT
    assert found(np.array([0.0], np.float32), np.array([-0.0], np.float32)) is TensorVerdict.SAME
    assert found(np.zeros((0, 3)), np.zeros((0, 3))) is TensorVerdict.SAME
    assert found(np.float64(1.5), np.float64(1.5)) is TensorVerdict.SAME
    assert found(np.float64(1.5), np.float64(2.5)) is TensorVerdict.DIFFERENT
    assert found([True, False], [True, True]) is TensorVerdict.DIFFERENT


def test_tensor_without_a_partner_is_unmatched(tmp_path):
    alone = tensor(tmp_path, "a", ONES)
    for each in (TensorPair(alone, None), TensorPair(None, alone)):
        found = compare_pair(each, ComparisonSettings())
        assert (found.verdict, found.measures) == (TensorVerdict.UNMATCHED, None)


def test_nan_at_different_places_has_verdict_nan(tmp_path):
    a, b = np.array([[1, NAN], [INF, 1]], np.float32), np.array([[1, 1], [-INF, NAN]], np.float32)
    found = verdict(tmp_path, a, b)
    assert found.verdict is TensorVerdict.NAN
    assert (found.nonfinite_a, found.nonfinite_b) == (True, True)
    assert found.findings == (
        "NaN or infinity differs at 3 of 4 places (2 in a, 2 in b), first at [0, 1]",
    )


def test_nan_at_the_same_places_follows_equal_nan(tmp_path):
    """It counts as `equal_nan` says, but the same bytes are the same bytes."""
    a, b = np.array([NAN, INF, 1], np.float32), np.array([NAN, INF, 1.00001], np.float32)
    assert verdict(tmp_path, a, a).verdict is TensorVerdict.SAME
    found = verdict(tmp_path, a, b)
    assert found.verdict is TensorVerdict.DIFFERENT
    assert found.findings == ("NaN on both sides at 1 place, which counts as unequal",)
    lenient = ComparisonSettings(ElementTolerances(equal_nan=True))
    assert verdict(tmp_path, a, b, lenient).verdict is TensorVerdict.NORMAL
    assert verdict(tmp_path, [INF], np.array([INF], np.float32)).verdict is TensorVerdict.SAME


def test_shapes_that_differ_in_extents_of_one_are_comparable(tmp_path):
    """Extents of 1 do not count, nor how the same elements are folded when one side is flat."""
    found = verdict(tmp_path, ONES, ONES.reshape(1, 2, 1, 3))
    assert found.verdict is TensorVerdict.SAME
    assert found.findings == ("shape [2, 3] against [1, 2, 1, 3], compared without extents of 1",)
    found = verdict(tmp_path, ONES, ONES.reshape(6))
    assert found.findings == ("shape [2, 3] against [6], compared element by element",)
    found = verdict(tmp_path, ONES, ONES.T)
    assert (found.verdict, found.findings) == (
        TensorVerdict.SHAPE,
        ("shape [2, 3] against [3, 2]",),
    )
    assert verdict(tmp_path, ONES, ONES[0]).verdict is TensorVerdict.SHAPE


def test_tensors_of_different_shapes_are_known_to_be_finite_or_not(tmp_path):
    """Batches of different sizes hide no NaN."""
    found = verdict(tmp_path, [1, 2, NAN], [1, 2])
    assert found.verdict is TensorVerdict.SHAPE
    assert (found.nonfinite_a, found.nonfinite_b) == (True, False)


def test_shard_is_compared_with_its_part_of_the_whole(tmp_path):
    """Also a flattened one with padding; a whole of another shape stays a difference of shapes."""
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = shard_rows(1, 2, (4, 3))
    flat = replace(rows, flat_range=(3, 7), padding=1)
    padded = np.array([*whole.reshape(-1)[3:7], -9], np.float32)
    for part, layout in ((whole[2:], rows), (padded, flat)):
        made = pair(tmp_path, "x", part, whole)
        shard = _with_layout(made.a, layout)
        found = compare_pair(TensorPair(shard, made.b), SETTINGS)
        assert found.verdict is TensorVerdict.SAME
        assert "compared with the same elements of b" in found.findings[-1]
        swapped = compare_pair(TensorPair(made.b, shard), SETTINGS)
        assert swapped.verdict is TensorVerdict.SAME
        assert "compared with the same elements of a" in swapped.findings[-1]
    made = pair(tmp_path, "x", whole[:2], whole)
    shard = _with_layout(made.a, rows)
    found = compare_pair(TensorPair(shard, made.b), SETTINGS)
    assert found.verdict is TensorVerdict.DIFFERENT
    assert found.measures is not None
    assert found.measures.max_absolute == 6
    other = pair(tmp_path, "y", whole[2:], whole[:3])
    shard = _with_layout(other.a, rows)
    assert compare_pair(TensorPair(shard, other.b), SETTINGS).verdict is TensorVerdict.SHAPE


def test_first_elements_are_never_compared_as_the_whole_tensor(tmp_path):
    """Law: of a tensor whose first elements alone were kept every outcome says so, or refuses."""
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    layout = make_sample_layout((4, 3), 5)
    made = pair(tmp_path, "x", whole.reshape(-1)[:5], whole)
    first = _with_layout(made.a, layout)
    found = compare_pair(TensorPair(first, made.b), SETTINGS)
    assert found.verdict is TensorVerdict.SAME
    assert "a has only the first 5 elements of [4, 3]" in found.findings
    both = compare_pair(TensorPair(first, first), SETTINGS)
    assert (both.verdict, len(both.findings)) == (TensorVerdict.SAME, 2)
    # A whole tensor that happens to have the same few elements.
    assert compare_pair(TensorPair(first, made.a), SETTINGS).verdict is TensorVerdict.SHAPE
    assert made.b is not None
    row = made.b._replace(entry=None, statistics={"max": 11.0})
    found = compare_pair(TensorPair(first, row), SETTINGS)
    assert found.verdict is TensorVerdict.UNKNOWN
    other = _with_layout(made.a, make_sample_layout((3, 4), 5))
    assert compare_pair(TensorPair(first, other), SETTINGS).verdict is TensorVerdict.SHAPE


def _with_layout(held, layout):
    assert held is not None
    name, size = held.entry.relative, 4 * int(np.prod(held.shape))
    record = ManifestRecord(name, 1, "Op", "x", "", held.dtype, held.shape, size, 0, "")
    entry = held.entry._replace(record=record._replace(layout=layout))
    return held._replace(entry=entry)


def test_shapes_are_read_from_files(tmp_path):
    each = pair(tmp_path, "x", np.array([[NAN, 1]], np.float32), np.array([[2, 1, 0]], np.float32))
    assert each.a is not None
    assert each.b is not None
    unsaid = TensorPair(each.a._replace(shape=None), each.b._replace(shape=None, dtype=""))
    found = compare_pair(unsaid, ComparisonSettings())
    assert (found.verdict, found.findings) == (
        TensorVerdict.SHAPE,
        ("shape [1, 2] against [1, 3]",),
    )
    assert (found.nonfinite_a, found.nonfinite_b) == (True, False)


def test_different_types_are_a_finding(tmp_path):
    found = verdict(tmp_path, np.array([1, 2], np.float32), np.array([1, 2], np.int64))
    assert (found.verdict, found.findings) == (
        TensorVerdict.SAME,
        ("dtype float32 against int64",),
    )


def test_bfloat16_is_compared_after_rounding(tmp_path):
    """A float32 that rounds to the bfloat16 is close; one step of bfloat16 further is not."""
    exact = np.array([0.1, 3.14159, -7.77], np.float32)
    short = np.array([0.10009765625, 3.140625, -7.78125], np.float32)
    a = tensor(tmp_path, "a", short, dtype="bfloat16")
    found = compare_pair(TensorPair(a, tensor(tmp_path, "b", exact)), ComparisonSettings())
    assert found.verdict is TensorVerdict.NORMAL
    assert found.findings == ("dtype bfloat16 against float32, compared as bfloat16",)
    further = tensor(tmp_path, "c", exact * np.float32(1.01))
    assert (
        compare_pair(TensorPair(further, a), ComparisonSettings()).verdict
        is TensorVerdict.DIFFERENT
    )
    same = tensor(tmp_path, "d", exact, dtype="bfloat16")
    assert (
        compare_pair(TensorPair(a, same), ComparisonSettings()).verdict is TensorVerdict.DIFFERENT
    )


def test_unreadable_file_is_an_outcome(tmp_path):
    each = pair(tmp_path, "x", ONES, ONES)
    path_of(each.b).write_bytes(b"not an npy file")
    found = compare_pair(each, ComparisonSettings())
    assert found.verdict is TensorVerdict.UNREADABLE
    assert found.findings[0].startswith(f"{path_of(each.b)}: not an npy file")
    path_of(each.b).unlink()
    assert "cannot be read" in compare_pair(each, ComparisonSettings()).findings[0]


def test_lack_of_memory_is_an_outcome(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(module, "measure_difference", full)
    found = verdict(tmp_path, ONES, ONES * 2)
    assert found.verdict is TensorVerdict.UNREADABLE
    assert found.findings[0].startswith("not enough memory for both tensors: ")


def test_statistics_are_compared_without_elements():
    def found(a, b):
        return compare_pair(TensorPair(a, b), SETTINGS)

    one = figures(max=1.0, min=-1.0, avg=0.5)
    assert found(one, one).verdict is TensorVerdict.SAME
    near = found(one, figures(max=1.0001, min=-1.0, l2norm=3.0))
    assert near.verdict is TensorVerdict.NORMAL
    assert near.statistic_differences == {"max": pytest.approx(0.0001), "min": 0.0}
    assert found(one, figures(avg=0.6)).verdict is TensorVerdict.DIFFERENT
    odd = found(one, figures(max=NAN, min=NAN, avg=NAN))
    assert (odd.verdict, odd.nonfinite_a, odd.nonfinite_b) == (TensorVerdict.NAN, False, True)
    assert found(figures(max=INF), figures(max=INF)).verdict is TensorVerdict.SAME


def test_nan_statistics_are_unknown():
    """Neither figure is a number: they say nothing of whether the tensors agree."""
    blank = figures(max=NAN, min=NAN, avg=NAN)
    for a, b in ((blank, blank), (figures(), figures()), (figures(max=1.0), figures(avg=1.0))):
        found = compare_pair(TensorPair(a, b), ComparisonSettings())
        assert found.verdict is TensorVerdict.UNKNOWN
        assert found.findings == ("neither elements nor statistics are known on both sides",)


def test_elements_are_compared_with_statistics_of_the_other_side(tmp_path):
    """The side that has elements is measured for the figures of the other."""
    full = tensor(tmp_path, "a", np.array([3, -4, 0, 0], np.float32))
    rows = figures(max=3.0, min=-4.0, avg=-0.25, l2norm=5.0, nan_count=0)
    assert compare_pair(TensorPair(full, rows), ComparisonSettings()).verdict is TensorVerdict.SAME
    assert compare_pair(TensorPair(rows, full), ComparisonSettings()).verdict is TensorVerdict.SAME
    complex_one = tensor(tmp_path, "c", np.array([1j] * 4, np.complex64))
    assert (
        compare_pair(TensorPair(complex_one, rows), ComparisonSettings()).verdict
        is TensorVerdict.UNKNOWN
    )


@pytest.mark.parametrize(
    ("known", "nonfinite"),
    [
        ({"nan_count": 1, "negative_inf_count": 0, "positive_inf_count": 0}, True),
        ({"nan_count": 0, "negative_inf_count": 0, "positive_inf_count": 0}, False),
        ({"max": 1.0, "min": 0.0}, False),
        ({"max": 1.0}, None),
        ({"max": INF}, True),
        ({}, None),
    ],
)
def test_has_nonfinite_statistics_uses_counts_or_extremes(known, nonfinite):
    assert (
        compare_pair(TensorPair(figures(**known), None), ComparisonSettings()).nonfinite_a
        is nonfinite
    )


def test_msaccucmp_measures_are_computed_on_request(tmp_path):
    assert verdict(tmp_path, ONES, ONES * 2).extra == {}
    found = verdict(tmp_path, ONES, ONES * 2, ComparisonSettings(msaccucmp=True))
    assert found.extra["MaxRelativeError"] == 0.5


def test_file_of_another_size_than_its_manifest_is_read_whatever_its_digest(tmp_path):
    """Its end is lost, or an agent has packed it since."""
    tree = TreeBuilder(tmp_path)
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, codec="none")
    tree.complete(0, 0, world_size=1)
    digest = xxhash.xxh3_128_hexdigest(ONES.tobytes())
    whole, cut, longer = (
        DumpedTensor(TensorSide.OUTPUT, 0, "", "float32", (2, 3), digest, entry)
        for entry in _read_in_sizes(path, (0, -1, 1))
    )
    assert compare_pair(TensorPair(whole, whole), SETTINGS).verdict is TensorVerdict.SAME
    for other in (cut, longer):
        assert decide_without_reading(TensorPair(other, whole), SETTINGS) is None
        assert decide_without_reading(TensorPair(whole, other), SETTINGS) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert compare_pair(TensorPair(cut, whole), SETTINGS).verdict is TensorVerdict.UNREADABLE


def _read_in_sizes(path, changes):
    (entry,) = locate(path)
    return [entry._replace(stored_bytes=entry.stored_bytes + change) for change in changes]

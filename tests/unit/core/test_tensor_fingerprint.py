"""Fingerprints of records: with their statistics, over the indices of the logical tensor, and the
file of an iteration.
"""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.npy_format import format_row_header
from rankdump._core.statistics import STATISTIC_TITLES, compute_statistic_row
from rankdump._core.tensor_fingerprint import (
    FINGERPRINT_BYTES,
    format_fingerprint_file,
    measure_with_fingerprint,
    parse_fingerprint_file,
    place_fingerprint,
)
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
    make_sample_layout,
)
from rankdump._kernels.element_moments import ELEMENT_CODES
from rankdump._kernels.shard_fingerprint import compute_fingerprint
from rankdump.errors import CorruptedError

ITEMS = tuple(STATISTIC_TITLES)
WHOLE = np.random.default_rng(5).standard_normal((7, 6)).astype(np.float32)


def layout_of(
    offset: tuple[int, ...],
    *,
    kind: PlacementKind = PlacementKind.SHARD,
    flat_range: tuple[int, ...] = (),
    padding: int = 0,
    whole: tuple[int, ...] = WHOLE.shape,
) -> TensorLayout:
    mesh = RankMesh("", ("dp",), (2,), 0, (1,))
    placements = (MeshPlacement(kind, 0, 2 * (kind is PlacementKind.STRIDED_SHARD)),)
    source = LayoutSource.DTENSOR
    return TensorLayout(source, whole, offset, mesh, (0,), placements, flat_range, padding)


def fingerprint_of(
    array: np.ndarray, layout: TensorLayout | None = None, dtype: str = ""
) -> tuple[int, np.ndarray]:
    name = dtype or array.dtype.name
    placement = place_fingerprint(name, array.shape, layout)
    found = measure_with_fingerprint((), name, array.tobytes(), placement).fingerprint
    assert len(found) == FINGERPRINT_BYTES
    return int.from_bytes(found[:8], "little"), np.frombuffer(found, "<f4", offset=8)


@pytest.mark.parametrize("dtype", [name for name in ELEMENT_CODES if name != "bfloat16"])
@pytest.mark.parametrize("count", [1, 64, 1025, 5000])
def test_statistics_of_one_pass_have_the_same_bits(dtype: str, count: int):
    array = (np.random.default_rng(count).standard_normal(count) * 50).astype(dtype)
    placement = place_fingerprint(dtype, array.shape, None)
    data = array.tobytes()
    for form in (data, memoryview(data)):
        found = measure_with_fingerprint(ITEMS, dtype, form, placement, exact=True)
        assert found.statistics == compute_statistic_row(ITEMS, dtype, data, exact=True)
        digest, sketch = fingerprint_of(array)
        assert found.fingerprint == digest.to_bytes(8, "little") + sketch.tobytes()


def test_whole_tensor_has_the_fingerprint_of_the_kernel():
    expected = compute_fingerprint(WHOLE)
    digest, sketch = fingerprint_of(WHOLE)
    assert digest == expected.digest
    np.testing.assert_array_equal(sketch, expected.sketch.astype("<f4"))
    halves = WHOLE.view(np.uint16)
    as_brain = compute_fingerprint(halves, "bfloat16")
    assert fingerprint_of(halves, dtype="bfloat16")[0] == as_brain.digest
    complex_one = (WHOLE + 1j * WHOLE[::-1]).astype(np.complex64)
    assert fingerprint_of(complex_one)[0] == compute_fingerprint(complex_one).digest


def test_shards_add_up_to_the_whole():
    """Blocks of uneven size, an empty one, and flat ranges, of which one has padding."""
    digest, sketch = fingerprint_of(WHOLE)
    blocks = [
        fingerprint_of(WHOLE[first:last], layout_of((first, 0)))
        for first, last in ((0, 3), (3, 7), (7, 7))
    ]
    flat = WHOLE.ravel()
    padded = np.concatenate([flat[20:], np.full(2, np.nan, np.float32)])
    ranges = [
        fingerprint_of(flat[:20], layout_of((0, 0), flat_range=(0, 20))),
        fingerprint_of(padded, layout_of((0, 0), flat_range=(20, 42), padding=2)),
    ]
    sample = [
        fingerprint_of(flat[:5], make_sample_layout(WHOLE.shape, 5)),
        fingerprint_of(flat[5:], layout_of((0, 0), flat_range=(5, 42))),
    ]
    for parts in (blocks, ranges, sample):
        assert sum(each[0] for each in parts) % (1 << 64) == digest
        np.testing.assert_allclose(sum(each[1] for each in parts), sketch, atol=1e-5)


def test_partial_sums_add_up_in_the_sketch():
    first = WHOLE / 3
    layout = layout_of((0, 0), kind=PlacementKind.PARTIAL)
    parts = [fingerprint_of(each, layout)[1] for each in (first, WHOLE - first)]
    np.testing.assert_allclose(sum(parts), fingerprint_of(WHOLE)[1], atol=1e-5)


def test_padding_is_in_the_statistics_alone():
    flat = np.array([1, 2, 9], np.float32)
    layout = layout_of((0,), whole=(2,), flat_range=(0, 2), padding=1)
    placement = place_fingerprint("float32", flat.shape, layout)
    found = measure_with_fingerprint(("max", "count"), "float32", flat.tobytes(), placement)
    assert found.statistics == "9,3"
    digest = fingerprint_of(flat[:2])[0]
    assert found.fingerprint[:8] == digest.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("dtype", "layout", "rows"),
    [
        ("float8_e4m3fn", None, 7),
        ("float32", layout_of((0, 0), kind=PlacementKind.STRIDED_SHARD), 4),  # 0, 1, 4 and 5
        ("float32", layout_of((3, 0)), 7),  # 7 rows do not fit behind row 3
        ("float32", layout_of((0,), whole=(42,)), 7),
    ],
    ids=["type without kernel", "strided shard", "outside of the whole", "other dimensions"],
)
def test_tensor_without_known_indices_has_no_fingerprint(
    dtype: str, layout: TensorLayout | None, rows: int
):
    array = WHOLE[:rows]
    placement = place_fingerprint(dtype, array.shape, layout)
    assert placement is None
    data = bytes(array.size) if dtype == "float8_e4m3fn" else array.tobytes()
    found = measure_with_fingerprint(("max",), dtype, data, placement)
    assert found == (compute_statistic_row(("max",), dtype, data), b"")


def test_sum_beyond_float32_is_infinite():
    sketch = fingerprint_of(np.full(4096, 3e38, np.float64))[1]
    assert np.isinf(sketch).any()
    assert not np.isnan(sketch).any()


def test_file_is_what_numpy_reads():
    rows = [(0, bytes(range(256)) + bytes(8)), (3, bytes(FINGERPRINT_BYTES))]
    data = format_fingerprint_file(rows)
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    found = parse_fingerprint_file(data, 4)
    assert loaded.dtype == found.dtype
    assert loaded.tobytes() == found.tobytes()
    assert found["record"].tolist() == [0, 3]
    assert [row.tobytes()[4:] for row in found] == [each for _, each in rows]
    assert len(parse_fingerprint_file(format_fingerprint_file([]), 0)) == 0


GOOD = format_fingerprint_file([(at, bytes(FINGERPRINT_BYTES)) for at in range(3)])


class Trap:
    """Ends the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.exit, ("unpickled",))


def make_object_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Trap()], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a file of fingerprints"),
        (pickle.dumps(Trap()), "not a file of fingerprints"),
        (make_object_file(), "not a file of fingerprints"),
        (GOOD.replace(b"(3,)", b"(4,)"), "not a file of fingerprints"),
        (GOOD[:-1], "not a file of fingerprints"),
        (GOOD + b"x", "its last row is incomplete"),
        (format_row_header([("record", "<u4")], 1) + bytes(4), "not a file of fingerprints"),
        (
            format_fingerprint_file([(1, bytes(FINGERPRINT_BYTES)), (1, bytes(FINGERPRINT_BYTES))]),
            "do not rise",
        ),
        (format_fingerprint_file([(3, bytes(FINGERPRINT_BYTES))]), "and its manifest has 3"),
    ],
)
def test_other_file_is_rejected_in_one_line(data: bytes, words: str):
    with pytest.raises(CorruptedError, match=words) as caught:
        parse_fingerprint_file(data, 3)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=2000))
def test_any_bytes_are_read_or_rejected(data: bytes):
    for hostile in (data, GOOD[:150] + data, GOOD[:300] + data):
        try:
            parse_fingerprint_file(hostile, 3)
        except CorruptedError:
            continue
        assert hostile.startswith(b"\x93NUMPY")

"""Fingerprints: a reference in Python, kernels against each other, and addition over shards."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_variants import VARIANTS, get_dtype, recipes, using, widen_elements

import rankdump._kernels._native as native
from rankdump._kernels import numpy_twin
from rankdump._kernels.element_moments import ELEMENT_CODES, find_address
from rankdump._kernels.shard_fingerprint import ShardFingerprint, compute_fingerprint
from rankdump.errors import UnsupportedError

MASK = (1 << 64) - 1


def splitmix64(index: int) -> int:
    z = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def reference(name: str, elements: np.ndarray, indices: list[int]) -> tuple[int, list[list[float]]]:
    """Digest, and the terms of each bucket of the sketch, element by element."""
    digest, buckets = 0, [[] for _ in range(64)]
    bits = elements.view(f"u{elements.itemsize}").reshape(-1).tolist()
    values = widen_elements(name, elements).reshape(-1).tolist()
    for bit, value, index in zip(bits, values, indices, strict=True):
        hashed = splitmix64(index)
        digest += (hashed | 1) * (bit + 1)
        if math.isfinite(value):
            buckets[hashed >> 58].append(-value if hashed >> 57 & 1 else value)
    return digest & MASK, buckets


def test_splitmix64_is_the_published_generator():
    """The first outputs of the generator with the seed 0, as its authors' program prints them."""
    assert [splitmix64(index) for index in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("name", ELEMENT_CODES)
@given(data=st.data())
@settings(max_examples=20)
def test_fingerprints_of_all_kernels_equal_the_reference(name: str, data: st.DataObject):
    """Law: digest and sketch have the same bits in every kernel, for shards of any shape."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    if data.draw(st.booleans()):
        shape = (*shape[:-1], shape[-1] + data.draw(st.integers(1000, 1100)) // math.prod(shape))
    elements = np.resize(data.draw(recipes(name, 400)).make(), shape)
    if elements.dtype != get_dtype(name):  # numpy resizes nothing to zeros of float64
        elements = np.zeros(shape, get_dtype(name))
    strides = tuple(data.draw(st.integers(0, 1 << 40)) for _ in shape)
    first = data.draw(st.integers(0, 1 << 50))
    indices = [
        first + sum(at * step for at, step in zip(place, strides, strict=True))
        for place in product(*map(range, shape))
    ]
    digest, buckets = reference(name, elements, indices)
    arguments = find_address(elements), ELEMENT_CODES[name], shape, strides, first
    twin = numpy_twin.fingerprint_shard(*arguments)
    assert twin[0] == digest
    large = sum(abs(term) for terms in buckets for term in terms)
    if math.isfinite(large):  # else the order of the terms decides which sums overflow
        sketch = list(map(math.fsum, buckets))
        assert np.frombuffer(twin[1]) == pytest.approx(sketch, rel=1e-12, abs=large * 1e-13)
    for variant in VARIANTS:
        with using(variant):
            found = native.fingerprint_shard(*arguments)
        assert found[:2] == twin[:2]
        assert repr(found[2][5:]) == repr(twin[2][5:])


def cut(extent: int, data: st.DataObject) -> list[slice]:
    """A dimension in uneven pieces, some of them empty."""
    places = sorted(data.draw(st.lists(st.integers(0, extent), max_size=3)))
    return [slice(a, b) for a, b in pairwise([0, *places, extent])]


def merge(shards: list[ShardFingerprint]) -> ShardFingerprint:
    merged = shards[0]
    for shard in shards[1:]:
        merged = merged.merge_with(shard)
    return merged


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int64", "bool", "complex64"])
@given(data=st.data())
@settings(max_examples=25)
def test_fingerprints_of_shards_add_up(name: str, data: st.DataObject):
    """Law: any partition into blocks has the digest of the whole, and nearly its sketch."""
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    values = np.random.default_rng(1).normal(size=shape) * 50
    whole = values.astype(name) if name != "complex64" else (values + 1j).astype(name)
    expected = compute_fingerprint(whole)
    shards = [
        compute_fingerprint(
            whole[place], global_shape=shape, offset=tuple(part.start for part in place)
        )
        for place in product(*(cut(extent, data) for extent in shape))
    ]
    found = merge(data.draw(st.permutations(shards)) if len(shards) < 20 else shards)
    assert found.digest == expected.digest
    assert found.sketch == pytest.approx(expected.sketch, abs=1e-9)
    exact = ("size", "maximum", "minimum", "nans", "positives", "negatives", "zeros")
    for field in exact:
        assert getattr(found.moments, field) == getattr(expected.moments, field)
    assert found.moments.total == pytest.approx(expected.moments.total, abs=1e-9)


def test_fingerprint_is_independent_of_the_order_in_memory():
    tensor = np.random.default_rng(2).normal(size=(30, 40)).astype("f4")
    expected = compute_fingerprint(tensor)
    for other in (np.asfortranarray(tensor), tensor.astype(">f4"), np.repeat(tensor, 2, 0)[::2]):
        found = compute_fingerprint(other)
        assert (found.digest, found.sketch.tolist()) == (expected.digest, expected.sketch.tolist())


def test_digest_changes_with_every_bit_and_place():
    tensor = np.random.default_rng(3).normal(size=(8, 8)).astype("f4")
    digests = {compute_fingerprint(tensor).digest}
    for at in range(64):
        changed = tensor.copy()
        changed.view("u4").reshape(-1)[at] ^= 1 << at % 32
        digests.add(compute_fingerprint(changed).digest)
    digests.add(compute_fingerprint(tensor[::-1]).digest)
    digests.add(compute_fingerprint(tensor.T).digest)
    digests.add(compute_fingerprint(np.zeros((8, 8), "f4")).digest)
    digests.add(compute_fingerprint(np.zeros((8, 7), "f4")).digest)
    assert len(digests) == 69


def test_sketch_estimates_the_distance_of_tensors():
    """The mean of estimates is that of the distances, and none is far off."""
    rng = np.random.default_rng(4)
    ratios: list[float] = []
    a = np.zeros(0)
    for _ in range(40):
        a, b = rng.normal(size=(2, 96, 128)).astype("f4")
        estimate = compute_fingerprint(a).estimate_distance(compute_fingerprint(b))
        ratios.append(estimate / float(np.linalg.norm(a - b)))
        reverse = compute_fingerprint(a[::-1]).estimate_distance(compute_fingerprint(a))
        assert reverse == pytest.approx(float(np.linalg.norm(a[::-1] - a)), rel=0.5)
    assert np.mean(ratios) == pytest.approx(1, abs=0.05)
    assert 0.6 < min(ratios) < max(ratios) < 1.4
    changed = a.copy()
    changed[3, 4] += 0.5
    one = compute_fingerprint(changed).estimate_distance(compute_fingerprint(a))
    assert one == pytest.approx(0.5, rel=1e-4)


def test_a_value_that_is_not_finite_counts_in_digest_and_moments_alone():
    tensor = np.ones(3000, "f4")
    tensor[[5, 1500]] = np.nan, np.inf
    found, zeros = compute_fingerprint(tensor), tensor.copy()
    zeros[[5, 1500]] = 0
    assert found.sketch.tolist() == compute_fingerprint(zeros).sketch.tolist()
    assert found.digest != compute_fingerprint(zeros).digest
    assert (found.moments.nans, found.moments.positive_infinities) == (1, 1)


def test_bfloat16_and_float32_of_the_same_numbers_have_one_sketch():
    halves = np.random.default_rng(6).normal(size=5000).astype("f4").view("u4") >> np.uint32(16)
    wide = (halves << np.uint32(16)).view("f4")
    found = compute_fingerprint(halves.astype("u2"), "bfloat16")
    assert found.sketch.tolist() == compute_fingerprint(wide).sketch.tolist()
    assert found.moments == compute_fingerprint(wide).moments


def test_empty_and_scalar_tensors_have_fingerprints():
    empty = compute_fingerprint(np.zeros((3, 0), "f4"))
    assert (empty.digest, empty.sketch.any(), empty.moments.size) == (0, False, 0)
    scalar, vector = np.float32(1.5), np.array([1.5], "f4")
    assert compute_fingerprint(np.array(scalar)).digest == compute_fingerprint(vector).digest


def test_fingerprints_reject_what_they_cannot_have():
    with pytest.raises(UnsupportedError, match=r"has no fingerprint"):
        compute_fingerprint(np.zeros(2, np.longdouble))
    for offset in ((0, 3), (-1, 0), (0,)):
        with pytest.raises(UnsupportedError, match="not within"):
            compute_fingerprint(np.zeros((2, 2)), global_shape=(4, 4), offset=offset)

"""Conversions of device formats against loops that copy one element at a time."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankdump._layout.device_formats import (
    DEEP_ORDERS,
    FLAT_ORDERS,
    OriginalLayout,
    convert_format,
    list_target_formats,
)
from rankdump.errors import CorruptedError, UnsupportedError

DTYPES = ("int8", "float16", "float32", "float64", "complex128", "bool")
small = st.integers(1, 5)
channels = st.integers(1, 70)
dtypes = st.sampled_from(DTYPES)


def ceil(number, divisor):
    return -(-number // divisor)


def offset_nc1hwc0(n, c, h, w, *, shape, c0):
    _, channels, height, width = shape
    return (((n * ceil(channels, c0) + c // c0) * height + h) * width + w) * c0 + c % c0


def offset_ndc1hwc0(n, c, d, h, w, *, shape, c0):
    _, channels, depth, height, width = shape
    outer = (n * depth + d) * ceil(channels, c0) + c // c0
    return ((outer * height + h) * width + w) * c0 + c % c0


def offset_fractal_z(n, c, h, w, *, shape, c0):
    filters, _, height, width = shape
    outer = (c // c0 * height + h) * width + w
    return (outer * ceil(filters, 16) * 16 + n) * c0 + c % c0


def offset_fractal_z_3d(n, c, d, h, w, *, shape, c0):
    filters, channels, _, height, width = shape
    outer = ((d * ceil(channels, c0) + c // c0) * height + h) * width + w
    return (outer * ceil(filters, 16) * 16 + n) * c0 + c % c0


def offset_fractal_nz(*index, shape, c0):
    *lead, h, w = index
    *extents, height, width = shape
    h1, w1 = ceil(height, 16), ceil(width, c0)
    matrix = 0
    for at, extent in zip(lead, extents, strict=True):
        matrix = matrix * extent + at
    return matrix * w1 * h1 * 16 * c0 + w // c0 * h1 * 16 * c0 + h * c0 + w % c0


def offset_grouped(n, c, h, w, *, shape, c0, groups):
    filters, cin, height, width = shape
    cout = filters // groups
    e = min(math.lcm(math.lcm(cin, c0) // cin, math.lcm(cout, 16) // cout), groups)
    cin_opt, cout_opt = ceil(e * cin, c0) * c0, ceil(e * cout, 16) * 16
    k = n // cout
    dci, dco = k % e * cin + c, k % e * cout + n % cout
    base = k // e * (cin_opt // c0) * height * width * cout_opt * c0
    plane = dci // c0 * height * width + h * width + w
    return base + plane * cout_opt * c0 + dco * c0 + dci % c0


SHAPES = {
    "NC1HWC0": lambda s, c0: (s[0], ceil(s[1], c0), s[2], s[3], c0),
    "NDC1HWC0": lambda s, c0: (s[0], s[2], ceil(s[1], c0), s[3], s[4], c0),
    "FRACTAL_Z": lambda s, c0: (ceil(s[1], c0) * s[2] * s[3], ceil(s[0], 16), 16, c0),
    "FRACTAL_Z_3D": lambda s, c0: (
        s[2] * ceil(s[1], c0) * s[3] * s[4],
        ceil(s[0], 16),
        16,
        c0,
    ),
    "FRACTAL_NZ": lambda s, c0: (*s[:-2], ceil(s[-1], c0), ceil(s[-2], 16), 16, c0),
}
OFFSETS = {
    "NC1HWC0": offset_nc1hwc0,
    "NDC1HWC0": offset_ndc1hwc0,
    "FRACTAL_Z": offset_fractal_z,
    "FRACTAL_Z_3D": offset_fractal_z_3d,
    "FRACTAL_NZ": offset_fractal_nz,
}


def values(shape, dtype):
    """Return elements that are as different as the type permits."""
    flat = np.arange(1, math.prod(shape) + 1)
    return (flat % 2 == 0 if dtype == "bool" else flat % 251 - 100).astype(dtype).reshape(shape)


def laid_out(tensor, name, c0, **more):
    """Return a tensor of NCHW, NCDHW or ND in a device format, copied by element; padding
    is zero.
    """
    shape = more.pop("device", None) or SHAPES[name](tensor.shape, c0)
    offset = more.pop("offset", None) or OFFSETS[name]
    flat = np.zeros(math.prod(shape), tensor.dtype)
    for index in product(*map(range, tensor.shape)):
        flat[offset(*index, shape=tensor.shape, c0=c0, **more)] = tensor[index]
    return flat.reshape(shape)


def in_order(tensor, wanted):
    """Return a tensor of NCHW or NCDHW in another order of axes, copied by element."""
    letters = "NCDHW" if len(wanted) == 5 else "NCHW"
    extents = dict(zip(letters, tensor.shape, strict=True))
    made = np.empty([extents[letter] for letter in wanted], tensor.dtype)
    for index in product(*map(range, tensor.shape)):
        at = dict(zip(letters, index, strict=True))
        made[tuple(at[letter] for letter in wanted)] = tensor[index]
    return made


def same(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.flags.c_contiguous
    assert np.array_equal(found, expected)


_of_each_format = settings(max_examples=40)
"""Formats share what a law is about."""


@pytest.mark.parametrize("wanted", FLAT_ORDERS)
@pytest.mark.parametrize("name", ["NC1HWC0", "FRACTAL_Z"])
@_of_each_format
@given(small, channels, small, small, st.sampled_from((8, 16, 32)), dtypes)
def test_conversion_of_four_axis_formats(name, wanted, n, c, h, w, c0, dtype):
    """Every plain order is made from every format of four axes, and cropped to the
    original shape.
    """
    tensor = values((n, c, h, w), dtype)
    expected = in_order(tensor, wanted)
    device = laid_out(tensor, name, c0)
    found = convert_format(device, name, wanted, OriginalLayout(expected.shape))
    same(found.array, expected)
    assert not found.has_padding
    back = convert_format(expected, wanted, name, OriginalLayout(c0=c0))
    same(back.array, device)


@pytest.mark.parametrize("wanted", DEEP_ORDERS)
@pytest.mark.parametrize("name", ["NDC1HWC0", "FRACTAL_Z_3D"])
@_of_each_format
@given(small, st.integers(1, 35), small, small, small, st.sampled_from((16, 32)), dtypes)
def test_conversion_of_five_axis_formats(name, wanted, n, c, d, h, w, c0, dtype):
    """The same holds for formats with a depth."""
    tensor = values((n, c, d, h, w), dtype)
    expected = in_order(tensor, wanted)
    device = laid_out(tensor, name, c0)
    same(convert_format(device, name, wanted, OriginalLayout(expected.shape)).array, expected)
    same(convert_format(expected, wanted, name, OriginalLayout(c0=c0)).array, device)


@given(small, st.integers(1, 35), small, small, small)
def test_conversion_of_ndc1hwc0_to_nd_is_ncdhw(n, c, d, h, w):
    tensor = values((n, c, d, h, w), "float16")
    device = laid_out(tensor, "NDC1HWC0", 16)
    same(convert_format(device, "NDC1HWC0", "ND", OriginalLayout(tensor.shape)).array, tensor)


@pytest.mark.parametrize("wanted", ["NCHW", "NHWC", "ND"])
@_of_each_format
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from((8, 16, 32)),
    dtypes,
)
def test_conversion_of_fractal_nz_matrices(wanted, lead, h, w, c0, dtype):
    """Any number of extents may precede those of the matrices."""
    tensor = values((*lead, h, w), dtype)
    device = laid_out(tensor, "FRACTAL_NZ", c0)
    same(convert_format(device, "FRACTAL_NZ", wanted, OriginalLayout(tensor.shape)).array, tensor)
    same(convert_format(tensor, "ND", "FRACTAL_NZ", OriginalLayout(c0=c0)).array, device)


@given(st.integers(1, 100), st.sampled_from((16, 32)))
def test_conversion_of_a_fractal_nz_vector(length, c0):
    """The vector is in the first row of its blocks."""
    vector = values((length,), "float16")
    device = np.zeros((ceil(length, c0), 1, 16, c0), "float16")
    for at in range(length):
        device[at // c0, 0, 0, at % c0] = vector[at]
    same(convert_format(device, "FRACTAL_NZ", "ND", OriginalLayout((length,))).array, vector)
    same(convert_format(vector, "ND", "FRACTAL_NZ", OriginalLayout(c0=c0)).array, device)


@pytest.mark.parametrize("wanted", ["NCHW", "HWCN"])
@_of_each_format
@given(
    st.integers(2, 9),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((16, 32)),
)
def test_conversion_of_grouped_fractal_z(wanted, groups, cin, cout, h, w, c0):
    """Groups share blocks, each on a diagonal of its own; all other elements are zero."""
    tensor = values((groups * cout, cin, h, w), "float32")
    e = min(math.lcm(math.lcm(cin, c0) // cin, math.lcm(cout, 16) // cout), groups)
    outer = ceil(groups, e) * ceil(e * cin, c0) * h * w
    device = laid_out(
        tensor,
        "FRACTAL_Z",
        c0,
        groups=groups,
        offset=offset_grouped,
        device=(outer, ceil(e * cout, 16), 16, c0),
    )
    expected = in_order(tensor, wanted)
    origin = OriginalLayout(expected.shape, groups)
    same(convert_format(device, "FRACTAL_Z", wanted, origin).array, expected)
    same(
        convert_format(expected, wanted, "FRACTAL_Z", OriginalLayout((), groups, c0)).array, device
    )


@pytest.mark.parametrize("orders", [FLAT_ORDERS, DEEP_ORDERS])
@given(st.data())
def test_conversion_between_plain_orders(orders, data):
    """Every order is converted into every other, and back."""
    extents = data.draw(st.lists(st.integers(0, 4), min_size=len(orders[0]), max_size=5))
    tensor = values(extents[: len(orders[0])], data.draw(dtypes))
    for source, target in product(orders, orders):
        found = convert_format(in_order(tensor, source), source, target).array
        same(found, in_order(tensor, target))


@given(st.binary(max_size=6), st.integers(1, 3), st.integers(1, 33), st.integers(1, 9))
def test_conversion_of_unaligned_bytes(gap, n, c, w):
    """The header before a payload may have any length."""
    tensor = values((n, c, 2, w), "float32")
    device = laid_out(tensor, "NC1HWC0", 16)
    data = bytearray(gap + device.tobytes())
    view = np.frombuffer(memoryview(data)[len(gap) :], "<f4").reshape(device.shape)
    same(convert_format(view, "NC1HWC0", "NCHW", OriginalLayout(tensor.shape)).array, tensor)
    wanted = tensor.transpose(0, 2, 3, 1)
    same(convert_format(view, "NC1HWC0", "NHWC", OriginalLayout(wanted.shape)).array, wanted.copy())


def test_conversion_keeps_every_bit():
    """Elements are moved without computation, so a NaN keeps its payload."""
    bits = np.arange(2 * 2 * 3 * 5 * 16, dtype="<u2") * 7919
    found = convert_format(bits.view("<f2").reshape(2, 2, 3, 5, 16), "NC1HWC0", "NCHW").array
    expected = bits.reshape(2, 2, 3, 5, 16).transpose(0, 1, 4, 2, 3).reshape(2, 32, 3, 5)
    assert np.array_equal(found.view("<u2"), expected)


DEVICE = np.zeros((2, 2, 3, 5, 16), np.float16)


@pytest.mark.parametrize(
    ("target", "original", "shape", "whole"),
    [
        ("NCHW", (2, 20, 3, 5), (2, 20, 3, 5), False),
        ("NCHW", (), (2, 32, 3, 5), False),  # nothing says where the padding is
        ("NHWC", (2, 3, 5, 20), (2, 3, 5, 20), False),
        ("NHWC", (2, 20, 3, 5), (2, 3, 5, 32), True),  # as it is, not brought into the order
        ("NHWC", (2, 32, 3, 5), (2, 3, 5, 32), False),  # nothing is padded
        ("NCHW", (2, 20), (2, 20, 1, 1), False),  # ones behind it
        ("NCHW", (2, 20, 3, 6), (2, 32, 3, 5), True),
        ("NCHW", (2, 20, 3, 5, 1), (2, 32, 3, 5), True),
        ("NCHW", (2, 0, 3, 5), (2, 32, 3, 5), True),
    ],
)
def test_find_cropped_shape_follows_msaccucmp(target, original, shape, whole):
    found = convert_format(DEVICE, "NC1HWC0", target, OriginalLayout(original))
    assert (found.array.shape, found.has_padding) == (shape, whole)


@pytest.mark.parametrize(
    ("source", "shape", "target", "original", "said"),
    [
        ("NC1HWC0", (2, 3, 5, 16), "NCHW", (), "5 extents"),
        ("NC1HWC0", (2, 1, 3, 5, 0), "NCHW", (), "blocks of 0"),
        ("NDC1HWC0", (2, 1, 3, 5, 16), "NCDHW", (), "6 extents"),
        ("FRACTAL_Z", (9, 2, 16, 16), "NCHW", (), "cannot be read without it"),
        ("FRACTAL_Z", (9, 2, 16, 16), "NCHW", (20, 16, 3, 0), "above 0"),
        ("FRACTAL_Z", (9, 2, 16, 16), "NCHW", (20, 17, 3, 3), "cannot hold"),
        ("FRACTAL_Z", (9, 2, 16, 16), "NCHW", (33, 16, 3, 3), "cannot hold"),
        ("FRACTAL_Z", (9, 2, 16, 16), "HWCN", (20, 16, 3, 3), "cannot hold"),
        ("FRACTAL_Z", (9, 2, 16, 16), "NCHW", (1 << 62, 1 << 62, 3, 3), "cannot hold"),
        ("FRACTAL_NZ", (2, 16, 16), "ND", (), "4 extents or more"),
        ("FRACTAL_NZ", (4, 2, 0, 16), "ND", (), "no rows"),
        ("FRACTAL_NZ", (3, 4, 2, 16, 16), "ND", (2, 30, 50), r"holds \(3,17-32,49-64\)"),
        ("FRACTAL_NZ", (3, 4, 2, 16, 16), "ND", (3, 30, 48), r"holds \(3,17-32,49-64\)"),
        ("FRACTAL_NZ", (3, 4, 2, 16, 16), "ND", (30, 50), "cannot hold"),
        ("FRACTAL_NZ", (4, 2, 16, 16), "ND", (50,), "cannot hold"),
        ("NCHW", (2, 3, 4), "NHWC", (), "4 extents"),
    ],
)
def test_conversion_rejects_shapes_that_contradict_the_format(
    source, shape, target, original, said
):
    with pytest.raises(CorruptedError, match=said):
        convert_format(np.zeros(shape, np.float16), source, target, OriginalLayout(original))


def test_conversion_rejects_groups_that_contradict_the_shape():
    device = np.zeros((9, 2, 16, 16), np.float16)
    with pytest.raises(CorruptedError, match="3 groups"):
        convert_format(device, "FRACTAL_Z", "NCHW", OriginalLayout((20, 16, 3, 3), 3))
    with pytest.raises(CorruptedError, match="that takes"):
        convert_format(device, "FRACTAL_Z", "NCHW", OriginalLayout((20, 16, 3, 3), 2))


def test_conversion_rejects_a_format_word_that_contradicts_the_shape():
    with pytest.raises(CorruptedError, match="blocks of 16, but its format word declares 8"):
        convert_format(DEVICE, "NC1HWC0", "NCHW", OriginalLayout(c0=8))


def test_convert_format_names_possible_targets():
    """The error lists the formats that the source can be converted to."""
    with pytest.raises(UnsupportedError, match=r"to HWCN, only to NCDHW, NDHWC, DHWCN, ND$"):
        convert_format(DEVICE, "NDC1HWC0", "HWCN")
    with pytest.raises(UnsupportedError, match="only to nothing"):
        convert_format(DEVICE, "FRACTAL_ZZ", "ND")


def test_conversions_include_those_of_msaccucmp():
    theirs = {
        "FRACTAL_NZ": {"NCHW", "NHWC", "ND"},
        "FRACTAL_Z": {"HWCN", "NCHW"},
        "HWCN": {"FRACTAL_Z", "NCHW", "NHWC"},
        "NCHW": {"FRACTAL_Z", "NHWC"},
        "NHWC": {"FRACTAL_Z", "NCHW", "HWCN"},
        "NC1HWC0": {"NCHW", "NHWC", "HWCN"},
        "NDC1HWC0": {"NCDHW", "ND"},
    }
    for source, targets in theirs.items():
        assert targets <= set(list_target_formats(source))


def test_convert_format_to_the_same_format_copies():
    array = np.arange(6).reshape(2, 3).T
    same(convert_format(array, "FRACTAL_Z_WINO", "FRACTAL_Z_WINO").array, array.copy())


def test_conversion_of_one_byte_elements_has_blocks_of_32():
    assert convert_format(np.zeros((1, 5, 2, 2), np.int8), "NCHW", "NC1HWC0").array.shape[-1] == 32
    assert (
        convert_format(np.zeros((1, 5, 2, 2), np.float32), "NCHW", "NC1HWC0").array.shape[-1] == 16
    )

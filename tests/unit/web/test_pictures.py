"""Pictures: PNG files that other programs read, and colours of cells."""

from __future__ import annotations

import io

import matplotlib.image
import numpy as np
import pytest

from rankdump._web.page_kinds import make_body
from rankdump._web.png_image import (
    EMPTY_INDEX,
    INFINITE_INDEX,
    NAN_INDEX,
    color_cells,
    encode_png,
    make_palette,
)


def test_png_is_read_by_others():
    """matplotlib finds the colour of each cell."""
    indices = np.array([[0, 125, 250], [NAN_INDEX, INFINITE_INDEX, EMPTY_INDEX]], np.uint8)
    found = matplotlib.image.imread(io.BytesIO(encode_png(indices)), format="png")
    palette = np.frombuffer(make_palette(), np.uint8).reshape(256, 3)
    assert (np.rint(found[..., :3] * 255) == palette[indices]).all()


def test_picture_without_cells_is_one_pixel():
    png = encode_png(np.zeros((0, 0), np.uint8))
    assert matplotlib.image.imread(io.BytesIO(png), format="png").shape[:2] == (1, 1)


def test_colours_are_by_sign_and_size():
    found = color_cells(np.array([[-2.0, -1.0, 0.0, 1.0, 2.0], [np.nan, np.inf, -np.inf, 0, 2]]))
    low, lower, middle, higher, high = found[0].tolist()
    assert low == 0
    assert low < lower < middle == 125 < higher < high == 250
    assert found[1].tolist()[:3] == [NAN_INDEX, INFINITE_INDEX, INFINITE_INDEX]


def test_logarithmic_colours_tell_small_values_apart():
    values = np.array([[1e-9, 1e-6, 1e-3, 1.0, 0.0]])
    found = color_cells(values, is_log=True)[0].astype(int).tolist()
    assert found[4] == 125
    assert 125 < found[0] < found[1] < found[2] < found[3] == 250


@pytest.mark.parametrize("values", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.ones((1, 1))])
def test_values_without_a_range_have_a_colour(values):
    for is_log in (False, True):
        assert color_cells(values, is_log=is_log).shape == values.shape


def test_values_become_what_json_has():
    assert make_body({1: (np.float32(1.5), float("nan"), {"b": np.arange(2)})}) == {
        "1": [1.5, "nan", {"b": [0, 1]}]
    }

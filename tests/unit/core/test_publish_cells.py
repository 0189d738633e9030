"""Columns as text: numbers and texts are written as Python writes them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankdumpd.coordinator.publish.order_lines import (
    TextCells,
    format_digits,
    lay_out_rows,
    pack_rows,
)

EDGES = [0, 1, 9, 9_999, 10_000, 10_001, 99_999_999, 100_000_000, 10**12, 10**16 - 1, 2**63 - 1]


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_cells_of_numbers_equal_pythons_text(numbers) -> None:
    """No digit too many or too few, whatever stands together."""
    rows = lay_out_rows([b"<", *format_digits(np.array(numbers, "i8")), b">"], len(numbers))
    assert pack_rows(rows).decode() == "".join(f"<{number}>" for number in numbers)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_cells_of_negative_numbers_equal_pythons_text(numbers) -> None:
    """A clock may stand before the epoch."""
    rows = lay_out_rows([*format_digits(np.array(numbers, "i8")), b" "], len(numbers))
    assert pack_rows(rows).decode() == "".join(f"{number} " for number in numbers)


@given(st.lists(st.sampled_from([0, 3, 2**32, 2**63, 2**64 - 1]), min_size=1, max_size=9))
def test_cells_of_the_largest_numbers_equal_pythons_text(numbers) -> None:
    """Positions are unsigned."""
    rows = lay_out_rows([*format_digits(np.array(numbers, "u8")), b" "], len(numbers))
    assert pack_rows(rows).decode() == "".join(f"{number} " for number in numbers)


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_cells_of_texts_repeat_the_table(texts) -> None:
    """Any text, the empty one too, as often and in whatever order it is asked for."""
    places = np.arange(len(texts) * 2)[::-1] % len(texts)
    rows = lay_out_rows([b"<", TextCells(texts).select_texts(places), b">"], len(places))
    assert pack_rows(rows).decode() == "".join(f"<{texts[place]}>" for place in places)

"""Lines of the order's file, both ways, and the names of the files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import EventKind
from rankdump.contract.order import COLUMNS, ORDER_FILE, from_row, of_another_job, to_row
from rankdump.contract.status import OrderEntry


def test_job_ids_that_look_alike_in_a_file_name_do_not_share_one() -> None:
    """What sanitising makes equal, the digest keeps apart."""
    names = [of_another_job(ORDER_FILE, job) for job in ("a_b", "a/b", "a.b", "a b")]
    assert len(set(names)) == 4
    assert names[0] == "execution_order.a_b.csv"


NUMBERS = st.integers(0, 2**64 - 1)
RANKS = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30)
ENTRIES = st.builds(
    OrderEntry,
    position=NUMBERS,
    graph=NUMBERS,
    iteration=NUMBERS,
    ranks=RANKS,
    name=TEXT,
    kind=st.sampled_from(EventKind),
    group=TEXT,
    sequence=NUMBERS,
    start_us=st.integers(-(2**63), 2**63 - 1),
    end_us=st.integers(-(2**63), 2**63 - 1),
    missing=RANKS,
)


@given(ENTRIES)
def test_a_line_reads_back_as_its_entry(entry) -> None:
    """from_row is the inverse of to_row."""
    assert from_row(dict(zip(COLUMNS, to_row(entry), strict=True))) == entry


GOOD = to_row(OrderEntry(1, 0, 0, (0,), "n", EventKind.OPERATOR))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("position", "-1"),
        ("position", "x"),
        ("kind", "DANCE"),
        ("ranks", "0 a"),
        ("missing", "-3"),
        ("start_us", ""),
        ("sequence", None),
        ("group", ...),
    ],
)
def test_a_bad_line_is_damaged_and_named(column, value) -> None:
    """Any field that cannot be is a DamagedError that says which line."""
    row: dict[str, Any] = dict(zip(COLUMNS, GOOD, strict=True))
    if value is ...:
        del row[column]
    else:
        row[column] = value
    with pytest.raises(DamagedError, match="line of position"):
        from_row(row)


def test_an_entry_of_every_kind_has_its_own_word() -> None:
    """No two kinds share a word in the file."""
    words = {to_row(replace(from_row(dict(zip(COLUMNS, GOOD, strict=True))), kind=kind))[3]
             for kind in EventKind}  # fmt: skip
    assert len(words) == len(EventKind)

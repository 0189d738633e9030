"""Lines of order and findings files, and the names of the files."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.execution_order import (
    ORDER_COLUMNS,
    add_job_tag,
    format_finding_line,
    format_order_line,
    make_job_tag,
    make_order_file_name,
    parse_finding_line,
    parse_order_file_name,
    parse_order_line,
)
from rankdump._core.status import OrderEntry
from rankdump.errors import CorruptedError


def test_job_tags_of_similar_job_ids_differ() -> None:
    """Ids that are equal after sanitising have different digests."""
    tags = [make_job_tag(job) for job in ("a_b", "a/b", "a.b", "a b", "\u00e9" * 99)]
    names = [add_job_tag(make_order_file_name(3), tag) for tag in tags]
    assert len(set(names)) == len(names)
    assert names[0] == "execution_order_graph_3.a_b.csv"
    assert [parse_order_file_name(name) for name in names] == [(3, tag, 0) for tag in tags]
    assert parse_order_file_name(make_order_file_name(12)) == (12, "", 0)
    again = make_order_file_name(12, attempt=3)
    assert parse_order_file_name(again) == (12, "", 3)
    assert parse_order_file_name(add_job_tag(again, "attempt_1")) == (12, "attempt_1", 3)
    for other in (
        "execution_order.csv",
        "execution_order_graph_x.csv",
        make_order_file_name(1, "trace"),
    ):
        assert parse_order_file_name(other) is None


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
    rank_positions=RANKS,
    streams=RANKS,
    element_count=NUMBERS,
    dtype=TEXT,
    peer=st.integers(-1, 2**31 - 1),
)


@given(ENTRIES)
def test_order_line_round_trips(entry) -> None:
    """Any reader of CSV gets the same fields."""
    line = format_order_line(entry)
    assert parse_order_line(line) == entry
    (cells,) = csv.reader([line], strict=True)
    row = dict(zip(ORDER_COLUMNS, cells, strict=True))
    assert (row["name"], row["group"], row["kind"]) == (entry.name, entry.group, entry.kind.name)


GOOD = format_order_line(OrderEntry(1, 0, 0, (0,), "n", EventKind.OPERATOR))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("position", "-1"),
        ("position", "x"),
        ("kind", "DANCE"),
        ("ranks", "0 a"),
        ("missing", "-3"),
        ("start_us", ""),
        ("sequence", "0,0"),
        ("peer", '"'),
    ],
)
def test_invalid_order_line_is_corrupted(column, value) -> None:
    """The CorruptedError names the line."""
    cells = GOOD.rstrip("\n").split(",")
    cells[ORDER_COLUMNS.index(column)] = value
    with pytest.raises(CorruptedError, match="is not a line of an execution order"):
        parse_order_line(",".join(cells) + "\n")


def test_order_line_with_wrong_field_count_is_corrupted() -> None:
    for line in ("", "1,2\n", GOOD[:-1] + ",1\n", "[1]\n"):
        with pytest.raises(CorruptedError):
            parse_order_line(line)
        with pytest.raises(CorruptedError):
            parse_finding_line(line)


def test_order_page_lists_every_column_and_finding() -> None:
    page = (Path(__file__).parents[4] / "docs" / "order.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert rows == {*ORDER_COLUMNS, *(kind.value for kind in FindingKind)}


def test_event_kinds_have_distinct_names_in_order_lines() -> None:
    lines = [format_order_line(replace(parse_order_line(GOOD), kind=kind)) for kind in EventKind]
    assert len({line.split(",")[3] for line in lines}) == len(EventKind)


@given(
    st.builds(
        Finding,
        kind=st.sampled_from(FindingKind),
        iteration=NUMBERS,
        text=st.text(),
        ranks=RANKS,
        group=st.text(),
        sequence=st.integers(-1),
        name=st.text(),
        position=st.integers(-1),
        provisional=st.booleans(),
    )
)
def test_finding_line_round_trips(finding) -> None:
    """A finding is one line with any texts."""
    line = format_finding_line(finding)
    assert line.count("\n") == 1
    assert parse_finding_line(line) == finding

"""Rows of `statistic.csv`: they are read as written, by rankdump and by any reader of CSV."""

from __future__ import annotations

import csv

from hypothesis import given
from hypothesis import strategies as st
from support.record_heads import head_of

from rankdump._core.record import TensorKey, TensorSide
from rankdump._layout import statistic_tables
from rankdump._layout.profile import PROFILES

ITEMS = ("max", "md5", "zero count")
names = st.text(st.characters() | st.sampled_from('",(/.-\\\n\r\u2028'), max_size=30)


@given(
    op_type=names,
    op_name=names,
    side=st.sampled_from(TensorSide),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    profile=st.sampled_from(list(PROFILES.values())),
)
def test_statistic_line_keeps_columns_for_any_name(op_type, op_name, side, shape, profile):
    """For any operator name a row is one line with its fields in their columns."""
    key = TensorKey(0, "Net", 0, 0, 1_700_000_000_000_000, op_type, op_name, side, 3)
    line = statistic_tables.format_statistic_line(
        head_of(key, "float32", shape, 24), ("1", "ff", "0"), profile
    )
    header = statistic_tables.format_statistic_header(ITEMS)
    text = f"{header}\n{line}\n"
    (row,) = statistic_tables.parse_statistic_table(text, file="statistic.csv")
    assert (row.side, row.slot, row.shape, row.data_bytes) == (side, 3, shape, 24)
    assert row.values == (("Max Value", "1"), ("MD5", "ff"), ("Zero Count", "0"))
    titles, fields = csv.reader(text.splitlines(), strict=True)
    assert fields[: len(titles)] == [
        *(row.op_type, row.op_name, "0", "0", "1700000000000000", side.value, "3", "24"),
        *("float32", f"({','.join(map(str, shape))})", "1", "ff", "0"),
    ]


def test_second_table_is_named_by_its_columns():
    """Two jobs with the same columns share it; all such names are recognised as tables."""
    name = statistic_tables.make_second_table_name(statistic_tables.format_statistic_header(ITEMS))
    assert name == statistic_tables.make_second_table_name(
        statistic_tables.format_statistic_header(ITEMS)
    )
    assert name != statistic_tables.make_second_table_name(
        statistic_tables.format_statistic_header(ITEMS[:1])
    )
    assert statistic_tables.STATISTIC_TABLE_NAME.fullmatch(name)
    assert statistic_tables.STATISTIC_TABLE_NAME.fullmatch("statistic.csv")
    assert not statistic_tables.STATISTIC_TABLE_NAME.fullmatch("statistic.old.csv")

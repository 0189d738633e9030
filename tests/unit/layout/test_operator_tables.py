"""Tables of operators: CANN's header and rows, and reading both back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.record import TensorKind, TensorSide
from rankdump._layout import statistic_tables
from rankdump._layout.file_name import FileKind, FileName
from rankdump.errors import CorruptedError

CANN_ITEMS = (
    *("max", "min", "avg", "count", "nan count", "negative inf count", "positive inf count"),
)
KIND = TensorKind(
    0, "Conv2d", "Default/a", TensorSide.OUTPUT, 0, "float32", (4, 50, 50, 16), 640000
)
OPERATOR = FileName(FileKind.TABLE, "Conv2d", "Default_a", 1, 2, 3)


def test_operator_table_lines_equal_those_of_cann():
    """Header and row of a sample in CANN's tests."""
    assert statistic_tables.format_operator_header(CANN_ITEMS) == (
        "Input/Output,Index,Data Size,Data Type,Format,Shape,Max Value,Min Value,"
        "Avg Value,Count,Nan Count,Negative Inf Count,Positive Inf Count"
    )
    assert statistic_tables.format_operator_line(
        KIND, "NHWC", "1.99999,1,1.50004,160000,0,0,0"
    ) == ("Output,0,640000,DT_FLOAT,NHWC,4x50x50x16,1.99999,1,1.50004,160000,0,0,0")


@pytest.mark.parametrize(
    ("dtype", "shape", "spelt"),
    [
        ("bfloat16", (3,), "DT_BF16,ND,3"),
        ("float32", (), "DT_FLOAT,ND,-"),
        ("int64", (0, 2), "DT_INT64,ND,0x2"),
        ("float8_e4m3fnuz", (1,), "DT_UNDEFINED,ND,1"),
    ],
)
def test_operator_table_types_and_shapes(dtype, shape, spelt):
    """The shape of a scalar is a dash; a type without a number in CANN is undefined."""
    kind = KIND._replace(side=TensorSide.INPUT, slot=2, dtype=dtype, shape=shape)
    assert statistic_tables.format_operator_line(kind, "ND", "") == f"Input,2,640000,{spelt}"


def test_operator_table_columns_follow_the_items():
    """Columns are in the order of the items, and the norm has a title of its own."""
    assert statistic_tables.format_operator_header(("count", "min", "l2norm")).endswith(
        ",Shape,Count,Min Value,l2norm"
    )
    assert statistic_tables.format_operator_header(()).endswith(",Shape")


@given(
    sides=st.lists(st.sampled_from(TensorSide), max_size=5),
    shape=st.lists(st.integers(0, 1 << 62), max_size=6).map(tuple),
)
def test_operator_table_round_trip(sides, shape):
    """Rows are read as written, also after a header that an interrupted writer repeated."""
    kinds = [KIND._replace(side=side, slot=slot, shape=shape) for slot, side in enumerate(sides)]
    lines = [statistic_tables.format_operator_header(("max",))] * 2
    lines += [statistic_tables.format_operator_line(kind, "ND", str(kind.slot)) for kind in kinds]
    rows = statistic_tables.parse_operator_table("\n".join(lines) + "\n", OPERATOR, file="a.csv")
    assert [(row.side, row.slot, row.shape) for row in rows] == [
        (kind.side, kind.slot, shape) for kind in kinds
    ]
    assert all(row.values == (("Max Value", str(row.slot)),) for row in rows)
    assert all((row.op_type, row.op_name) == ("Conv2d", "Default_a") for row in rows)
    assert all((row.task, row.stream, row.timestamp_us) == (1, 2, 3) for row in rows)


@pytest.mark.parametrize(
    "line",
    [
        "Input,0,4",
        "Side,0,4,DT_FLOAT,ND,-,1",
        "Input,-1,4,DT_FLOAT,ND,-,1",
        "Input,0,4,DT_FLOAT,ND,2xx3,1",
        "Input,0," + "9" * 30 + ",DT_FLOAT,ND,-,1",
    ],
)
def test_operator_table_names_the_damaged_row(line):
    """The error for a damaged row names its line."""
    text = f"{statistic_tables.format_operator_header(('max',))}\n{line}\n"
    with pytest.raises(CorruptedError, match=r"a\.csv, line 2"):
        statistic_tables.parse_operator_table(text, OPERATOR, file="a.csv")


def test_operator_table_may_have_empty_cells():
    """CANN leaves cells empty where a type has no statistics."""
    header = statistic_tables.format_operator_header(("max", "min"))
    text = f"{header}\nInput,0,4,DT_COMPLEX64,ND,2,,\n"
    (row,) = statistic_tables.parse_operator_table(text, OPERATOR, file="a.csv")
    assert row.values == (("Max Value", ""), ("Min Value", ""))


def test_operator_table_rejects_another_file():
    """The first line identifies a table of another kind."""
    with pytest.raises(CorruptedError, match="not an operator table"):
        statistic_tables.parse_operator_table("Op Type,Op Name\n", OPERATOR, file="a.csv")

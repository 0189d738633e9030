"""SQL over views: one SELECT, nothing else, and within its limits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankdump._analysis.table.table_query import OpenTable, QueryLimits, TableViews, run_query
from rankdump.errors import ExhaustedError, QueryError


@pytest.fixture
def views(tmp_path: Path) -> TableViews:
    path = tmp_path / "it's a table.parquet"
    pq.write_table(pa.table({"rank": [0, 1, 1], "name": ["a", "b'; DROP", '<b>"c"</b>']}), path)
    return TableViews({"tensors": [path]}, {"events": lambda: pa.table({"kind": ["OPERATOR"]})})


def test_rows_of_files_and_of_made_tables_are_joined(views):
    found = run_query("SELECT rank, count(*) n, min(kind) k FROM tensors, events GROUP BY 1", views)
    assert sorted(found.to_pylist(), key=lambda row: row["rank"]) == [
        {"rank": 0, "n": 1, "k": "OPERATOR"},
        {"rank": 1, "n": 2, "k": "OPERATOR"},
    ]


def test_names_with_quotes_and_markup_are_values(views):
    found = run_query("""SELECT name FROM tensors WHERE name = 'b''; DROP'""", views)
    assert found.to_pylist() == [{"name": "b'; DROP"}]


def test_table_that_is_not_named_is_not_made(views):
    def fail() -> pa.Table:
        raise AssertionError("it was made")

    lazy = TableViews(views.files, {"events": fail})
    assert len(run_query("SELECT * FROM tensors", lazy)) == 3


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("selec 1", "not SQL"),
        ("", "one SELECT is allowed, and this is nothing"),
        ("SELECT 1; SELECT 2", "this is SELECT, SELECT"),
        ("CREATE TABLE x (a INTEGER)", "this is CREATE"),
        ("COPY tensors TO 'x.csv'", "this is COPY"),
        ("ATTACH 'x.db'", "this is ATTACH"),
        ("SET threads = 4", "this is SET"),
        ("INSTALL httpfs", "this is LOAD"),
        ("EXPLAIN ANALYZE SELECT 1", "this is EXPLAIN"),
        ("PRAGMA enable_progress_bar", "one SELECT is allowed"),
        ("SELECT * FROM missing", "There are events, tensors"),
        ("SELECT missing FROM tensors", "missing"),
        ("SELECT * FROM read_csv('/etc/passwd')", "a query reads only events, tensors"),
        ("SELECT * FROM read_text('/etc/passwd')", "a query reads only events, tensors"),
        ("SELECT * FROM glob('/etc/*')", "a query reads only events, tensors"),
        ("SELECT * FROM 'other.parquet'", "There are events, tensors|a query reads only"),
        ("SELECT * FROM views", "There are events, tensors"),
        ("SELECT CAST('x' AS INTEGER)", "Conversion Error"),
    ],
)
def test_what_is_not_allowed_is_one_line(views, sql, words):
    with pytest.raises(QueryError, match=words) as caught:
        run_query(sql, views)
    assert "\n" not in str(caught.value)


def test_file_outside_the_views_is_not_read_by_a_path_through_them(views, tmp_path: Path):
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"secret": [1]}), other)
    inside = views.files["tensors"][0]
    sql = f"SELECT * FROM read_parquet('{inside.parent}/x/../{other.name}')"
    with pytest.raises(QueryError, match="a query reads only"):
        run_query(sql, views)


def test_query_that_never_ends_is_ended(views):
    endless = "SELECT sum(a.range * b.range) FROM range(1000000000) a, range(1000000000) b"
    with pytest.raises(QueryError, match=r"took longer than 0\.2 s"):
        run_query(endless, views, QueryLimits(timeout_s=0.2))


def test_query_that_needs_too_much_memory_is_ended(views):
    large = "SELECT list(a) FROM (SELECT range::VARCHAR a FROM range(99999999)) GROUP BY hash(a)"
    with pytest.raises(ExhaustedError, match=r"more memory than 32\.0 MiB"):
        run_query(large, views, QueryLimits(memory_bytes=32 << 20))


def test_damaged_file_is_one_line(views):
    path = views.files["tensors"][0]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(QueryError, match="view tensors: "):
        run_query("SELECT * FROM tensors", views)


def test_open_table_runs_statements_with_values(views):
    table = OpenTable(views, QueryLimits(threads=1))
    found = [
        table.run("SELECT count(*) AS n FROM tensors WHERE name = ? AND rank >= ?", (name, 1))
        for name in ("b'; DROP", "a", "x' OR 'x' = 'x")
    ]
    assert [each.to_pylist() for each in found] == [[{"n": 1}], [{"n": 0}], [{"n": 0}]]
    # What is made is made once, before it is named.
    assert table.run("SELECT kind FROM events").to_pylist() == [{"kind": "OPERATOR"}]
    table.close()


def test_open_table_is_as_restricted_as_a_query(views):
    table = OpenTable(views, QueryLimits(timeout_s=0.2, threads=1))
    for sql in ("DROP VIEW tensors", "SELECT * FROM read_text('/etc/passwd')", "SELECT missing"):
        with pytest.raises(QueryError):
            table.run(sql)
    with pytest.raises(QueryError, match="longer than"):
        table.run("SELECT count(*) FROM range(1000000000000) a, range(1000) b")
    assert len(table.run("SELECT * FROM tensors")) == 3
    table.close()

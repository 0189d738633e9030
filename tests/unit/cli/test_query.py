"""`rankdump index` and `rankdump query`: output, exit codes, and one line for each error."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from rankdump._analysis.table.table_files import list_tensor_files
from rankdump._cli.command_group import run_command_line

NAME = "Default/network-Net/fc-Linear/Linear-op0"


def told(capsys, *arguments):
    """Return exit code, standard output and standard error of one command line."""
    code = run_command_line([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """The address space of this process stays as it is, and no slow query ends the process."""
    monkeypatch.setattr("rankdump._cli.query.limit_address_space", lambda memory_bytes: None)
    monkeypatch.setattr("rankdump._cli.query._GRACE_S", 500.0)


@pytest.fixture
def filled(tree):
    for rank in (0, 1):
        tree.tensor(rank, 0, NAME, np.array([1.5, np.inf], np.float32), tabled=True)
        tree.tensor(rank, 0, "Default/'; DROP-op0", np.array([2.0 * rank]), op_type="<b>")
        tree.complete(rank, 0)
    return tree.root


def test_index_tells_what_it_wrote(filled, capsys):
    assert told(capsys, "index", filled) == (0, "4 rows in 1 file written\n", "")
    assert told(capsys, "index", filled) == (0, "0 rows in 0 files written, 1 file kept\n", "")
    code, out, _ = told(capsys, "index", filled, "--json", "-j", 1)
    assert code == 0
    assert json.loads(out) == {"rows": 0, "files": 0, "kept_files": 1, "problems": []}


def test_index_with_a_damaged_manifest_ends_with_1(filled, capsys):
    next((filled / "rank_1/.dump_metadata/manifest").iterdir()).write_text("{")
    code, out, err = told(capsys, "index", filled)
    assert (code, out) == (1, "2 rows in 1 file written\n")
    assert "cannot be read" in err


def test_index_of_no_tree_ends_with_1(tmp_path, capsys):
    code, _, err = told(capsys, "index", tmp_path)
    assert code == 1
    assert "not a dump tree" in err


@pytest.mark.parametrize("indexed", [False, True])
def test_query_prints_a_table(filled, capsys, indexed):
    """Law: with a table and without one the answer is the same."""
    if indexed:
        told(capsys, "index", filled)
    sql = "SELECT rank, max(max) AS largest FROM tensors GROUP BY 1 ORDER BY 1"
    code, out, err = told(capsys, "query", filled, sql)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["rank", "largest"], ["0", "inf"], ["1", "inf"]
    ]  # fmt: skip


def test_query_prints_csv_and_json(filled, capsys):
    sql = "SELECT name, op_type, shape, max FROM tensors WHERE rank = 1 ORDER BY name"
    _, out, _ = told(capsys, "query", filled, sql, "--csv")
    assert [*csv.reader(io.StringIO(out))] == [
        ["name", "op_type", "shape", "max"],
        ["Default/'; DROP-op0", "<b>", "[1]", ""],
        [NAME, "Linear", "[2]", "inf"],
    ]
    _, out, _ = told(capsys, "query", filled, sql, "--json")
    assert json.loads(out)["rows"][1] == {
        "name": NAME, "op_type": "Linear", "shape": [2], "max": "inf"
    }  # fmt: skip


def test_query_writes_parquet(filled, capsys, tmp_path):
    target = tmp_path / "rows.parquet"
    code, out, _ = told(capsys, "query", filled, "SELECT * FROM tensors", "--parquet", target)
    assert (code, out) == (0, f"4 rows in {target}\n")
    assert len(pq.read_table(target)) == 4


def test_query_notes_what_the_table_lacks(filled, capsys, tree):
    told(capsys, "index", filled)
    tree.tensor(0, 1, NAME, np.zeros(2, np.float32))
    tree.complete(0, 1)
    code, out, err = told(capsys, "query", filled, "SELECT count(*) FROM tensors", "--csv")
    assert (code, out.splitlines()[1]) == (0, "4")
    assert err == (f"the table lacks 1 new or changed file: run rankdump index {filled}\n")


@pytest.mark.parametrize(
    ("sql", "code", "words"),
    [
        ("selec", 2, "not SQL"),
        ("COPY tensors TO 'x'", 2, "one SELECT is allowed"),
        ("SELECT * FROM read_text('/etc/passwd')", 2, "a query reads only"),
        ("SELECT sum(a.range * b.range) FROM range(1000000000) a, range(99999999) b", 2, "long"),
    ],
)
def test_query_that_cannot_be_run_is_one_line(filled, capsys, sql, code, words):
    found, out, err = told(capsys, "query", filled, sql, "--timeout", "0.2")
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_foreign_file_in_the_table_is_one_line(filled, capsys):
    told(capsys, "index", filled)
    (path,) = list_tensor_files(filled)
    path.write_bytes(b"PAR1 no")
    code, _, err = told(capsys, "query", filled, "SELECT 1")
    assert code == 1
    assert err.startswith(f"rankdump: {path}: not a Parquet file")
    assert err.count("\n") == 1


def test_huge_value_does_not_take_the_memory_of_the_host(filled):
    """Law: what DuckDB does not count is bounded as well."""
    huge = "SELECT list(x) FROM (SELECT unnest(range(1000000000)) x)"
    command = [sys.executable, "-m", "rankdump", "query", str(filled), huge, "--memory", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 1
    assert done.stderr == "rankdump: the query needs more memory than 64.0 MiB\n"


@pytest.mark.parametrize("command", ["index", "query"])
def test_missing_extra_is_named(filled, capsys, monkeypatch, command):
    for name in [name for name in sys.modules if name.startswith("rankdump._analysis.table")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    code, _, err = told(capsys, command, filled, *(["SELECT 1"] if command == "query" else []))
    assert code == 2
    assert "install it with: pip install 'rankdump[table]'" in err


@pytest.mark.parametrize("cut", [200, -3], ids=["beginning", "end"])
def test_damaged_manifest_is_named_and_not_missing_in_the_table(filled, capsys, cut):
    manifest = next((filled / "rank_1/.dump_metadata/manifest").iterdir())
    manifest.write_bytes(manifest.read_bytes()[:cut])
    asked = ("query", filled, "SELECT count(*) AS n FROM tensors", "--csv")
    named = f"{manifest}: manifest cannot be read: "
    code, out, err = told(capsys, *asked)
    assert (code, out, err.startswith(named)) == (1, "n\n2\n", True)
    code, _, err = told(capsys, "index", filled)
    assert (code, err.startswith(named)) == (1, True)
    code, out, err = told(capsys, *asked)
    assert (code, out, err.startswith(named)) == (1, "n\n2\n", True)
    assert "rankdump index" not in err

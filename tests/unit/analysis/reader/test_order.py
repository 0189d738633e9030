from __future__ import annotations

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rankdump._analysis.reader import coordinator_files
from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.execution_order import (
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    add_job_tag,
    format_finding_line,
    format_order_line,
    make_job_tag,
    make_order_file_name,
    make_parquet_file_name,
)
from rankdump._core.plan import IterationSelection
from rankdump._core.selection import parse_iterations
from rankdump._core.status import OrderEntry
from rankdump.errors import CorruptedError
from rankdump.reader import read_order

ENTRIES = (
    OrderEntry(0, 0, 0, (0,), 'Default/a,"b"/MatMul-op0', EventKind.OPERATOR, "", 0, 5, 9),
    OrderEntry(1, 0, 2, (0, 1), "Default/AllReduce", EventKind.ALL_REDUCE, "world", 3, 9, 12, (2,)),
)
ELSEWHERE = (OrderEntry(2, 4, 2, (0,), "Default/Add", EventKind.OPERATOR),)
FINDING = Finding(FindingKind.GAP, 3, "iteration 3: 2 events of rank 1 were lost", (1,))


def write(root, entries, name="execution_order_graph_0.csv", age_s=0):
    path = root / GLOBAL_ORDER_FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ORDER_HEADER + "".join(map(format_order_line, entries)))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_read_order_returns_entries_and_findings(tmp_path):
    """Entries of all graphs survive the files, by position, and so do the findings."""
    paths = (write(tmp_path, ENTRIES), write(tmp_path, ELSEWHERE, make_order_file_name(4)))
    (tmp_path / GLOBAL_ORDER_FOLDER / "findings.jsonl").write_text(format_finding_line(FINDING))
    published = read_order(tmp_path)
    assert tuple(published.entries()) == (*ENTRIES, *ELSEWHERE)
    assert tuple(published.entries(graph=4)) == ELSEWHERE
    assert tuple(published.entries(iterations=IterationSelection("2", ((2, 2),)))) == (
        ENTRIES[1],
        *ELSEWHERE,
    )
    assert published.findings == (FINDING,)
    assert (published.paths, published.others) == (paths, ())


def test_read_order_defaults_to_the_latest_job(tmp_path):
    """Of several jobs in one tree the one published last is read, with its own findings."""
    write(tmp_path, ENTRIES, age_s=100)
    folder = tmp_path / GLOBAL_ORDER_FOLDER
    (folder / "execution_order.job").write_text("j1")
    (folder / "findings.jsonl").write_text(format_finding_line(FINDING))
    write(tmp_path, ENTRIES[:1], add_job_tag(make_order_file_name(0), make_job_tag("j2")))
    published = read_order(tmp_path)
    assert tuple(published.entries()) == ENTRIES[:1]
    assert published.findings == ()
    assert published.others == ("execution_order_graph_0.csv",)
    first = read_order(tmp_path, job_id="j1")
    assert tuple(first.entries()) == ENTRIES
    assert first.findings == (FINDING,)
    assert first.others == ("execution_order_graph_0.j2.csv",)
    with pytest.raises(CorruptedError, match="no order of job 'j3'"):
        read_order(tmp_path, job_id="j3")


def test_read_order_ignores_other_items(tmp_path):
    """A link to nowhere, a folder of that name and other files are passed over."""
    path = write(tmp_path, ENTRIES)
    path.with_name("execution_order_graph_0.a.csv").symlink_to("nowhere")
    path.with_name("execution_order_graph_1.csv").mkdir()
    path.with_name("notes.csv").write_text("mine")
    published = read_order(tmp_path)
    assert (published.paths, published.others) == ((path,), ())


def test_missing_order_is_an_error(tmp_path):
    """A tree without an order is an error with the path, not an empty order."""
    with pytest.raises(
        CorruptedError, match=r"execution_order_graph_0\.csv: the file does not exist"
    ):
        read_order(tmp_path)


def test_incomplete_last_line_is_ignored(tmp_path):
    """A coordinator may write while somebody reads."""
    path = write(tmp_path, ENTRIES)
    path.write_bytes(path.read_bytes() + b"2,0,0,OPERA")
    assert tuple(read_order(tmp_path).entries()) == ENTRIES


@pytest.mark.parametrize(
    "text",
    ["0,0\n", "x" + "," * 15 + "\n", "0,0,0,NO_SUCH_KIND,n,0,,0,0,0,,0,0,0,,-1\n", "\udcff\n"],
)
def test_invalid_line_is_named(tmp_path, text):
    """Damage says in which file, and where."""
    path = write(tmp_path, ENTRIES)
    with path.open("a", errors="surrogateescape") as file:
        file.write(text)
    with pytest.raises(CorruptedError, match=r"execution_order_graph_0\.csv"):
        list(read_order(tmp_path).entries(iterations=IterationSelection()))


def write_tables(root, *iterations):
    """Write an order of iterations that end in this sequence, with the table of each."""
    entries = []
    for number, iteration in enumerate(iterations):
        # Odd positions are those of another graph.
        positions = [number * 8 + 2 * at for at in range(4)]
        entries += [
            OrderEntry(at, 0, iteration, (0,), "Default/Add-op" + "1" * at, EventKind.OPERATOR)
            for at in positions
        ]
        tables = root / GLOBAL_ORDER_FOLDER / make_order_file_name(0, "parquet")
        tables.mkdir(parents=True, exist_ok=True)
        table = pa.table({"name": ["a"] * 4, "position": positions})
        parquet.write_table(table, tables / make_parquet_file_name(iteration))
    return entries, write(root, entries)


def test_iteration_is_read_at_the_place_that_its_table_has(tmp_path, monkeypatch):
    """Lines of other iterations are not looked at, as long as the tables are of this order."""
    monkeypatch.setattr(coordinator_files, "_MIN_BYTES", 0)
    entries, path = write_tables(tmp_path, 2, 0, 1, 5)
    for text, wanted in (("1", {1}), ("0|5", {0, 5}), ("1-2", {1, 2}), ("7", set())):
        found = list(read_order(tmp_path).entries(iterations=parse_iterations(text)))
        assert found == [each for each in entries if each.iteration in wanted]
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], "damaged,2", *lines[3:]]))
    only = parse_iterations("1")
    assert [each.iteration for each in read_order(tmp_path).entries(iterations=only)] == [1] * 4
    with pytest.raises(CorruptedError, match=r"execution_order_graph_0\.csv, line 3"):
        list(read_order(tmp_path).entries())


@pytest.mark.parametrize("table", ["removed", "stale", "damaged", "foreign"])
def test_tables_of_another_order_are_not_used(tmp_path, monkeypatch, table):
    """The lines are looked for then."""
    monkeypatch.setattr(coordinator_files, "_MIN_BYTES", 0)
    entries, path = write_tables(tmp_path, 2, 0, 1)
    beside = path.with_suffix(".parquet") / "iteration_0.parquet"
    if table == "removed":
        beside.unlink()
    elif table == "stale":
        shutil.copy(beside.with_name("iteration_1.parquet"), beside)
    elif table == "damaged":
        beside.write_bytes(b"PAR1")
    else:
        parquet.write_table(pa.table({"name": ["a"]}), beside)
    only = parse_iterations("0")
    expected = [each for each in entries if each.iteration == 0]
    assert list(read_order(tmp_path).entries(iterations=only)) == expected


def test_other_headers_and_invalid_findings_are_damage(tmp_path):
    """A file of another form is not read as if it were ours."""
    path = write(tmp_path, ENTRIES)
    (tmp_path / GLOBAL_ORDER_FOLDER / "findings.jsonl").write_text('{"kind": "gap"}\n')
    with pytest.raises(CorruptedError, match=r"findings\.jsonl, line 1"):
        read_order(tmp_path)
    (tmp_path / GLOBAL_ORDER_FOLDER / "findings.jsonl").unlink()
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CorruptedError, match="not the header"):
        list(read_order(tmp_path).entries())


def test_missing_order_names_the_orders_of_ranks(tmp_path):
    """A tree that MindSpore wrote has the order of each rank; any tree has what each rank ran."""
    with pytest.raises(CorruptedError, match=r"no order has been published$"):
        read_order(tmp_path)
    with pytest.raises(CorruptedError, match=r"no order has been published$"):
        read_order(tmp_path / "never-made")
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(CorruptedError, match="rankdump ls lists the tensors of each rank"):
        read_order(tmp_path)
    for rank in (0, 1):
        folder = tmp_path / f"rank_{rank}" / "execution_order"
        folder.mkdir(parents=True)
        (folder / "ms_execution_order_graph_0.csv").write_text("NodeExecutionOrder\n")
        if rank == 0:
            with pytest.raises(CorruptedError, match="of each rank is in rank_0/execution_order/"):
                read_order(tmp_path)
    with pytest.raises(CorruptedError, match="in 2 files such as rank_0/execution_order/ms_"):
        read_order(tmp_path)

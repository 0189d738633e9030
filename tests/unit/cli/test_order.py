"""`rankdump order` of a tree: output, width, and the lines that are read."""

from __future__ import annotations

import json

import pytest

from rankdump._cli.command_group import run_command_line
from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.execution_order import (
    FINDINGS_FILE,
    GLOBAL_ORDER_FOLDER,
    ORDER_HEADER,
    add_job_tag,
    format_finding_line,
    format_order_line,
    make_job_tag,
    make_order_file_name,
)
from rankdump._core.status import OrderEntry

LONG = "Default/network-Net/" + "/".join(f"layer{n}-Block" for n in range(12)) + "/MatMul-op0"
LATE = Finding(FindingKind.LATE, 1, "iteration 1: 3 events of rank 1 came late", ranks=(1,))


def entry(position: int, iteration: int, graph: int = 0, rank: int = 0) -> OrderEntry:
    return OrderEntry(position, graph, iteration, (rank,), LONG, EventKind.OPERATOR)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / GLOBAL_ORDER_FOLDER
    folder.mkdir()
    return folder


def write(folder, name, entries) -> None:
    (folder / name).write_text(ORDER_HEADER + "".join(map(format_order_line, entries)))


def test_order_lists_all_graphs_in_100_columns(folder, capsys):
    """Lines of all graphs by their position, each line readable at 100 columns."""
    write(folder, make_order_file_name(0), [entry(0, 0), entry(3, 1)])
    write(folder, make_order_file_name(7), [entry(1, 0, 7), entry(2, 1, 7)])
    assert run_command_line(["order", str(folder.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list("0123")
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "the merge has no findings"
    assert (
        run_command_line(
            ["order", str(folder.parent), "--graph", "7", "--iteration", "1", "--json"]
        )
        == 0
    )
    (found,) = json.loads(capsys.readouterr().out)["entries"]
    assert (found["position"], found["graph"]) == (2, 7)


def test_order_limit_reads_no_further(folder, capsys):
    """What stands behind the lines shown is not even looked at."""
    write(folder, make_order_file_name(0), [entry(n, n) for n in range(3000)])
    with (folder / make_order_file_name(0)).open("a") as file:
        file.write("this is no line\n")
    assert run_command_line(["order", str(folder.parent), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("MatMul") == 2
    assert "... more lines: --limit 0 shows all" in out
    assert run_command_line(["order", str(folder.parent), "--limit", "0"]) == 1
    assert "line 3002" in capsys.readouterr().err


def test_order_findings_decide_the_exit_code(folder, capsys):
    """One sentence each, kind first; a rank that none is about has none."""
    write(folder, make_order_file_name(0), [entry(0, 0)])
    assert run_command_line(["order", str(folder.parent), "--findings"]) == 0
    assert capsys.readouterr().out == "the merge has no findings\n"
    (folder / FINDINGS_FILE).write_text(format_finding_line(LATE))
    assert run_command_line(["order", str(folder.parent), "--findings"]) == 1
    assert capsys.readouterr().out == "late: iteration 1: 3 events of rank 1 came late\n"
    assert run_command_line(["order", str(folder.parent), "--findings", "--rank", "0"]) == 0
    assert run_command_line(["order", str(folder.parent)]) == 0


def test_order_of_one_of_several_jobs(folder, capsys):
    """--job names the one; without it the last one counts, and the others are told."""
    (folder / "execution_order.job").write_text("first")
    write(folder, make_order_file_name(0), [entry(0, 5)])
    write(folder, add_job_tag(make_order_file_name(0), make_job_tag("second")), [entry(0, 6)])
    for job, iteration in (("first", 5), ("second", 6)):
        assert run_command_line(["order", str(folder.parent), "--job", job, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["entries"]
        assert found["iteration"] == iteration
    assert run_command_line(["order", str(folder.parent), "--job", "second"]) == 0
    assert "orders of other jobs are in execution_order_graph_0.csv" in capsys.readouterr().out
    assert run_command_line(["order", str(folder.parent), "--job", "third"]) == 1
    assert "no order of job 'third'" in capsys.readouterr().err


def test_order_counts_lines_and_events(folder, capsys):
    """A collective of two ranks is one line, and two events as the coordinator counts them."""
    both = OrderEntry(1, 0, 0, (0, 1), "sum/AllReduce-op0", EventKind.ALL_REDUCE)
    write(folder, make_order_file_name(0), [entry(0, 0), both])
    assert run_command_line(["order", str(folder.parent)]) == 0
    assert "2 lines for 3 events of the ranks, 1 line of collectives;" in capsys.readouterr().out
    assert run_command_line(["order", str(folder.parent), "--limit", "1"]) == 0
    assert "first 1 line for 1 event of the ranks" in capsys.readouterr().out
    assert run_command_line(["order", str(folder.parent), "--op", "AllReduce", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["entries"]
    assert found["position"] == 1


@pytest.mark.parametrize(
    ("content", "shown", "why"),
    [
        (b"", 0, "the file is empty: its order is lost"),
        (ORDER_HEADER.encode()[:9], 0, "its first line is not the header of an order file"),
        (None, 1, "its last line is incomplete: the rest is lost"),
    ],
    ids=["empty", "header", "last-line"],
)
def test_damaged_order_is_told_and_not_called_unpublished(folder, capsys, content, shown, why):
    path = folder / make_order_file_name(0)
    write(folder, path.name, [entry(0, 0), entry(1, 1)])
    path.write_bytes(path.read_bytes()[:-4] if content is None else content)
    assert run_command_line(["order", str(folder.parent)]) == 1
    captured = capsys.readouterr()
    assert f"{shown} line" in captured.out
    assert "not published" not in captured.out
    assert captured.err == f"{path}: {why}\n"

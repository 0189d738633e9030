"""Tests of StatisticTables: all rows once and in order, whatever an earlier process left."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from rankdump._layout import statistic_tables
from rankdump._layout.tree_paths import FilePlace
from rankdumpd.agent.records import StatisticTableRow
from rankdumpd.agent.storage.statistic_tables import StatisticTables
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles, write_parts

HEADER = "Op Type,Max Value"


def row(folder: str, text: str) -> StatisticTableRow:
    return StatisticTableRow(FilePlace(folder, "statistic.csv"), text)


ROWS = [row("rank_0/Net/0/0", f"row {n}," + "x" * n) for n in range(5)]


def tables(root: Path, header: str = HEADER, **fields) -> StatisticTables:
    tree = DumpTree(str(root), file_mode=0o440, folder_mode=0o750, **fields)
    return StatisticTables(tree, MappingFiles(tree), header)


def lines(root: Path, folder: str = "rank_0/Net/0/0", name: str = "statistic.csv") -> list[str]:
    text = (root / folder / name).read_text()
    assert text.endswith("\n")
    return text.splitlines()


def texts(rows: list[StatisticTableRow]) -> list[str]:
    return [each.text for each in rows]


def test_table_has_header_once_and_rows_in_order(tmp_path):
    """A table begins with its header, and later rows go to the end."""
    table_files = tables(tmp_path)
    assert table_files.add(ROWS[:2]) == []
    assert table_files.add(ROWS[2:]) == []
    assert lines(tmp_path) == [HEADER, *texts(ROWS)]
    mode = (tmp_path / "rank_0/Net/0/0/statistic.csv").stat().st_mode
    assert stat.S_IMODE(mode) == 0o440


def test_rows_go_to_table_of_their_folder(tmp_path):
    """Rows of several folders, mixed, end up in theirs in order."""
    other = [row("rank_0/Net/1/0", f"other {n}") for n in range(2)]
    tables(tmp_path).add([ROWS[0], other[0], ROWS[1], other[1]])
    assert lines(tmp_path) == [HEADER, *texts(ROWS[:2])]
    assert lines(tmp_path, "rank_0/Net/1/0") == [HEADER, *texts(other)]


@pytest.mark.parametrize("cut", range(0, 90, 3))
def test_torn_table_is_completed(tmp_path, cut):
    """Whatever part of a table a crash left, the same rows again make it complete."""
    tables(tmp_path).add(ROWS)
    path = tmp_path / "rank_0/Net/0/0/statistic.csv"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:cut])
    tables(tmp_path).add(ROWS[:3])
    tables(tmp_path).add(ROWS[3:])
    assert path.read_bytes() == whole
    assert [p.name for p in path.parent.iterdir()] == ["statistic.csv"]


def test_failed_append_can_be_repeated(tmp_path):
    """After a partial write the same rows are added again, and are in the table once."""
    failing = [True]

    def write(descriptor: int, parts) -> None:
        if failing:
            write_parts(descriptor, [bytes(parts[0])[:40]])
            raise OSError(28, "failing on purpose")
        write_parts(descriptor, parts)

    table_files = tables(tmp_path, write=write)
    with pytest.raises(OSError, match="on purpose"):
        table_files.add(ROWS)
    failing.clear()
    table_files.add(ROWS)
    assert lines(tmp_path) == [HEADER, *texts(ROWS)]


def test_table_with_other_columns_gets_second_table(tmp_path):
    """Statistics of a second job are neither lost nor written under other column titles."""
    tables(tmp_path, "Op Type,L2Norm Value").add(ROWS[:1])
    other = row("rank_0/Net/0/1", "mine")
    name = statistic_tables.make_second_table_name(HEADER)
    told = tables(tmp_path).add([ROWS[1], other])
    assert told == [
        f"statistic.csv of another job has other columns: rows are written to {name} beside it"
    ]
    tables(tmp_path).add(ROWS[1:3])
    assert lines(tmp_path) == ["Op Type,L2Norm Value", ROWS[0].text]
    assert lines(tmp_path, name=name) == [HEADER, *texts(ROWS[1:3])]
    assert lines(tmp_path, "rank_0/Net/0/1") == [HEADER, "mine"]


def test_second_job_with_same_columns_appends(tmp_path):
    """As MindSpore does."""
    tables(tmp_path).add(ROWS[:2])
    tables(tmp_path).add(ROWS[2:])
    assert lines(tmp_path) == [HEADER, *texts(ROWS)]


def test_forgotten_table_is_continued(tmp_path):
    """More folders than are remembered: each still has its header once and all of its rows."""
    table_files = tables(tmp_path)
    folders = [f"rank_0/Net/0/{n}" for n in range(300)]
    for text in ("first", "second"):
        table_files.add([row(folder, text) for folder in folders])
    assert all(lines(tmp_path, folder) == [HEADER, "first", "second"] for folder in folders)


def test_rows_go_to_table_of_their_operator(tmp_path):
    """Tables in one folder are kept apart when rows alternate between them."""
    table_files = tables(tmp_path)
    places = [FilePlace("0/a", name) for name in ("Add.a.1.csv", "Mul.b.2.csv")]
    table_files.add([StatisticTableRow(places[n % 2], f"row {n}") for n in range(4)])
    assert lines(tmp_path, "0/a", "Add.a.1.csv") == [HEADER, "row 0", "row 2"]
    assert lines(tmp_path, "0/a", "Mul.b.2.csv") == [HEADER, "row 1", "row 3"]


def test_long_table_name_is_mapped_first(tmp_path):
    """The full name of a table is in mapping.csv, once."""
    place = FilePlace("0/a", "123", mapped_from="x" * 300 + ".csv")
    for text in ("first", "second"):
        tables(tmp_path).add([StatisticTableRow(place, text)])
    assert lines(tmp_path, "0/a", "123") == [HEADER, "first", "second"]
    assert lines(tmp_path, "0/a", "mapping.csv") == [f"123,{place.mapped_from}"]


def test_rows_are_not_repeated_after_crash(tmp_path):
    """Rows of an earlier process are recognized in every batch that is repeated."""
    tables(tmp_path).add(ROWS)
    again = tables(tmp_path)
    for each in ROWS:
        again.add([each])
    more = row("rank_0/Net/0/0", "more")
    again.add([more, more])
    assert lines(tmp_path) == [HEADER, *texts([*ROWS, more, more])]


def test_table_without_header_has_only_rows(tmp_path):
    """Rows alone; the same row twice is two, before a crash and after."""
    rows = [ROWS[0], ROWS[1], ROWS[0]]
    tables(tmp_path, "").add(rows)
    again = tables(tmp_path, "")
    again.add(rows[:2])
    again.add([rows[2], ROWS[3]])
    assert lines(tmp_path) == texts([*rows, ROWS[3]])


def test_new_session_appends_rows_equal_to_existing_ones(tmp_path):
    """Another session's line of the same text is not the one that is added."""
    tables(tmp_path, "").add(ROWS[:1])
    tree = DumpTree(str(tmp_path), file_mode=0o440, folder_mode=0o750)
    StatisticTables(tree, MappingFiles(tree), "", looks_back=False).add(ROWS[:2])
    assert lines(tmp_path) == texts([ROWS[0], *ROWS[:2]])

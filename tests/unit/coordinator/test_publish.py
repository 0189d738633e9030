"""The order's file: appended, resumed, never half written; and its lines, both ways."""

from __future__ import annotations

import csv
import os
import stat
from pathlib import Path

import pytest
from suites.order_jobs import view_of

from rankdump.contract.errors import DamagedError
from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.order import (
    COLUMNS,
    FINDINGS_FILE,
    ORDER_FILE,
    ORDER_FOLDER,
    from_row,
    of_another_job,
)
from rankdumpd.coordinator import publish
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.publish import Publisher
from rankdumpd.coordinator.values import GlobalOrder

WORLD = ProcessGroup("world", (0, 1))


def order(iteration: int, name: str = 'Default/"a", b', operators: int = 1) -> GlobalOrder:
    program = [
        Event(0, iteration, at, at, name, EventKind.OPERATOR, at, at + 1) for at in range(operators)
    ]
    call = Event(
        1, iteration, 99, 99, "AllReduce", EventKind.ALL_REDUCE, 9, 12, group="world", sequence=3
    )
    events = {0: [EventColumns.of([*program, call], (WORLD,))]}
    return merge(view_of(events, iteration=iteration))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


@pytest.mark.parametrize(("root", "folder", "file"), [(0o750, 0o750, 0o640), (0o700, 0o700, 0o600)])
def test_who_may_not_enter_the_tree_may_not_read_its_order(tmp_path, root, folder, file) -> None:
    """Folder and files are no more open than the tree that the agent made."""
    tree = tmp_path / "tree"
    tree.mkdir()
    tree.chmod(root)
    assert Publisher().append(order(0), job_id="j", root=str(tree)) == ""
    made = tree / ORDER_FOLDER
    assert stat.S_IMODE(made.stat().st_mode) == folder
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {file}


def test_iterations_are_appended_with_rising_positions(tmp_path) -> None:
    """A file with its header, one line per entry, readable by anything that reads CSV."""
    publisher = Publisher()
    for iteration in (2, 5, 4):
        assert publisher.append(order(iteration), job_id="j", root=str(tmp_path)) == ""
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    found = rows(path)
    assert [row["position"] for row in found] == list("012345")
    assert [row["iteration"] for row in found] == list("225544")
    assert found[0] | {"name": 'Default/"a", b', "ranks": "0", "group": ""} == found[0]
    assert found[1] | {"kind": "ALL_REDUCE", "graph": "1", "missing": "1"} == found[1]
    assert list(publisher.published("j")) == [from_row(row) for row in found]
    assert publisher.next_position("j") == 6
    assert sorted(path.name for path in path.parent.iterdir()) == [
        "execution_order.csv",
        "execution_order.job",
    ]


def test_what_was_published_does_not_grow_while_it_is_read(tmp_path) -> None:
    """A reader gets the entries of the moment it asked."""
    publisher = Publisher()
    publisher.append(order(1), job_id="j", root=str(tmp_path))
    reading = publisher.published("j")
    publisher.append(order(2), job_id="j", root=str(tmp_path))
    assert [entry.iteration for entry in reading] == [1, 1]
    assert list(publisher.published("never seen")) == []


@pytest.mark.parametrize("torn", [b"", b"2,1,0,OPERATOR,Default/to"])
def test_a_coordinator_that_starts_again_goes_on_where_the_file_ends(tmp_path, torn) -> None:
    """Positions go on rising; a line that a crash tore is cut off."""
    assert Publisher().append(order(1), job_id="j", root=str(tmp_path)) == ""
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    with path.open("ab") as file:
        file.write(torn)
    publisher = Publisher()
    assert publisher.append(order(2), job_id="j", root=str(tmp_path)) == ""
    assert [row["position"] for row in rows(path)] == list("0123")
    assert len(list(publisher.published("j"))) == 4


@pytest.mark.parametrize("size", [0, 5])
def test_a_file_torn_in_its_header_is_begun_again(tmp_path, size) -> None:
    """A crash between creating the file and its first line leaves nothing to keep."""
    Publisher().append(order(1), job_id="j", root=str(tmp_path))
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    os.truncate(path, size)
    assert Publisher().append(order(2), job_id="j", root=str(tmp_path)) == ""
    assert [row["iteration"] for row in rows(path)] == ["2", "2"]


def test_a_removed_file_is_made_again(tmp_path) -> None:
    """A person may clear the folder while the coordinator runs."""
    publisher = Publisher()
    publisher.append(order(1), job_id="j", root=str(tmp_path))
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    path.unlink()
    assert publisher.append(order(2), job_id="j", root=str(tmp_path)) == ""
    assert [row["iteration"] for row in rows(path)] == ["2", "2"]


@pytest.mark.parametrize("other", ["k", "a/b", "../../up", "\x00", "x" * 300, "\u00e9" * 200])
def test_another_job_in_the_same_tree_has_files_of_its_own(tmp_path, other) -> None:
    """Nothing of a job id leads out of the folder or onto the first job's file."""
    first, second = Publisher(), Publisher()
    first.append(order(1), job_id="j", root=str(tmp_path))
    assert second.append(order(7), job_id=other, root=str(tmp_path)) == ""
    assert second.note(["found"], job_id=other) == ""
    folder = tmp_path / ORDER_FOLDER
    assert [row["iteration"] for row in rows(folder / ORDER_FILE)] == ["1", "1"]
    own = folder / of_another_job(ORDER_FILE, other)
    assert own.parent == folder
    assert [row["iteration"] for row in rows(own)] == ["7", "7"]
    assert (folder / of_another_job(FINDINGS_FILE, other)).read_text() == "found\n"
    assert Publisher().append(order(8), job_id=other, root=str(tmp_path)) == ""
    assert len(rows(own)) == 4


def test_findings_are_a_file_only_when_there_are_any(tmp_path) -> None:
    """One finding a line, appended."""
    publisher = Publisher()
    publisher.append(order(1), job_id="j", root=str(tmp_path))
    path = tmp_path / ORDER_FOLDER / FINDINGS_FILE
    assert publisher.note([], job_id="j") == ""
    assert not path.exists()
    publisher.note(["one", "two"], job_id="j")
    publisher.note(["three"], job_id="j")
    assert path.read_text().splitlines() == ["one", "two", "three"]


def test_an_iteration_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, monkeypatch) -> None:
    """A full disk in the middle of an iteration: nothing of it stays, and the reason is told."""
    monkeypatch.setattr(publish, "_BATCH", 2)
    publisher = Publisher()
    publisher.append(order(1), job_id="j", root=str(tmp_path))
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    before, real, calls = path.read_bytes(), publish._write_all, []

    def full_at_the_third(file, data):
        calls.append(data)
        if len(calls) == 3:
            file.write(data[:7])
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(publish, "_write_all", full_at_the_third)
    problem = publisher.append(order(2, operators=9), job_id="j", root=str(tmp_path))
    assert "iteration 2: 10 entries" in problem
    assert "No space left" in problem
    assert len(calls) == 3
    assert path.read_bytes() == before
    assert publisher.append(order(3), job_id="j", root=str(tmp_path)) == ""
    assert [row["position"] for row in rows(path)] == list("0123")


def _a_file_in_the_way(root: Path) -> None:
    (root / ORDER_FOLDER).write_text("mine")


def _another_file(root: Path) -> None:
    (root / ORDER_FOLDER).mkdir()
    (root / ORDER_FOLDER / ORDER_FILE).write_text("a,b\n1,2\n")


def _a_link_out_of_the_tree(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / ORDER_FOLDER).symlink_to(root / "elsewhere")


def _a_link_as_the_file(root: Path) -> None:
    (root / ORDER_FOLDER).mkdir()
    (root / ORDER_FOLDER / ORDER_FILE).symlink_to(root / "victim")


@pytest.mark.parametrize(
    "prepare", [_a_file_in_the_way, _another_file, _a_link_out_of_the_tree, _a_link_as_the_file]
)
def test_what_cannot_be_written_is_a_finding_not_an_error(tmp_path, prepare) -> None:
    """Foreign files and links are left alone, and the answer says why nothing was written."""
    prepare(tmp_path)
    publisher = Publisher()
    assert "iteration 1: 2 entries" in publisher.append(order(1), job_id="j", root=str(tmp_path))
    assert publisher.note(["lost"], job_id="j") == ""
    assert not (tmp_path / "victim").exists()
    assert not any((tmp_path / "elsewhere").glob("*"))


def test_without_a_tree_the_answer_says_so() -> None:
    """No root is a reason, not a crash."""
    assert "no report has named the tree of job 'j'" in Publisher().append(
        order(1), job_id="j", root=""
    )


def test_a_damaged_line_is_an_error_of_the_reader(tmp_path) -> None:
    """Bytes changed under the coordinator are told, not skipped."""
    publisher = Publisher()
    publisher.append(order(1), job_id="j", root=str(tmp_path))
    path = tmp_path / ORDER_FOLDER / ORDER_FILE
    path.write_bytes(path.read_bytes().replace(b"ALL_REDUCE", b"ALL_REDUCT"))
    with pytest.raises(DamagedError, match="ALL_REDUCT"):
        list(publisher.published("j"))


def test_control_characters_do_not_break_a_line(tmp_path) -> None:
    """A name with line breaks in it is still one line."""
    publisher = Publisher()
    publisher.append(order(1, name="a\nb\rc\0d"), job_id="j", root=str(tmp_path))
    assert [entry.name for entry in publisher.published("j")] == ["a b c d", "AllReduce"]

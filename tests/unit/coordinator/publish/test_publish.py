"""Order files: appended, continued after a crash, and never written in part."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import os
import stat
from pathlib import Path

import pytest
from support.merged_order import merged

from rankdump._core.events import EventKind, Finding, FindingKind, ProcessGroup, RankEvent
from rankdump._core.execution_order import (
    FINDINGS_FILE,
    GLOBAL_ORDER_FOLDER,
    ORDER_COLUMNS,
    add_job_tag,
    format_finding_line,
    format_order_line,
    make_job_tag,
    make_order_file_name,
    parse_finding_line,
)
from rankdump.errors import CorruptedError, ExhaustedError
from rankdumpd.coordinator.fleet_views import GlobalOrder, PublishedOffsets
from rankdumpd.coordinator.publish import order_lines, parquet_table, tree_files
from rankdumpd.coordinator.publish.publisher import (
    OrderPublisher,
    read_published_entries,
)

WORLD = ProcessGroup("world", (0, 1))
FIRST, SECOND = make_order_file_name(0), make_order_file_name(1)


def order(iteration: int, name: str = 'Default/"a", b', operators: int = 1) -> GlobalOrder:
    """Operators in graph 0 and one collective in graph 1."""
    program = [
        RankEvent(0, iteration, at, at, name, EventKind.OPERATOR, at, at + 1)
        for at in range(operators)
    ]
    call = RankEvent(
        1, iteration, 99, 99, "AllReduce", EventKind.ALL_REDUCE, 9, 12, group="world", sequence=3
    )
    return merged({0: [*program, call]}, (WORLD,), iteration)


def finding(iteration: int, text: str = "odd") -> Finding:
    return Finding(FindingKind.GAP, iteration, text, ranks=(1,))


def appended(
    root: Path, *iterations: int, offsets: PublishedOffsets | None = None, job: str = "j"
) -> PublishedOffsets:
    """Return the offsets after some iterations, all of them written."""
    for iteration in iterations:
        offsets, problem = OrderPublisher().append(
            order(iteration), job_id=job, root=str(root), offsets=offsets
        )
        assert problem == ""
        assert offsets is not None
    assert offsets is not None
    return offsets


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def contents(root: Path) -> dict[str, bytes]:
    folder = root / GLOBAL_ORDER_FOLDER
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("root", "folder", "file"), [(0o750, 0o750, 0o640), (0o700, 0o700, 0o600)])
def test_order_files_have_no_more_permissions_than_tree(tmp_path, root, folder, file) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    tree.chmod(root)
    appended(tree, 0)
    made = [tree / GLOBAL_ORDER_FOLDER, *(tree / GLOBAL_ORDER_FOLDER).rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made}
    assert modes == {(True, folder), (False, file)}


def test_publisher_appends_iterations_with_rising_positions(tmp_path) -> None:
    """A file per graph with a header, positions counted over all, readable as CSV."""
    offsets = appended(tmp_path, 2, 5, 4)
    folder = tmp_path / GLOBAL_ORDER_FOLDER
    assert (folder / FIRST).read_text().splitlines()[0] == ",".join(ORDER_COLUMNS)
    found = [rows(folder / name) for name in (FIRST, SECOND)]
    assert [[row["position"] for row in of] for of in found] == [list("024"), list("135")]
    assert [row["iteration"] for row in found[0]] == list("254")
    assert found[0][0] | {"name": 'Default/"a", b', "ranks": "0", "group": ""} == found[0][0]
    assert found[1][0] | {"kind": "ALL_REDUCE", "graph": "1", "missing": "1"} == found[1][0]
    assert [entry.position for entry in read_published_entries(offsets)] == list(range(6))
    assert [entry.position for entry in read_published_entries(offsets, graph=1)] == [1, 3, 5]
    assert offsets == PublishedOffsets(
        str(tmp_path), {n: (folder / n).stat().st_size for n in (FIRST, SECOND)}, 6
    )


def test_reader_stops_at_committed_size(tmp_path) -> None:
    before = appended(tmp_path, 1)
    reading = read_published_entries(before)
    appended(tmp_path, 2, offsets=before)
    assert [entry.iteration for entry in reading] == [1, 1]
    assert list(read_published_entries(PublishedOffsets("", {}, 0))) == []


def test_publisher_truncates_uncommitted_bytes(tmp_path, monkeypatch) -> None:
    """The process was killed before the offsets were committed; the iteration is written again."""
    # pyarrow leaves chance bits behind the last index of a page: equal tables, other bytes.
    monkeypatch.setattr(parquet_table, "_import_arrow", lambda: None)
    offsets = appended(tmp_path, 1)
    offsets, _ = OrderPublisher().append_findings(
        [finding(1)], job_id="j", root=str(tmp_path), offsets=offsets
    )
    appended(tmp_path, 2, offsets=offsets)
    OrderPublisher().append_findings([finding(2)], job_id="j", root=str(tmp_path), offsets=offsets)
    (tmp_path / GLOBAL_ORDER_FOLDER / make_order_file_name(9)).write_text(
        "position,it"
    )  # a graph torn in its head
    twice = appended(tmp_path, 2, offsets=offsets)
    once = contents(tmp_path)
    other = tmp_path / "undisturbed"
    whole = appended(other, 1)
    whole, _ = OrderPublisher().append_findings(
        [finding(1)], job_id="j", root=str(other), offsets=whole
    )
    whole = appended(other, 2, offsets=whole)
    assert once == contents(other)
    assert (twice.sizes, twice.position) == (whole.sizes, whole.position)


@pytest.mark.parametrize("torn", [b"", b"4,3,0,OPERATOR,Default/to"])
def test_publisher_without_offsets_continues_existing_files(tmp_path, torn) -> None:
    """The state was lost: existing lines are kept, and a torn line is cut off."""
    appended(tmp_path, 1, 2)
    path = tmp_path / GLOBAL_ORDER_FOLDER / FIRST
    with path.open("ab") as file:
        file.write(torn)
    offsets = appended(tmp_path, 3)
    assert [entry.position for entry in read_published_entries(offsets)] == list(range(6))
    assert [entry.iteration for entry in read_published_entries(offsets)] == [1, 1, 2, 2, 3, 3]


def test_publisher_without_offsets_replaces_repeated_iteration(tmp_path) -> None:
    """The process was killed in its first iteration; its findings are replaced too."""
    offsets = appended(tmp_path, 1)
    OrderPublisher().append_findings([finding(1)], job_id="j", root=str(tmp_path), offsets=offsets)
    assert [entry.iteration for entry in read_published_entries(appended(tmp_path, 1))] == [1, 1]
    assert FINDINGS_FILE not in contents(tmp_path)


def test_attempts_have_files_of_their_own(tmp_path) -> None:
    """They run the same iterations again; positions go on, and nothing is replaced."""
    offsets = appended(tmp_path, 1)
    before = contents(tmp_path)
    again = dataclasses.replace(order(1), attempt=2)
    offsets, problem = OrderPublisher().append(
        again, job_id="j", root=str(tmp_path), offsets=offsets
    )
    assert problem == ""
    assert offsets is not None
    assert before.items() <= contents(tmp_path).items()
    entries = [(entry.position, entry.attempt) for entry in read_published_entries(offsets)]
    assert entries == [(0, 0), (1, 0), (2, 2), (3, 2)]
    # The state was lost while the iteration of the second attempt was written.
    OrderPublisher().append(again, job_id="j", root=str(tmp_path), offsets=None)
    kept = {name: data for name, data in contents(tmp_path).items() if "attempt" not in name}
    assert kept == before
    assert len(rows(tmp_path / GLOBAL_ORDER_FOLDER / make_order_file_name(0, attempt=2))) == 1


def test_publisher_continues_positions_in_new_tree(tmp_path) -> None:
    offsets = appended(tmp_path / "a", 1)
    moved = appended(tmp_path / "b", 2, offsets=offsets)
    assert [entry.position for entry in read_published_entries(moved)] == [2, 3]
    assert [entry.position for entry in read_published_entries(offsets)] == [0, 1]


@pytest.mark.parametrize("size", [None, 0, 5, 150])
def test_removed_or_truncated_file_is_begun_again(tmp_path, size, caplog) -> None:
    """Somebody clears the folder while the coordinator runs."""
    offsets = appended(tmp_path, 1)
    path = tmp_path / GLOBAL_ORDER_FOLDER / FIRST
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    after = appended(tmp_path, 2, offsets=offsets)
    assert [(row["position"], row["iteration"]) for row in rows(path)] == [("2", "2")]
    assert len(rows(tmp_path / GLOBAL_ORDER_FOLDER / SECOND)) == 2
    assert after.position == 4
    assert "is missing or shorter than committed" in caplog.text


@pytest.mark.parametrize("other", ["k", "a/b", "../../up", "\x00", "x" * 300, "\u00e9" * 200])
def test_second_job_in_tree_has_tagged_files(tmp_path, other) -> None:
    """No job id leads out of the folder or to the files of the first job."""
    appended(tmp_path, 1)
    before = contents(tmp_path)
    offsets = appended(tmp_path, 7, job=other)
    offsets, problem = OrderPublisher().append_findings(
        [finding(7)], job_id=other, root=str(tmp_path), offsets=offsets
    )
    assert problem == ""
    folder = tmp_path / GLOBAL_ORDER_FOLDER
    assert {name: contents(tmp_path)[name] for name in before} == before
    own = folder / add_job_tag(FIRST, make_job_tag(other))
    assert own.parent == folder
    assert [row["iteration"] for row in rows(own)] == ["7"]
    assert (folder / add_job_tag(FINDINGS_FILE, make_job_tag(other))).exists()
    again = appended(tmp_path, 8, job=other)
    assert len(list(read_published_entries(again))) == 4


def test_findings_file_exists_only_with_findings(tmp_path) -> None:
    """One finding a line, appended, and included in the offsets."""
    path = tmp_path / GLOBAL_ORDER_FOLDER / FINDINGS_FILE
    offsets = appended(tmp_path, 1)
    assert OrderPublisher().append_findings(
        [], job_id="j", root=str(tmp_path), offsets=offsets
    ) == (offsets, "")
    assert not path.exists()
    for texts in (["one", "two"], ["three"]):
        found = [finding(1, text) for text in texts]
        offsets, problem = OrderPublisher().append_findings(
            found, job_id="j", root=str(tmp_path), offsets=offsets
        )
        assert problem == ""
    said = [parse_finding_line(line).text for line in path.read_text().splitlines()]
    assert said == ["one", "two", "three"]
    assert offsets is not None
    assert offsets.sizes[FINDINGS_FILE] == path.stat().st_size
    after = appended(tmp_path, 2, offsets=offsets)
    assert after.sizes[FINDINGS_FILE] == path.stat().st_size


def test_findings_of_job_without_orders_are_written(tmp_path) -> None:
    """The findings are about an iteration that could not be merged."""
    offsets, problem = OrderPublisher().append_findings(
        [finding(4)], job_id="j", root=str(tmp_path), offsets=None
    )
    assert (problem, offsets and set(offsets.sizes)) == ("", {FINDINGS_FILE})
    assert [e.position for e in read_published_entries(appended(tmp_path, 5, offsets=offsets))] == [
        0,
        1,
    ]


@pytest.mark.parametrize("full_at", [1, 3, 4])
def test_full_disk_leaves_order_files_unchanged(tmp_path, monkeypatch, full_at) -> None:
    """The disk becomes full anywhere in an iteration; the reason is returned."""
    monkeypatch.setattr(order_lines, "_BLOCK_LINES", 3)
    offsets = appended(tmp_path, 1)
    before, real, calls = contents(tmp_path), tree_files.write_fully, []

    def full(file, data):
        calls.append(data)
        if len(calls) == full_at:
            file.write(data[:7])
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(tree_files, "write_fully", full)
    large = order(2, operators=9)
    with pytest.raises(ExhaustedError, match="No space left"):
        OrderPublisher().append(large, job_id="j", root=str(tmp_path), offsets=offsets)
    monkeypatch.undo()
    assert len(calls) == full_at
    assert contents(tmp_path) == before
    assert len(list(read_published_entries(appended(tmp_path, 3, offsets=offsets)))) == 4


@pytest.mark.parametrize("what", ["write_parquet_table", "format_trace"])
def test_failed_table_or_trace_undoes_the_iteration(tmp_path, monkeypatch, what) -> None:
    """Whole files are removed too, also after an error in our code."""
    monkeypatch.setattr("rankdumpd.coordinator.publish.publisher.has_parquet", lambda: True)

    def no_table(path, *_):
        path.write_bytes(b"half")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rankdumpd.coordinator.publish.publisher.write_parquet_table", no_table)
    offsets = appended(tmp_path, 1)
    before = contents(tmp_path)
    monkeypatch.setattr(f"rankdumpd.coordinator.publish.publisher.{what}", broken)
    with pytest.raises(ExhaustedError, match="No space left"):
        OrderPublisher().append(order(2), job_id="j", root=str(tmp_path), offsets=offsets)
    assert contents(tmp_path) == before


def _a_file_in_the_way(root: Path) -> None:
    (root / GLOBAL_ORDER_FOLDER).write_text("mine")


def _another_file(root: Path) -> None:
    (root / GLOBAL_ORDER_FOLDER).mkdir()
    (root / GLOBAL_ORDER_FOLDER / FIRST).write_text("a,b\n1,2\n")


def _other_findings(root: Path) -> None:
    (root / GLOBAL_ORDER_FOLDER).mkdir()
    (root / GLOBAL_ORDER_FOLDER / FINDINGS_FILE).write_text("shopping list\n")


def _a_link_out_of_the_tree(root: Path) -> None:
    (root / "elsewhere").mkdir()
    (root / GLOBAL_ORDER_FOLDER).symlink_to(root / "elsewhere")


def _a_link_as_the_file(root: Path) -> None:
    (root / GLOBAL_ORDER_FOLDER).mkdir()
    (root / GLOBAL_ORDER_FOLDER / FIRST).symlink_to(root / "victim")


def _a_link_as_the_traces(root: Path) -> None:
    (root / GLOBAL_ORDER_FOLDER).mkdir()
    (root / "elsewhere").mkdir()
    (root / GLOBAL_ORDER_FOLDER / make_order_file_name(0, "trace")).symlink_to(root / "elsewhere")


IN_THE_WAY = [
    *(_a_file_in_the_way, _another_file, _other_findings),
    *(_a_link_out_of_the_tree, _a_link_as_the_file, _a_link_as_the_traces),
]


@pytest.mark.parametrize("prepare", IN_THE_WAY)
@pytest.mark.parametrize("position", [None, 7])
def test_publisher_leaves_foreign_files_and_returns_reason(tmp_path, prepare, position) -> None:
    prepare(tmp_path)
    offsets = None if position is None else PublishedOffsets(str(tmp_path), {}, position)
    new, problem = OrderPublisher().append(
        order(1), job_id="j", root=str(tmp_path), offsets=offsets
    )
    assert new is None
    assert "iteration 1: 2 entries" in problem
    assert not (tmp_path / "victim").exists()
    assert not any((tmp_path / "elsewhere").glob("*"))
    for mine in tmp_path.rglob("*s*.*"):
        texts = ("a,b\n1,2\n", "shopping list\n", "j")
        assert mine.is_dir() or mine.is_symlink() or mine.read_text() in texts


def test_unwritable_findings_leave_offsets_unchanged(tmp_path) -> None:
    _a_file_in_the_way(tmp_path)
    offsets = PublishedOffsets(str(tmp_path), {}, 3)
    same, problem = OrderPublisher().append_findings(
        [finding(1)], job_id="j", root=str(tmp_path), offsets=offsets
    )
    assert same is offsets
    assert "1 findings could not be published" in problem


def test_publisher_without_tree_returns_reason() -> None:
    _, problem = OrderPublisher().append(order(1), job_id="j", root="", offsets=None)
    assert "no agent has reported the tree of job 'j'" in problem


def test_publisher_writes_only_into_configured_roots(tmp_path) -> None:
    """A link inside them may not lead out; the reason names the tree and the roots."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    roots, root = (str(tmp_path / "in"),), str(tmp_path / "in" / "link" / "dump")
    _, refused = OrderPublisher(roots=roots).append(order(1), job_id="j", root=root, offsets=None)
    _, unnoted = OrderPublisher(roots=roots).append_findings(
        [finding(1)], job_id="j", root=root, offsets=None
    )
    for problem in (refused, unnoted):
        assert f"tree {root!r}, which is '{tmp_path}/dump', is outside of {roots[0]}" in problem
    assert not (tmp_path / "dump").exists()
    inside = str(tmp_path / "in" / "dump")
    offsets, _ = OrderPublisher(roots=roots).append(order(1), job_id="j", root=inside, offsets=None)
    assert offsets is not None


def test_reader_raises_on_damaged_line(tmp_path) -> None:
    """The bytes of a committed line were changed."""
    offsets = appended(tmp_path, 1)
    path = tmp_path / GLOBAL_ORDER_FOLDER / SECOND
    path.write_bytes(path.read_bytes().replace(b"ALL_REDUCE", b"ALL_REDUCT"))
    with pytest.raises(CorruptedError, match="ALL_REDUCT"):
        list(read_published_entries(offsets))


def test_control_characters_stay_within_an_order_line(tmp_path) -> None:
    """A name with line breaks is still one line."""
    wild = order(1, name="a\nb\rc\0d")
    offsets, _ = OrderPublisher().append(wild, job_id="j", root=str(tmp_path), offsets=None)
    assert offsets is not None
    assert [entry.name for entry in read_published_entries(offsets)] == ["a b c d", "AllReduce"]


def test_formatted_lines_equal_format_order_line(tmp_path, monkeypatch) -> None:
    """Lines of operators are formatted many at once."""
    monkeypatch.setattr(order_lines, "_BLOCK_LINES", 7)
    events = {
        rank: [
            RankEvent(
                0, 3, at, at, f"op,{at % 3}" if at % 5 else "AllReduce",
                EventKind.OPERATOR if at % 5 else EventKind.ALL_REDUCE,
                10 * at + rank, 10 * at + 9, stream=at % 2 * rank, group="" if at % 5 else "world",
                sequence=0 if at % 5 else at, element_count=8, dtype="float32",
            )
            for at in range(30)
        ]
        for rank in (0, 1)
    }  # fmt: skip
    both = merged(events, (WORLD,), 3)
    offsets, _ = OrderPublisher().append(both, job_id="j", root=str(tmp_path), offsets=None)
    assert offsets is not None
    text = (tmp_path / GLOBAL_ORDER_FOLDER / FIRST).read_text().splitlines(keepends=True)
    assert text[1:] == list(map(format_order_line, both.entries(0)))
    assert list(read_published_entries(offsets)) == list(both.entries(0))


def test_tables_need_pyarrow(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet_table, "_import_arrow", lambda: None)
    appended(tmp_path, 1)
    assert not any(name.endswith(".parquet") for name in contents(tmp_path))


def test_parquet_table_equals_csv_lines(tmp_path) -> None:
    """Same columns, with lists as lists; the folder of a graph is one data set."""
    parquet = importlib.import_module("pyarrow.parquet")
    offsets = appended(tmp_path, 4, 5)
    folder = tmp_path / GLOBAL_ORDER_FOLDER / make_order_file_name(1, "parquet")
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration_4.parquet",
        "iteration_5.parquet",
    ]
    table = parquet.read_table(folder)
    assert table.column_names == list(ORDER_COLUMNS)
    for row, entry in zip(table.to_pylist(), read_published_entries(offsets, graph=1), strict=True):
        assert {name: row[name] for name in ORDER_COLUMNS if name != "kind"} == {
            name: list(value) if isinstance(value := getattr(entry, name), tuple) else value
            for name in ORDER_COLUMNS
            if name != "kind"
        }
        assert row["kind"] == entry.kind.name


def test_findings_file_has_lines_of_format_finding_line(tmp_path) -> None:
    OrderPublisher().append_findings([finding(1)], job_id="j", root=str(tmp_path), offsets=None)
    path = tmp_path / GLOBAL_ORDER_FOLDER / FINDINGS_FILE
    assert path.read_text() == format_finding_line(finding(1))


def test_tables_are_limited_by_table_events(tmp_path) -> None:
    """The lines are always written."""
    offsets, problem = OrderPublisher(table_events=0).append(
        order(1), job_id="j", root=str(tmp_path), offsets=None
    )
    assert (offsets is not None, problem) == (True, "")
    assert not any(".parquet" in name for name in contents(tmp_path))
    assert any(name.endswith(".csv") for name in contents(tmp_path))

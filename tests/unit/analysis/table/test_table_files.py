"""Files of the tensor table: complete or absent, and each says what it was made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankdump._analysis.table import table_files
from rankdump._analysis.table.table_files import (
    TABLE_FOLDER,
    NumberRange,
    TableExtent,
    TableFile,
    TableSource,
    list_table,
    list_tensor_files,
    lock_table,
    read_table_file,
    remove_table_files,
    select_names,
    write_table_file,
)
from rankdump._analysis.table.table_schema import ITERATION_SCHEMA, TENSOR_SCHEMA
from rankdump._analysis.table.tree_access import LocalTree
from rankdump.errors import CorruptedError, UnavailableError

SOURCES = [TableSource("rank_0/.dump_metadata/manifest/iteration_3.abc.json", 12, 34)]


def tensors(places: list[tuple[int, int]], each: int = 1) -> pa.Table:
    """Rows of iterations and ranks."""
    rows = [
        {"iteration": iteration, "rank": rank, "position": position, "name": "op"}
        for iteration, rank in places
        for position in range(each)
    ]
    return pa.Table.from_pylist(rows, TENSOR_SCHEMA)


def write(root: Path, rows: pa.Table, **more: Any) -> TableFile:
    nothing = ITERATION_SCHEMA.empty_table()
    return write_table_file(LocalTree(root), rows, nothing, SOURCES, **more)


def written(root: Path, rows: pa.Table) -> Path:
    return root / TABLE_FOLDER / write(root, rows).name


def test_file_has_its_sources_and_sorted_rows(tmp_path: Path):
    path = written(tmp_path, tensors([(7, 1), (3, 1), (3, 0)]))
    assert read_table_file(LocalTree(tmp_path), path.name).sources == frozenset(SOURCES)
    assert path.name.startswith("tensors.3-7.0-1.")
    found = pq.read_table(path).select(["iteration", "rank"]).to_pylist()
    assert [(row["iteration"], row["rank"]) for row in found] == [(3, 0), (3, 1), (7, 1)]
    assert list_tensor_files(tmp_path) == [path]
    assert len([*path.parent.glob("iterations.*")]) == 1


def test_row_groups_end_with_the_iteration_of_a_rank(tmp_path: Path):
    """Law: a large iteration of a rank is read without rows of another."""
    each = table_files._MIN_ROWS_PER_GROUP + 5
    file = pq.ParquetFile(written(tmp_path, tensors([(0, 0), (0, 1), (1, 0)], each)))
    assert file.metadata.num_row_groups == 3
    for group in range(3):
        rows = file.read_row_group(group, columns=["iteration", "rank"])
        assert len(set(zip(*(column.to_pylist() for column in rows.columns), strict=True))) == 1


def test_tree_without_a_table_has_no_files(tmp_path: Path):
    assert list_tensor_files(tmp_path) == []


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch):
    """Law: a file with a final name is complete."""

    def failing(*_args: object, **_fields: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", failing)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, tensors([(0, 0)]))
    assert list(tmp_path.rglob("*.parquet*")) == []


def test_removed_file_leaves_nothing(tmp_path: Path):
    remove_table_files(LocalTree(tmp_path), [write(tmp_path, tensors([(0, 0)]))])
    assert list(tmp_path.rglob("*.parquet")) == []


def test_replaced_file_does_not_count_although_it_is_there(tmp_path: Path):
    """Law: whenever the writer is killed, every row counts once."""
    first = write(tmp_path, tensors([(0, 0)]))
    second = write(tmp_path, tensors([(0, 0), (1, 0)]), replaces=[first.name])
    listing = list_table(LocalTree(tmp_path), [])
    assert [file.name for file in listing.files] == [second.name]
    assert sorted(listing.remains) == sorted(first.paths)


def test_refused_rename_leaves_everything_as_it_was(tmp_path: Path):
    def refuse(rename: Callable[[], None]) -> None:
        raise BlockingIOError

    with pytest.raises(BlockingIOError):
        write(tmp_path, tensors([(0, 0)]), guard=refuse)
    assert [*(tmp_path / TABLE_FOLDER).iterdir()] == []


def test_names_say_which_rows_a_file_may_have(tmp_path: Path):
    names = [write(tmp_path, tensors([(n, n % 2), (n + 1, n % 2)])).name for n in range(4)]
    even = TableExtent(NumberRange(0, 9), NumberRange(0, 0))
    assert select_names(names, [even]) == [names[0], names[2]]
    late = TableExtent(NumberRange(4, 9), NumberRange(0, 5))
    assert select_names([*names, "tensors.parquet", "tensors.0-x.0-1.ab.parquet"], [late]) == [
        names[3]
    ]
    assert select_names(names) == names
    found = list_table(LocalTree(tmp_path), [], extents=[even]).files
    assert [file.name for file in found] == [names[0], names[2]]


def test_drafts_of_a_killed_process_are_remains_after_an_hour(tmp_path: Path):
    draft = tmp_path / TABLE_FOLDER / ".table-12-tensors.tmp"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"PAR1")
    made_s = draft.stat().st_mtime
    assert list_table(LocalTree(tmp_path), [], now_s=made_s + 60).remains == []
    path = draft.relative_to(tmp_path).as_posix()
    assert list_table(LocalTree(tmp_path), [], now_s=made_s + 3700).remains == [path]


def test_lock_is_for_one_process(tmp_path: Path):
    with (
        lock_table(LocalTree(tmp_path), patience_s=0),
        pytest.raises(UnavailableError, match="another process"),
        lock_table(LocalTree(tmp_path), patience_s=0),
    ):
        pass
    with lock_table(LocalTree(tmp_path), patience_s=0):
        pass


def damaged_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def other_version(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"rankdump.version": "99"}), path)


def damaged_sources(path: Path) -> None:
    table = pq.read_table(path)
    facts = {"rankdump.version": "1", "rankdump.sources": "!!!"}
    pq.write_table(table.replace_schema_metadata(facts), path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def without_iterations(path: Path) -> None:
    path.with_name(path.name.replace("tensors.", "iterations.")).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (pipe, "is not a regular file"),
        (without_iterations, "its file of iterations is missing"),
        (damaged_end, "not a Parquet file"),
        (foreign, "its table version is ''"),
        (other_version, "its table version is '99'"),
        (damaged_sources, "list of sources is damaged"),
        (lambda path: path.write_bytes(b""), "not a Parquet file"),
    ],
)
def test_file_that_is_no_table_is_named(tmp_path: Path, damage, words):
    path = written(tmp_path, tensors([(0, 0)]))
    damage(path)
    with pytest.raises(CorruptedError, match=words) as caught:
        read_table_file(LocalTree(tmp_path), path.name)
    assert str(path) in str(caught.value)
    listing = list_table(LocalTree(tmp_path), problems := [])
    assert (listing.files, [each.name for each in listing.damaged]) == ([], [path.name])
    assert problems == [str(caught.value)]


def test_damaged_page_is_found_by_its_checksum(tmp_path: Path):
    rows = tensors([(0, 0)], 5000)
    digests = pa.array([f"{n:032x}" for n in np.random.default_rng(1).permutation(5000)])
    rows = rows.set_column(rows.schema.get_field_index("digest"), "digest", digests)
    path = written(tmp_path, rows)
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    column = group.column(TENSOR_SCHEMA.names.index("digest"))
    # The pages of the column begin with that of its distinct values.
    data[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises((OSError, pa.ArrowException)):
        pq.read_table(path, page_checksum_verification=True)

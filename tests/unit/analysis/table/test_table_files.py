"""Files of the tensor table: complete or absent, and each says what it was made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankdump._analysis.table import table_files
from rankdump._analysis.table.table_files import (
    TableSource,
    list_iteration_files,
    list_tensor_files,
    read_sources,
    remove_table_file,
    write_table_file,
)
from rankdump._analysis.table.table_schema import ITERATION_SCHEMA, TENSOR_SCHEMA
from rankdump.errors import CorruptedError

SOURCES = [TableSource("rank_0/.dump_metadata/manifest/iteration_3.abc.json", 12, 34)]


def tensors(places: list[tuple[int, int]], each: int = 1) -> pa.Table:
    """Rows of iterations and ranks."""
    rows = [
        {"iteration": iteration, "rank": rank, "position": position, "name": "op"}
        for iteration, rank in places
        for position in range(each)
    ]
    return pa.Table.from_pylist(rows, TENSOR_SCHEMA)


def written(root: Path, rows: pa.Table) -> Path:
    return write_table_file(root, rows, ITERATION_SCHEMA.empty_table(), SOURCES).tensors


def test_file_has_its_sources_and_sorted_rows(tmp_path: Path):
    path = written(tmp_path, tensors([(7, 1), (3, 1), (3, 0)]))
    assert read_sources(path) == frozenset(SOURCES)
    assert path.name.startswith("tensors.3-7.")
    found = pq.read_table(path).select(["iteration", "rank"]).to_pylist()
    assert [(row["iteration"], row["rank"]) for row in found] == [(3, 0), (3, 1), (7, 1)]
    assert list_tensor_files(tmp_path) == [path]
    assert len(list_iteration_files(tmp_path)) == 1


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
    file = write_table_file(tmp_path, tensors([(0, 0)]), ITERATION_SCHEMA.empty_table(), SOURCES)
    remove_table_file(file)
    assert list(tmp_path.rglob("*.parquet")) == []


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


@pytest.mark.parametrize(
    ("damage", "words"),
    [
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
        read_sources(path)
    assert str(path) in str(caught.value)


def test_damaged_page_is_found_by_its_checksum(tmp_path: Path):
    rows = tensors([(0, 0)], 5000)
    digests = pa.array([f"{n:032x}" for n in np.random.default_rng(1).permutation(5000)])
    rows = rows.set_column(rows.schema.get_field_index("digest"), "digest", digests)
    path = written(tmp_path, rows)
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    column = group.column(TENSOR_SCHEMA.names.index("digest"))
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises((OSError, pa.ArrowException)):
        pq.read_table(path, page_checksum_verification=True)

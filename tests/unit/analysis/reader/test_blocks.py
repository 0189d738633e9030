"""Elements of a file in blocks, or loaded where the file does not store them unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.tensor_pairs import entry_of, tensor

from rankdump._core.manifest import ManifestRecord
from rankdump.errors import CorruptedError
from rankdump.reader import Entry, FileElements, load, opened


def written(folder: Path, values: np.ndarray, codec: str = "none") -> Entry:
    entry = tensor(folder, "x", values, codec=codec).entry
    assert entry is not None
    return entry


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<c16", "|b1", "<f2"])
def test_opened_reads_blocks_of_a_plain_file(kind, tmp_path):
    values = np.arange(24).astype(kind).reshape(2, 3, 4)
    with opened(written(tmp_path, values)) as found:
        assert isinstance(found, FileElements)
        assert (found.shape, found.size, found.dtype) == ((2, 3, 4), 24, values.dtype)
        room = memoryview(bytearray(10 * values.itemsize))
        for at, count in ((0, 10), (10, 10), (20, 4), (3, 0)):
            part = found.part(at, count, room)
            assert part.tolist() == values.reshape(-1)[at : at + count].tolist()


def test_opened_loads_packed_and_transposed_files(tmp_path):
    """Packed files, and elements that lie in another order."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    columns = tmp_path / "columns.npy"
    np.save(columns, np.asfortranarray(values))
    for entry in (written(tmp_path, values, "zstd"), entry_of(columns)):
        with opened(entry) as found:
            assert isinstance(found, np.ndarray)
            assert (found == values).all()


def test_opened_raises_the_errors_of_load(tmp_path):
    entry = written(tmp_path, np.ones((2, 3), np.float32))
    record = ManifestRecord("x.npy", 1, "Op", "x", "", "float32", (6,), 24, 24, "")
    (tmp_path / "half.npy").write_bytes(entry.path.read_bytes()[:-4])
    (tmp_path / "none.npy").write_bytes(b"")
    bad = [entry._replace(record=record)]
    bad += [entry_of(tmp_path / name) for name in ("half.npy", "none.npy", "gone.npy")]
    for each in bad:
        with pytest.raises(CorruptedError) as loaded:
            load(each)
        with pytest.raises(CorruptedError) as found, opened(each):
            pass
        assert str(found.value) == str(loaded.value)


def test_opened_file_that_is_truncated_is_damage(tmp_path):
    entry = written(tmp_path, np.ones(100, np.float32))
    with opened(entry) as found:
        assert isinstance(found, FileElements)
        os.truncate(entry.path, entry.path.stat().st_size - 8)
        assert found.part(0, 98, memoryview(bytearray(400))).sum() == 98
        with pytest.raises(CorruptedError, match="truncated while it was read"):
            found.part(90, 10, memoryview(bytearray(400)))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_opened_leaves_no_descriptor_open(tmp_path):
    entry = written(tmp_path, np.ones(3, np.float32))
    before = descriptors()
    for _ in range(3):
        with opened(entry):
            assert descriptors() == before + 1
    assert descriptors() == before

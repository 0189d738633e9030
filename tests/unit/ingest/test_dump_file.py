"""What bytes hold: never more is believed than is there."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.native_tree import LONG, bin_bytes, npy_bytes, tensor_name

from rankdump.errors import CorruptedError
from rankdumpd.ingest.dump_file import DumpFileKind, classify_file, examine_file

KINDS = {
    tensor_name("a", 1): DumpFileKind.NPY,
    LONG: DumpFileKind.NPY,
    "12345.npy": DumpFileKind.NPY,
    "a.npy.zst": DumpFileKind.PACKED,
    "Add.net_Add.3.1.1700000000000900": DumpFileKind.BIN,
    "Add.net_Add.3.1700000000000900": DumpFileKind.BIN,
    "Add.net_Add.3.1.1700000000000900.4.1.2.0": DumpFileKind.BIN,
    "Add.net_Add.3.1.1700000000000900.output.0": DumpFileKind.BIN,
    "Opdebug.Node_OpDebug.1.2.1700000000000900": DumpFileKind.BIN,
    "5577293430985752569": DumpFileKind.BIN,
    "statistic.csv": DumpFileKind.PLAIN,
    "mapping.csv": DumpFileKind.PLAIN,
    "MatMul.Default_a.json": DumpFileKind.PLAIN,
    "ms_output_trace_code_graph_0.ir": DumpFileKind.PLAIN,
    "noname": DumpFileKind.PLAIN,
    ".5": DumpFileKind.PLAIN,
}


def test_kinds():
    assert {name: classify_file(name) for name in KINDS} == KINDS


@pytest.mark.parametrize(
    ("data", "dtype", "shape", "elements"),
    [
        (npy_bytes(np.ones((2, 3), np.float32)), "float32", (2, 3), np.ones(6, "<f4").tobytes()),
        (npy_bytes(np.arange(3, dtype="<u2"), descr="<E2"), "bfloat16", (3,), b"\0\0\1\0\2\0"),
        (npy_bytes(np.arange(3, dtype="<u2"), descr="<T2"), "bfloat16", (3,), b"\0\0\1\0\2\0"),
        (npy_bytes(np.array(True)), "bool", (), b"\1"),
        (npy_bytes(np.zeros((0,), np.float32)) + b"1234", "float32", (0,), b""),
    ],
)
def test_arrays(data: bytes, dtype: str, shape: tuple[int, ...], elements: bytes):
    content = examine_file("a.npy", memoryview(data))
    (member,) = content.members
    assert (member.dtype, member.shape, member.bytes_in) == (dtype, shape, len(elements))
    assert member.digest == xxhash.xxh3_128_hexdigest(elements)
    assert b"".join(content.frames) == data


def test_a_bin_file_is_all_of_its_frames():
    data = bin_bytes(np.ones(3, np.float32), np.ones(0, np.float32), trailing=b"xyz")
    content = examine_file("a.b.1.2.3", memoryview(data))
    assert b"".join(content.frames) == data
    assert [member.name for member in content.members] == ["input.0", "output.0"]


@given(data=st.binary(max_size=300), cut=st.integers(0, 300), at=st.integers(0, 300))
@pytest.mark.parametrize("name", ["a.npy", "a.b.1.2.3"])
def test_anything_is_whole_or_damaged(name: str, data: bytes, cut: int, at: int):
    """Bytes of a good file, cut and overwritten anywhere: an answer or DamagedError."""
    good = npy_bytes(np.arange(9)) if name == "a.npy" else bin_bytes(np.arange(9), np.arange(2))
    broken = (good[:at] + data + good[at + len(data) :])[:cut]
    try:
        whole = b"".join(examine_file(name, memoryview(broken)).frames)
    except CorruptedError:
        return
    assert whole == broken

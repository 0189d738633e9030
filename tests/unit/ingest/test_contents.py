"""What bytes hold: never more is believed than is there."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from suites.native_tree import LONG, bin_bytes, npy_bytes, tensor_name

from rankdump.contract.errors import DamagedError
from rankdumpd.ingest.contents import examine, kind_of
from rankdumpd.ingest.values import Kind

KINDS = {
    tensor_name("a", 1): Kind.NPY,
    LONG: Kind.NPY,
    "12345.npy": Kind.NPY,
    "a.npy.zst": Kind.PACKED,
    "Add.net_Add.3.1.1700000000000900": Kind.BIN,
    "Add.net_Add.3.1700000000000900": Kind.BIN,
    "Add.net_Add.3.1.1700000000000900.4.1.2.0": Kind.BIN,
    "Add.net_Add.3.1.1700000000000900.output.0": Kind.BIN,
    "Opdebug.Node_OpDebug.1.2.1700000000000900": Kind.BIN,
    "5577293430985752569": Kind.BIN,
    "statistic.csv": Kind.PLAIN,
    "mapping.csv": Kind.PLAIN,
    "MatMul.Default_a.json": Kind.PLAIN,
    "ms_output_trace_code_graph_0.ir": Kind.PLAIN,
    "noname": Kind.PLAIN,
    ".5": Kind.PLAIN,
}


def test_kinds():
    assert {name: kind_of(name) for name in KINDS} == KINDS


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
    content = examine("a.npy", memoryview(data))
    (member,) = content.members
    assert (member.dtype, member.shape, member.bytes_in) == (dtype, shape, len(elements))
    assert member.digest == xxhash.xxh3_128_hexdigest(elements)
    assert b"".join(content.frames) == data


def test_a_bin_file_is_all_of_its_frames():
    data = bin_bytes(np.ones(3, np.float32), np.ones(0, np.float32), trailing=b"xyz")
    content = examine("a.b.1.2.3", memoryview(data))
    assert b"".join(content.frames) == data
    assert [member.name for member in content.members] == ["input.0", "output.0"]


@given(data=st.binary(max_size=300), cut=st.integers(0, 300), at=st.integers(0, 300))
@pytest.mark.parametrize("name", ["a.npy", "a.b.1.2.3"])
def test_anything_is_whole_or_damaged(name: str, data: bytes, cut: int, at: int):
    """Bytes of a good file, cut and overwritten anywhere: an answer or DamagedError."""
    good = npy_bytes(np.arange(9)) if name == "a.npy" else bin_bytes(np.arange(9), np.arange(2))
    broken = (good[:at] + data + good[at + len(data) :])[:cut]
    try:
        whole = b"".join(examine(name, memoryview(broken)).frames)
    except DamagedError:
        return
    assert whole == broken

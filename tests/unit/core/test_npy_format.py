"""npy headers: byte for byte MindSpore's, readable by numpy, and safe to parse from any file."""

from __future__ import annotations

import ast
import io
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.npy_arrays import view_npy_array

from rankdump._core import npy_format
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump.errors import CorruptedError

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden" / "npy").glob("*.npy"))
REAL = ROOT.parent / "shared" / "golden" / "mindspore"


def stated(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Read descr and shape by hand, so that the parser under test has no part in it."""
    assert data[:8] == b"\x93NUMPY\x01\x00"
    fields = ast.literal_eval(data[10 : 10 + int.from_bytes(data[8:10], "little")].decode())
    assert not fields["fortran_order"]
    return fields["descr"], fields["shape"]


def check_same_header(path: Path) -> None:
    data = path.read_bytes()
    made = npy_format.format_npy_header(*stated(data))
    assert data[: len(made)] == made, path.name


def test_golden_npy_files_exist():
    """The table below is not empty."""
    assert len(GOLDEN) == 10


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_format_npy_header_equals_golden_files(path: Path):
    """The header of a file that MindSpore wrote comes out byte for byte."""
    check_same_header(path)


def test_format_npy_header_equals_files_of_mindspore():
    """The same for whole trees of two MindSpore versions, where they are at hand."""
    paths = sorted(REAL.glob("**/*.npy"))
    if not paths and os.environ.get("CI") != "true":
        pytest.skip(f"no trees in {REAL}")
    assert len(paths) > 100
    for path in paths:
        check_same_header(path)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_view_npy_array_agrees_with_numpy(path: Path):
    """Files are accepted and rejected as by numpy.load."""
    data = path.read_bytes()
    try:
        expected = np.load(io.BytesIO(data))
    except ValueError:
        with pytest.raises(CorruptedError, match="<E2"):
            view_npy_array(data)
        return
    if expected.size == 0:
        # MindSpore 2.0.0 wrote four stray bytes behind an empty tensor.
        with pytest.raises(CorruptedError, match="4 bytes of elements, but its header declares 0"):
            view_npy_array(data)
        data = data[:-4]
    found = view_npy_array(data)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


shapes = st.lists(st.integers(0, 5), max_size=8).map(tuple)
descrs = st.sampled_from(sorted({kind.descr for kind in ELEMENT_TYPES.values()}))


@given(descr=descrs, shape=shapes)
def test_npy_files_written_here_are_read_by_numpy(descr: str, shape: tuple[int, ...]):
    """Header and elements make a file that numpy and this reader agree on."""
    head = npy_format.format_npy_header(descr, shape)
    assert len(head) % 64 == 0
    parsed = npy_format.parse_npy_header(head)
    assert (parsed.descr, parsed.shape, parsed.data_offset) == (descr, shape, len(head))
    elements = bytes(range(256)) * (parsed.data_bytes // 256 + 1)
    data = head + elements[: parsed.data_bytes]
    loaded = np.load(io.BytesIO(data))
    assert loaded.shape == shape
    assert view_npy_array(data).tobytes() == loaded.tobytes()


@given(descr=descrs, shape=st.lists(st.integers(0, 4), max_size=4).map(tuple), order=st.booleans())
def test_npy_files_of_numpy_are_read(descr: str, shape: tuple[int, ...], order: bool):
    """Files of numpy.save, either order, read back as the same array."""
    source = np.arange(np.prod(shape, dtype=int)).astype(descr).reshape(shape)
    target = io.BytesIO()
    np.save(target, np.array(source, order="F" if order else "C"))
    found = view_npy_array(target.getvalue())
    assert found.shape == shape
    assert np.array_equal(found, source)
    assert not found.flags.writeable


def test_format_npy_header_over_64_kib_has_version_2():
    """The length field of version 1 holds 65,535; more dimensions than that need version 2."""
    readers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    for dimensions, version in ((20_000, 1), (40_000, 2)):
        head = npy_format.format_npy_header("<f4", (1,) * dimensions)
        assert len(head) % 64 == 0
        stream = io.BytesIO(head)
        assert np.lib.format.read_magic(stream) == (version, 0)
        shape, _, _ = readers[version](stream, max_header_size=1 << 20)
        assert shape == (1,) * dimensions
        with pytest.raises(CorruptedError, match="at most 10000 are allowed"):
            npy_format.parse_npy_header(head)


@given(data=st.binary(max_size=300))
@example(b"")
@example(b"\x93NUMPY")
def test_parse_npy_header_rejects_random_bytes(data: bytes):
    """Random bytes raise DamagedError and nothing else."""
    with pytest.raises(CorruptedError):
        view_npy_array(data)


def block(text: bytes, version: int = 1) -> bytes:
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + text


@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
@example(b"{'descr': '<f4', 'fortran_order': False, 'shape': (0x" + b"f" * 5000 + b",)}")
@example(b"\0")
@example(b"(" * 2000)
@example(b"-" * 5000 + b"1")
@example(b"9" * 5000)
@example(b"{[]: 1}")
@example(b"{'descr': '<f4'}")
@example(b"[]")
@example(b"f'{x}'")
@example(b"'\\N{x'")
@example(b"'\\d'")
@example(b"1if 2else 3")
def test_parse_npy_header_rejects_random_text(text: bytes):
    """Random text behind a true prefix raises DamagedError and nothing else, not even a warning."""
    for version in (1, 2, 3):
        with pytest.raises(CorruptedError):
            view_npy_array(block(text, version))


@given(data=st.data())
def test_view_npy_array_survives_flipped_bytes(data: st.DataObject):
    """A file with one byte changed reads as some array of the same size or is refused."""
    whole = bytearray(npy_format.format_npy_header("<f4", (3, 2)) + bytes(24))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = view_npy_array(bytes(whole))
    except CorruptedError:
        return
    assert found.nbytes == 24


FIELDS = "{'descr': %s, 'fortran_order': %s, 'shape': %s, }"


@pytest.mark.parametrize(
    "text",
    [
        FIELDS % ("'|O'", "False", "(1,)"),
        FIELDS % ("'<f4,<f4'", "False", "(1,)"),
        FIELDS % ("'<f3'", "False", "(1,)"),
        FIELDS % ("'<f" + "9" * 50 + "'", "False", "(1,)"),
        FIELDS % ("'<i0'", "False", "(1,)"),
        FIELDS % ("'V0'", "False", "(4,)"),
        FIELDS % ("'V99999999999'", "False", "(0,)"),
        FIELDS % ("[('a', '<f4')]", "False", "(1,)"),
        FIELDS % ("'<f4'", "0", "(1,)"),
        FIELDS % ("'<f4'", "None", "(1,)"),
        FIELDS % ("'<f4'", "False", "(-1,)"),
        FIELDS % ("'<f4'", "False", "(1.0,)"),
        FIELDS % ("'<f4'", "False", "('1',)"),
        FIELDS % ("'<f4'", "False", "(True,)"),
        FIELDS % ("'<f4'", "False", "1"),
        FIELDS % ("'<f4'", "False", "None"),
        FIELDS % ("'<f4'", "False", f"({2**64},)"),
        FIELDS % ("'<f4'", "False", f"(0, {2**70})"),
        FIELDS % ("'<f4'", "False", "(" + "1," * 65 + ")"),
    ],
)
@pytest.mark.parametrize("spare", [0, 4])
def test_parse_npy_header_rejects_hostile_fields(text: str, spare: int):
    """Fields of wrong types or values are rejected."""
    with pytest.raises(CorruptedError):
        view_npy_array(block(text.encode()) + bytes(spare))


@given(shape=st.lists(st.integers(0, 2**66), min_size=1, max_size=4).map(tuple))
def test_view_npy_array_of_huge_shape_allocates_nothing(shape: tuple[int, ...]):
    """A header may declare any size; memory is bounded by the size of the file."""
    data = npy_format.format_npy_header("<f8", shape)
    tracemalloc.start()
    try:
        assert view_npy_array(data).size == 0
    except CorruptedError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_view_npy_array_checks_the_size(change: int):
    """Missing or surplus elements are rejected with both numbers."""
    data = npy_format.format_npy_header("<f4", (2, 3)) + bytes(24 + change)
    with pytest.raises(CorruptedError, match=f"{24 + change} bytes of elements.*declares 24"):
        view_npy_array(data)


def test_parse_npy_header_rejects_a_cut_off_header():
    """Every prefix of a file is rejected."""
    data = npy_format.format_npy_header("<f4", (2,)) + bytes(8)
    for length in range(len(data)):
        with pytest.raises(CorruptedError):
            view_npy_array(data[:length])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"\x93NUMPY\x02\x00\xf0\xff\xff\xff" + b"{" * 99,
            "damaged: its first 12 bytes declare an npy header of 4294967292 bytes, at most "
            "10000 are allowed",
        ),
        (
            b"\x93NUMPY\x01\x00\x90\x01" + b"{" * 100,
            "damaged: its first 10 bytes declare an npy header of 410 bytes, but the file has 110",
        ),
        (
            b"\x93NUMPY\x01\x00\x4c\x00"
            + b"{'descr':'<f4','fortran_order':False,'shape':(99999999999999999999,-1)}".ljust(76),
            "damaged: npy header with the shape (99999999999999999999, -1); allowed are at most 64 "
            "extents below 2**63",
        ),
    ],
)
def test_parse_npy_header_describes_an_absurd_header(data: bytes, said: str):
    """The message has the place, the value and what is allowed."""
    with pytest.raises(CorruptedError) as caught:
        npy_format.parse_npy_header(data)
    assert str(caught.value) == said

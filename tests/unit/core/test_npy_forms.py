"""Forms of MindSpore's npy files: types unknown to numpy, and bytes behind an empty tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core import npy_format
from rankdump._core.npy_format import read_npy_form
from rankdump.errors import CorruptedError

WORDS = npy_format.format_npy_header("<u2", (2, 3))


def second_version(head: bytes) -> bytes:
    """Return the same header with a length of four bytes."""
    text = head[10:]
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize("descr", [b"<h2", b"<T2", b"<E2"])
@pytest.mark.parametrize("version", [1, 2])
def test_read_npy_form_knows_all_names_of_bfloat16(descr: bytes, version: int):
    """Two-byte words stand in its place, whichever release wrote it."""
    head = WORDS.replace(b"<u2", descr)
    head = second_version(head) if version == 2 else head
    form = read_npy_form(head + bytes(12))
    assert (form.dtype, form.bfloat16, form.header.descr) == ("bfloat16", True, "<u2")
    assert (form.header.data_offset, form.data_end) == (len(head), len(head) + 12)
    plain = read_npy_form(WORDS + bytes(12))
    assert (plain.dtype, plain.bfloat16) == ("uint16", False)
    with pytest.raises(CorruptedError, match="'<k2'"):
        read_npy_form(WORDS.replace(b"<u2", b"<k2") + bytes(12))


@pytest.mark.parametrize("descr", ["<f4", "<E2"])
def test_read_npy_form_allows_stray_bytes_behind_an_empty_tensor(descr: str):
    """Up to one element behind an empty tensor, never behind another."""
    empty = npy_format.format_npy_header(descr, (0, 4))
    for stray in range(9):
        form = read_npy_form(empty + bytes(stray))
        assert (form.header.data_bytes, form.data_end) == (0, len(empty))
    with pytest.raises(CorruptedError, match="9 bytes of elements, but its header declares 0"):
        read_npy_form(empty + bytes(9))
    with pytest.raises(CorruptedError, match="13 bytes of elements, but its header declares 12"):
        read_npy_form(WORDS + bytes(13))


@given(data=st.binary(max_size=300), at=st.integers(0, 200))
def test_read_npy_form_survives_overwritten_bytes(data: bytes, at: int):
    """Bytes of a good file overwritten anywhere: a form that fits the file, or DamagedError."""
    good = npy_format.format_npy_header("<E2", (3,)) + bytes(6)
    broken = good[:at] + data + good[at + len(data) :]
    try:
        form = read_npy_form(broken)
    except CorruptedError:
        return
    assert form.data_end - form.header.data_offset == form.header.data_bytes
    assert form.data_end <= len(broken)


def test_read_npy_form_rejects_an_overlong_header():
    """It is refused before it is read."""
    text = b"{" + b" " * (1 << 20)
    with pytest.raises(CorruptedError, match="at most 10000 are allowed"):
        read_npy_form(b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text)

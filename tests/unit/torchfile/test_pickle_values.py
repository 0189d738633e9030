"""Plain values of pickles: those of Python's own pickler, and hostile ones."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._torchfile.pickle_values import PickledName, read_pickle_values
from rankdump.errors import CorruptedError, RankdumpError, UnsupportedError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 126), 1 << 126)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(2, 5))
def test_plain_values_come_back(value, protocol):
    """Law: what Python pickles of plain values is read as it was, in every protocol since 2."""
    assert read_pickle_values(pickle.dumps(value, protocol)) == value


@given(VALUES, st.integers(2, 5), st.data())
def test_damaged_pickles_are_an_error_or_a_value(value, protocol, data):
    """Law: whatever bytes are changed or cut off, nothing else is raised."""
    packed = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    with suppress(RankdumpError):
        read_pickle_values(cut)


class _Runs:
    """An object whose pickle removes a file."""

    def __reduce__(self):
        return os.remove, ("/nowhere",)


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_is_rejected(protocol, monkeypatch):
    """A pickle that would remove a file is read up to the name of that function."""
    ran = []
    monkeypatch.setattr(os, "remove", ran.append)
    with pytest.raises(UnsupportedError, match=r"which is not read|only plain values"):
        read_pickle_values(pickle.dumps(_Runs(), protocol), allowed=("collections.OrderedDict",))
    assert ran == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({1: 2}, id="a key that is no text"),
        pytest.param({(): 2}, id="a key that is a tuple"),
        pytest.param(1 << 200, id="an integer of many bytes"),
        pytest.param({1, 2}, id="a set"),
        pytest.param(b"ab", id="bytes"),
        pytest.param(len, id="a function"),
        pytest.param(ValueError("x"), id="an object"),
    ],
)
def test_values_that_are_not_plain_are_rejected(content):
    with pytest.raises(UnsupportedError):
        read_pickle_values(pickle.dumps(content, 4))


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02", id="no end"),
        pytest.param(b"\x80\x02.", id="no value"),
        pytest.param(b"\x80\x02(.", id="a mark alone"),
        pytest.param(b"\x80\x02X\xff\xff\xff\xffab.", id="a text beyond the end"),
        pytest.param(b"\x80\x02\x8d" + struct.pack("<Q", 1 << 62) + b"a.", id="an endless text"),
        pytest.param(b"\x80\x02X\x01\x00\x00\x00\xff.", id="a text that is not UTF-8"),
        pytest.param(b"\x80\x02h\x07.", id="a value that was not stored"),
        pytest.param(b"\x80\x02K\x01K\x02a.", id="an item for a number"),
        pytest.param(b"\x80\x02}(K\x01u.", id="a key without a value"),
        pytest.param(b"\x80\x02t.", id="a tuple without a mark"),
        pytest.param(b"\x80\x02NNR.", id="a call of nothing"),
        pytest.param(b"\x80\x02ctorch", id="a name without an end"),
        pytest.param(b"\x80\x02\x8c\x01\nctorch", id="a name without an end behind a line"),
    ],
)
def test_damage_is_named_with_its_place(packed):
    with pytest.raises(CorruptedError, match=r"byte \d+|no end"):
        read_pickle_values(packed)


def test_names_on_the_list_are_texts():
    """An allowed name is not imported, and a call of it not made."""
    packed = pickle.dumps((collections.Counter, collections.OrderedDict()), 2)
    name, made = read_pickle_values(packed, ("collections.Counter", "collections.OrderedDict"))
    assert (name, made) == (PickledName("collections", "Counter"), {})


def test_every_opcode_that_makes_objects_is_rejected():
    """Of all opcodes of Python, those for objects, extensions and buffers are unknown to us."""
    makes = ["INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "NEXT_BUFFER"]
    codes = {each.name: each.code.encode("latin-1") for each in pickletools.opcodes}
    for name in makes:
        with pytest.raises(UnsupportedError, match="opcode"):
            read_pickle_values(b"\x80\x02)" + codes[name] + b"\x00\x00\x00\x00\n\n.")

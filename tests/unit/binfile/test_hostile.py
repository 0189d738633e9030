"""Hostile bin files: CorruptedError and no other, and no more memory than the file has bytes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.bin_files import GOLDEN, headers, operator, packed_file_of

from rankdump._binfile.bin_file import (
    open_bin_file,
    parse_bin_file,
    read_bin_header,
    read_payload_array,
    serialize_bin_head,
)
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput
from rankdump.errors import CorruptedError, UnsupportedError

pytestmark = pytest.mark.slow

OPERATOR = operator(b"abcdefgh" * 40, bytes(500), bytes(range(256)))
SEEDS = {
    "golden": GOLDEN,
    "operator": OPERATOR,
    "golden.zst": packed_file_of(GOLDEN),
    "operator.zst": packed_file_of(OPERATOR),
}
ROOM_BYTES = 1 << 20
"""Memory of objects and messages, in addition to the file's size."""


def survives(path: Path, data: bytes) -> bool:
    """Return whether a file could be opened; any error other than CorruptedError is a failure."""
    path.write_bytes(data)
    text = damage(open_bin_file, path) or damage(everything, path)
    if text:
        assert text.startswith(f"{path}: ")
        assert len(text) < 1000
    else:
        read_bin_header(path)
    return not text


def damage(opens: Callable[[Path], object], path: Path) -> str:
    """Return the error of a reader; any other error is a failure."""
    try:
        opens(path)
    except CorruptedError as error:
        return str(error)
    return ""


def everything(path: Path) -> None:
    """Use every function on a file."""
    found = open_bin_file(path)
    for payload in found.payloads:
        data = found.read_payload(payload)
        assert len(data) == payload.part.size
        if isinstance(payload.part, OpInput | OpOutput):
            with suppress(UnsupportedError, CorruptedError):
                read_payload_array(payload.part, data)


@pytest.mark.parametrize("name", SEEDS)
def test_bin_file_cut_at_any_byte_is_rejected(tmp_path: Path, name: str):
    """No prefix of a file is accepted."""
    data = SEEDS[name]
    for length in range(len(data)):
        assert not survives(tmp_path / name, data[:length])
    assert survives(tmp_path / name, data)


@pytest.mark.parametrize("name", SEEDS)
def test_mutated_bin_file_raises_only_corrupted_error(tmp_path: Path, name: str):
    """Bytes set, runs copied, runs taken out: never another error, never much memory."""
    rng = random.Random(name)
    read = 0
    tracemalloc.start()
    try:
        for _ in range(1500):
            data = bytearray(SEEDS[name])
            for _ in range(rng.randint(1, 4)):
                at, count = rng.randrange(len(data)), rng.randint(1, 9)
                change = rng.randrange(4)
                if change == 0:
                    data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                elif change == 1:
                    data[at:at] = data[at : at + count]
                elif change == 2:
                    del data[at : at + count]
                else:
                    data[at : at + count] = b"\xff" * count
                if not data:
                    break
            # The peak of this file alone, because garbage of earlier files may still be there.
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            read += survives(tmp_path / name, bytes(data))
            peak = tracemalloc.get_traced_memory()[1]
            assert peak - before < ROOM_BYTES + 4 * len(OPERATOR)
    finally:
        tracemalloc.stop()
    assert 0 < read < 1500


@given(data=st.binary(max_size=300))
@example(data=b"\xff" * 8 + b"x")
@example(data=(1 << 63).to_bytes(8, "little") + b"x")
@example(data=(1).to_bytes(8, "little") + b"\x0a")
def test_random_bin_file_raises_only_corrupted_error(data: bytes):
    """Random bytes, alone and as a header whose length is right."""
    for whole in (data, len(data).to_bytes(8, "little") + data):
        try:
            found = parse_bin_file(memoryview(whole))
        except CorruptedError:
            continue
        assert sum(p.part.size for p in found.payloads) <= len(whole)


@given(header=headers)
def test_bin_header_sizes_must_fit_the_file(header: DumpData):
    """A header alone is a file only where its payloads are empty."""
    wanted = sum(part.size for part in (*header.input, *header.output))
    wanted += sum(part.size for part in (*header.buffer, *header.space))
    whole = serialize_bin_head(header)
    if wanted:
        with pytest.raises(CorruptedError):
            parse_bin_file(memoryview(whole))
    else:
        assert parse_bin_file(memoryview(whole)).header == header


@pytest.mark.parametrize(
    "tag",
    [b"\x0b", b"\x1b", b"\xa3\x06", b"\x1a\x02", b"\x22\x02"],
    ids=["group", "output group", "unknown group", "outputs", "inputs"],
)
def test_bin_header_of_any_depth_is_handled(tag: bytes):
    """Messages in messages and groups in groups, a hundred thousand deep."""
    body = tag * 100_000
    with pytest.raises(CorruptedError):
        parse_bin_file(memoryview(len(body).to_bytes(8, "little") + body))


@pytest.mark.parametrize("name", ["claim", "claim.zst"])
def test_bin_header_sizes_allocate_nothing(tmp_path: Path, name: str):
    """A file of a hundred bytes that declares a terabyte needs memory for a hundred bytes."""
    header = DumpData(output=(OpOutput(4, 2, size=1 << 40), OpOutput(4, 2, size=1 << 62)))
    plain = serialize_bin_head(header) + bytes(40)
    path = tmp_path / name
    frame = b"\x28\xb5\x2f\xfd\xe0" + (60 << 30).to_bytes(8, "little") + b"\x03\x00\x00\x00"
    path.write_bytes(plain if name == "claim" else frame)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptedError):
            open_bin_file(path)
        with pytest.raises(CorruptedError):
            read_bin_header(path)
        assert tracemalloc.get_traced_memory()[1] < ROOM_BYTES
    finally:
        tracemalloc.stop()

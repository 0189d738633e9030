"""Stored zstd frames, and files that are joined from frames."""

from __future__ import annotations

import random

import pytest
import zstandard

from rankdump._codec.file_codec import SMALL_FILE_BYTES, get_codec, pack_part, select_codec
from rankdump._codec.zstd_frames import (
    STORED_HEAD_BYTES,
    compute_stored_bytes,
    is_stored_frame,
    iterate_stored_blocks,
    make_memory_reader,
    make_stored_frame,
    read_stored_size,
)
from rankdump.errors import CorruptedError

NOISE = random.Random(4).randbytes(5 << 17)


@pytest.mark.parametrize("size", [0, 1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 5 << 17])
def test_stored_frame_is_unpacked_by_any_reader(size):
    """In one go, in a stream, and by the size that it declares."""
    frame = b"".join(make_stored_frame((NOISE[:size],)))
    assert zstandard.frame_content_size(frame) == size
    assert bytes(select_codec("a.zst").decode(frame, limit_bytes=size)) == NOISE[:size]
    assert zstandard.ZstdDecompressor().decompressobj().decompress(frame) == NOISE[:size]
    assert len(frame) == compute_stored_bytes((size,)) <= size + 14 + 3 * (1 + size // (1 << 17))


def test_stored_frame_copies_nothing():
    """The parts are views of what was given."""
    data = bytearray(NOISE[: 1 << 17])
    _, _, block = make_stored_frame((data,))
    data[0] ^= 1
    assert memoryview(block)[0] == data[0]


def test_stored_frame_is_recognized_by_its_start():
    """No compressor spells a frame that way."""
    parts = (b"head", NOISE)
    frame = b"".join(make_stored_frame(parts))
    assert is_stored_frame(frame[:STORED_HEAD_BYTES])
    assert read_stored_size(frame) == len(NOISE) + 4
    assert len(frame) == compute_stored_bytes(map(len, parts))
    for level in (1, 19):
        packed = zstandard.ZstdCompressor(level=level).compress(NOISE)
        assert not is_stored_frame(packed[:STORED_HEAD_BYTES])
    assert not is_stored_frame(b"")


def test_stored_blocks_are_the_content():
    """They are read one by one."""
    frame = b"".join(make_stored_frame((b"head", NOISE)))
    blocks = [*iterate_stored_blocks(make_memory_reader(frame), len(frame))]
    assert [len(block) for block in blocks] == [4, *[1 << 17] * 5]
    assert b"".join(blocks) == b"head" + NOISE


@pytest.mark.parametrize("at", [5, 13, 14, 17, 25, 30, (1 << 17) + 24])
def test_stored_blocks_of_a_cut_file_are_rejected(at: int):
    """Wherever it ends, and if something follows."""
    frame = bytearray(b"".join(make_stored_frame((b"head", NOISE))))
    size = len(frame)
    for wrong, length in ((frame[:-1], size - 1), (frame + b"x", size + 1), (frame[:at], at)):
        with pytest.raises(CorruptedError, match="cannot be read"):
            list(iterate_stored_blocks(make_memory_reader(bytes(wrong)), length))


@pytest.mark.parametrize("flipped", [4 << 3, 1 << 1, 1])
def test_stored_blocks_reject_other_blocks(flipped: int):
    """A block that is longer, of another kind or the last one too early."""
    frame = bytearray(b"".join(make_stored_frame((b"head", NOISE))))
    frame[STORED_HEAD_BYTES] ^= flipped
    with pytest.raises(CorruptedError, match="cannot be read"):
        list(iterate_stored_blocks(make_memory_reader(bytes(frame)), len(frame)))


@pytest.mark.parametrize("part", [b"head", NOISE, bytes(SMALL_FILE_BYTES + 1)])
def test_pack_part_makes_one_frame(part):
    """A part that does not get smaller is stored in its frame."""
    data = b"".join(pack_part(get_codec("zstd"), part))
    assert data.count(zstandard.FRAME_HEADER) == 1
    assert bytes(select_codec("a.zst").decode(data, limit_bytes=1 << 20)) == part


def test_pack_part_without_bytes_makes_no_frame():
    assert pack_part(get_codec("zstd"), b"") == ()


def test_pack_part_without_codec_keeps_the_part():
    assert pack_part(get_codec("none"), NOISE) == (NOISE,)

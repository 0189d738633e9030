"""Stored zstd frames, and files that are joined from frames."""

from __future__ import annotations

import random

import pytest
import zstandard

from rankdump._codec.file_codec import SMALL_FILE_BYTES, get_codec, pack_part, select_codec
from rankdump._codec.zstd_frames import make_stored_frame

NOISE = random.Random(4).randbytes(5 << 17)


@pytest.mark.parametrize("size", [0, 1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 5 << 17])
def test_stored_frame_is_unpacked_by_any_reader(size):
    """In one go, in a stream, and by the size that it declares."""
    frame = b"".join(make_stored_frame(NOISE[:size]))
    assert zstandard.frame_content_size(frame) == size
    assert bytes(select_codec("a.zst").decode(frame, limit_bytes=size)) == NOISE[:size]
    assert zstandard.ZstdDecompressor().decompressobj().decompress(frame) == NOISE[:size]
    assert len(frame) <= size + 14 + 3 * (1 + size // (1 << 17))


def test_stored_frame_copies_nothing():
    """The parts are views of what was given."""
    data = bytearray(NOISE[: 1 << 17])
    _, _, block = make_stored_frame(data)
    data[0] ^= 1
    assert memoryview(block)[0] == data[0]


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

"""Stored zstd frames, and files that are joined from frames."""

from __future__ import annotations

import random

import pytest
import zstandard

from rankdump._codec.file_codec import SMALL_FILE_BYTES, get_codec, pack_parts, select_codec
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


@pytest.mark.parametrize(
    "parts", [(b"head", b""), (b"head", NOISE), (b"", bytes(SMALL_FILE_BYTES + 1))]
)
def test_pack_parts_makes_a_frame_for_each_part(parts):
    """A part without bytes has none; what does not get smaller is stored."""
    packed = pack_parts(get_codec("zstd"), parts)
    data = b"".join(packed.parts)
    assert packed.suffix == ".zst"
    assert data.count(zstandard.FRAME_HEADER) == sum(1 for part in parts if part)
    assert bytes(select_codec("a.zst").decode(data, limit_bytes=1 << 20)) == b"".join(parts)


def test_pack_parts_without_codec_keeps_the_parts():
    """Nothing is put around them."""
    packed = pack_parts(get_codec("none"), (b"head", NOISE))
    assert (packed.suffix, packed.parts) == ("", (b"head", NOISE))

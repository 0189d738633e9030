"""Codecs of files: the laws of both, and zstd's detection of damage and use by the zstd command."""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from support.codec_laws import COMPRESSIBLE, CodecLaws

from rankdump._codec.file_codec import (
    BLOCK_BYTES,
    CODECS,
    SMALL_FILE_BYTES,
    FileCodec,
    ZstdCodec,
    get_codec,
    pack_file,
    select_codec,
    unpack_stream,
)
from rankdump._codec.zstd_frames import (
    ByteBuffer,
    compute_stored_bytes,
    is_stored_frame,
    iterate_stored_blocks,
    make_memory_reader,
    make_stored_frame,
)
from rankdump.errors import CorruptedError, UnsupportedError

LIMIT_BYTES = 1 << 20
FRAME = b"".join(ZstdCodec().encode([COMPRESSIBLE]))


class TestNone(CodecLaws):
    codec = FileCodec()

    def test_copies_nothing(self):
        """The parts themselves are handed on."""
        pieces = [b"a", memoryview(b"b")]
        assert self.codec.encode(pieces) is pieces


class TestZstd(CodecLaws):
    codec = ZstdCodec()


def test_zstd_codec_reads_frames_of_another_level():
    """The level is the writer's own: any reader of the suffix unpacks it."""
    packed = zstandard.ZstdCompressor(level=9, write_checksum=True).compress(COMPRESSIBLE)
    assert CODECS["zstd"].decode(packed, limit_bytes=LIMIT_BYTES) == COMPRESSIBLE
    assert len(packed) <= len(FRAME)


def test_zstd_codec_compresses():
    """Repetition costs next to nothing."""
    assert len(FRAME) * 100 < len(COMPRESSIBLE)


def test_zstd_codec_rejects_truncated_files():
    """No prefix of a frame is taken for the frame."""
    for length in range(len(FRAME)):
        with pytest.raises(CorruptedError):
            ZstdCodec().decode(FRAME[:length], limit_bytes=LIMIT_BYTES)


def test_zstd_codec_detects_flipped_bits():
    """Every single flipped bit is refused or harmless: other bytes never come out."""
    refused = 0
    for index in range(len(FRAME)):
        for bit in range(8):
            damaged = bytearray(FRAME)
            damaged[index] ^= 1 << bit
            try:
                found = ZstdCodec().decode(bytes(damaged), limit_bytes=LIMIT_BYTES)
            except CorruptedError:
                refused += 1
            else:
                assert found == COMPRESSIBLE
    assert refused > 0.9 * 8 * len(FRAME)


@given(data=st.binary(max_size=200))
@example(data=b"0\0")
def test_zstd_codec_rejects_random_bytes(data: bytes):
    """Random bytes are damage and nothing worse."""
    for prefix in (b"", FRAME[:4], FRAME[:6]):
        with pytest.raises(CorruptedError):
            ZstdCodec().decode(prefix + data, limit_bytes=LIMIT_BYTES)


def test_zstd_codec_allocates_nothing_for_a_declared_size():
    """A frame that declares 2**40 bytes is refused by its declaration."""
    claim = b"\x28\xb5\x2f\xfd" + bytes([0b11100100]) + struct.pack("<Q", 1 << 40) + FRAME[7:]
    with pytest.raises(CorruptedError, match=f"declares {1 << 40} bytes"):
        ZstdCodec().decode(claim, limit_bytes=LIMIT_BYTES)


def several(*contents: bytes) -> bytes:
    """A file of a frame for each content."""
    return b"".join(b"".join(ZstdCodec().encode([content])) for content in contents)


@given(contents=st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_zstd_codec_reads_several_frames(contents: list[bytes]):
    """A file is what its frames hold, one after the other, with skipped ones anywhere."""
    due = b"".join(contents)
    skipped = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc"
    for data in (several(*contents), skipped + several(*contents, b"") + skipped):
        found = ZstdCodec().decode(data, limit_bytes=len(due))
        assert found == due
        assert memoryview(found).readonly


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no zstd frame in 0 bytes"),
        (b"\x5a\x2a\x4d\x18\x00\x00\x00\x00", "no zstd frame in 8 bytes"),
        (several(b"a", b"b") + b"x", "cannot be read"),
        (several(b"a", b"b") + bytes(100), "cannot be read"),
        (several(b"a", b"b")[:-1], "cannot be read: it is cut"),
        (several(b"a") + b"\x5a\x2a\x4d\x18\xff\xff\xff\xff", "a skippable frame ends after"),
        (several(b"a") + b"\x5a\x2a\x4d\x18\xff", "a skippable frame is cut off"),
        (several(b"a") + b"\x28\xb5\x2f\xfd\x20\x01", "a block is missing"),
        (several(b"a") + b"\x28\xb5\x2f\xfd\x20\x01\x07\x00\x00", "block of kind 3"),
        (several(b"a") + b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00", "does not declare its size"),
        (several(b"a" * LIMIT_BYTES, b"b"), f"after {LIMIT_BYTES} bytes zstd frame declares 1"),
        (several(*[b""] * (1 << 16), b"a", b"b"), "more than 65536 zstd frames"),
        (b"\x5a\x2a\x4d\x18\x00\x00\x00\x00" * ((1 << 16) + 2), "more than 65536 zstd frames"),
    ],
)
def test_zstd_codec_rejects_invalid_frames(data: bytes, message: str):
    """What stands between and behind the frames is named, and never passed over."""
    with pytest.raises(CorruptedError, match=message):
        ZstdCodec().decode(data, limit_bytes=LIMIT_BYTES)


def test_zstd_codec_rejects_a_size_that_blocks_cannot_hold():
    """A frame of 17 bytes that says 60 GiB is refused before anything is allocated."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + (60 << 30).to_bytes(8, "little") + b"\x03\x00\x00\x00"
    with pytest.raises(
        CorruptedError, match="declares 64424509440 bytes, its blocks hold 0 at most"
    ):
        ZstdCodec().decode(frame, limit_bytes=1 << 40)


@given(contents=st.lists(st.binary(max_size=99), min_size=1, max_size=3))
def test_stream_gives_all_frames_within_the_limit(contents: list[bytes]):
    packed, whole = several(*contents), b"".join(contents)
    out = io.BytesIO()
    unpack_stream(io.BytesIO(packed), out.write, limit_bytes=len(whole))
    assert out.getvalue() == whole
    if whole:
        with pytest.raises(CorruptedError, match="as many are allowed"):
            unpack_stream(io.BytesIO(packed), out.write, limit_bytes=len(whole) - 1)


def test_stream_detects_flipped_bits():
    packed = bytearray(b"".join(ZstdCodec().encode((COMPRESSIBLE,))))
    packed[-1] ^= 1
    with pytest.raises(CorruptedError, match="damaged"):
        unpack_stream(io.BytesIO(packed), lambda piece: None, limit_bytes=1 << 30)


def test_get_codec_names_known_codecs():
    """An unknown name is refused with the known ones."""
    with pytest.raises(UnsupportedError, match="'lz4'; known: none, zstd"):
        get_codec("lz4")


@pytest.mark.parametrize(
    "pieces", [[b""], [b"x"], [b"head", COMPRESSIBLE], [b"x", bytes(17 << 20)]]
)
def test_zstd_command_unpacks_files_of_the_codec(tmp_path: Path, pieces: list[bytes]):
    """`zstd -d` gives the same bytes, and `zstd -t` finds a checksum to test."""
    command = shutil.which("zstd")
    if command is None and os.environ.get("CI") != "true":
        pytest.skip("no zstd command here")
    assert command is not None
    packed = tmp_path / "a.npy.zst"
    packed.write_bytes(b"".join(ZstdCodec().encode(pieces)))
    subprocess.run([command, "-q", "-d", packed], check=True)
    assert (tmp_path / "a.npy").read_bytes() == b"".join(pieces)
    listed = subprocess.run([command, "-lv", packed], check=True, capture_output=True, text=True)
    assert "XXH64" in listed.stdout


NOISE = random.Random(4).randbytes(4 * SMALL_FILE_BYTES)


@dataclass(frozen=True)
class CountingCodec(ZstdCodec):
    """Zstd that notes how much it was given."""

    sizes: list[int] = field(default_factory=list[int])

    @property
    def seen_bytes(self) -> int:
        return sum(self.sizes)

    def encode(self, parts: Sequence[ByteBuffer]) -> Sequence[ByteBuffer]:
        self.sizes.append(sum(map(len, parts)))
        return super().encode(parts)


@pytest.mark.parametrize(
    ("body", "suffix"),
    [
        (b"", ""),
        (bytes(BLOCK_BYTES - 128), ""),
        (bytes(BLOCK_BYTES - 127), ".zst"),
        (NOISE[: SMALL_FILE_BYTES - 128], ""),
        (NOISE, ""),
        (COMPRESSIBLE, ".zst"),
        (bytes(1 << 20), ".zst"),
        (NOISE + bytes(len(NOISE)), ".zst"),
        (bytes(len(NOISE)) + NOISE, ".zst"),
    ],
    ids=[
        "empty",
        "block",
        "larger",
        "small",
        "noise",
        "text",
        "zeros",
        "noise first",
        "noise last",
    ],
)
def test_pack_file_leaves_incompressible_files_plain(body: bytes, suffix: str):
    """The parts themselves are returned, or packed bytes from which the codec restores them."""
    parts = (b"head".ljust(128), memoryview(body))
    packed = pack_file(ZstdCodec(), parts)
    assert (packed is parts) == (not suffix)
    data = b"".join(packed)
    assert select_codec(f"a.npy{suffix}").decode(data, limit_bytes=1 << 21) == b"".join(parts)
    assert b"".join(pack_file(ZstdCodec(), parts)) == data
    assert pack_file(FileCodec(), parts) is parts


def test_pack_file_of_noise_packs_only_a_sample():
    """Of a large tensor that cannot shrink only a sample is compressed."""
    codec = CountingCodec()
    pack_file(codec, (b"head", NOISE))
    assert codec.seen_bytes == SMALL_FILE_BYTES // 4


def test_pack_file_stores_files_that_do_not_shrink_despite_a_good_sample():
    """The sample decides on the name; the file is larger than its content by a few heads alone."""
    body = bytearray(NOISE)
    last = len(body) - SMALL_FILE_BYTES // 32
    for at in (last * n // 7 for n in range(8)):
        body[at : at + 1024] = bytes(1024)
    codec = CountingCodec()
    plain = (b"head", body)
    packed = pack_file(codec, plain)
    assert packed is not plain
    assert codec.seen_bytes > len(body)
    assert sum(map(len, packed)) <= compute_stored_bytes(map(len, plain))
    assert ZstdCodec().decode(b"".join(packed), limit_bytes=1 << 20) == b"".join(plain)


@pytest.mark.parametrize(
    "body",
    [b"", NOISE[:100], NOISE, COMPRESSIBLE, bytes(1 << 20), bytes(len(NOISE)) + NOISE],
    ids=["empty", "tiny", "noise", "text", "zeros", "noise last"],
)
def test_pack_file_has_the_same_name_and_content_now_and_later(body: bytes):
    """So a file that waits is replaced under its own name, and found again when it is resent."""
    plain = (b"head".ljust(128), memoryview(body))
    now, later = (pack_file(ZstdCodec(), plain, later=later) for later in (False, True))
    assert (now is plain) == (later is plain)
    if later is not plain:
        unpacked = [ZstdCodec().decode(b"".join(f), limit_bytes=1 << 21) for f in (now, later)]
        assert unpacked == [b"".join(plain)] * 2
        assert is_stored_frame(later[0]) == (len(body) > SMALL_FILE_BYTES)
        assert not is_stored_frame(now[0])


def test_pack_file_later_compresses_only_a_sample():
    """That is what it is for."""
    codec = CountingCodec()
    pack_file(codec, (b"head", bytes(1 << 20)), later=True)
    assert codec.seen_bytes == SMALL_FILE_BYTES // 4


@pytest.mark.parametrize("size", [1, 70_000, 3 << 20, (16 << 20) - 128, 17 << 20])
def test_encode_blocks_gives_the_bytes_of_encode(size: int):
    """A file that is packed later is the one that would have been written at first."""
    body = (NOISE + bytes(3 << 18)) * (1 + (size >> 20))
    parts = (b"head".ljust(128), body[:size])
    stored = b"".join(make_stored_frame(parts))
    blocks = iterate_stored_blocks(make_memory_reader(stored), len(stored))
    packed = b"".join(ZstdCodec().encode_blocks(blocks, size + 128))
    assert packed == b"".join(ZstdCodec().encode(parts))


def test_zstd_always_packs_at_once_and_files_of_a_block_too():
    """Otherwise it reads and writes the files of `zstd`."""
    usual, always = get_codec("zstd"), get_codec("zstd-always")
    assert (usual.is_deferrable, always.is_deferrable) == (True, False)
    assert usual.suffix == always.suffix
    assert b"".join(always.encode([COMPRESSIBLE])) == FRAME
    small = (b"head".ljust(128), NOISE[:100])
    assert pack_file(usual, small) is small
    assert list(pack_file(always, small)) == list(always.encode(small))

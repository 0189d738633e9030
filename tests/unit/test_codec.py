"""Both codecs keep the laws; zstd also finds damage and is readable by the zstd command."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suites.codec_laws import COMPRESSIBLE, CodecLaws

from rankdump.codec import CODECS, NoneCodec, ZstdCodec, codec_named
from rankdump.contract.errors import DamagedError, UnsupportedError

LIMIT_BYTES = 1 << 20
FRAME = b"".join(ZstdCodec().encode([COMPRESSIBLE]))


class TestNone(CodecLaws):
    codec = NoneCodec()

    def test_copies_nothing(self):
        """The parts themselves are handed on."""
        pieces = [b"a", memoryview(b"b")]
        assert self.codec.encode(pieces) is pieces


class TestZstd(CodecLaws):
    codec = ZstdCodec()


class TestZstdLevel9(CodecLaws):
    codec = ZstdCodec(level=9)

    def test_is_registered(self):
        """The level is the writer's own: any reader of the suffix unpacks it."""
        packed = self.encoded(COMPRESSIBLE)
        assert CODECS["zstd"].decode(packed, limit_bytes=LIMIT_BYTES) == COMPRESSIBLE
        assert len(packed) <= len(FRAME)


def test_compresses():
    """Repetition costs next to nothing."""
    assert len(FRAME) * 100 < len(COMPRESSIBLE)


def test_truncated():
    """No prefix of a frame is taken for the frame."""
    for length in range(len(FRAME)):
        with pytest.raises(DamagedError):
            ZstdCodec().decode(FRAME[:length], limit_bytes=LIMIT_BYTES)


def test_flipped_bits():
    """Every single flipped bit is refused or harmless: other bytes never come out."""
    refused = 0
    for index in range(len(FRAME)):
        for bit in range(8):
            damaged = bytearray(FRAME)
            damaged[index] ^= 1 << bit
            try:
                found = ZstdCodec().decode(bytes(damaged), limit_bytes=LIMIT_BYTES)
            except DamagedError:
                refused += 1
            else:
                assert found == COMPRESSIBLE
    assert refused > 0.9 * 8 * len(FRAME)


@given(data=st.binary(max_size=200))
def test_random_bytes(data: bytes):
    """Random bytes are damage and nothing worse."""
    for prefix in (b"", FRAME[:4], FRAME[:6]):
        with pytest.raises(DamagedError):
            ZstdCodec().decode(prefix + data, limit_bytes=LIMIT_BYTES)


def test_a_claim_is_not_an_allocation():
    """A frame that declares 2**40 bytes is refused by its declaration."""
    claim = b"\x28\xb5\x2f\xfd" + bytes([0b11100100]) + struct.pack("<Q", 1 << 40) + FRAME[7:]
    with pytest.raises(DamagedError, match=f"declares {1 << 40} bytes"):
        ZstdCodec().decode(claim, limit_bytes=LIMIT_BYTES)


def test_unknown_codec():
    """An unknown name is refused with the known ones."""
    with pytest.raises(UnsupportedError, match="'lz4'; known: none, zstd"):
        codec_named("lz4")


@pytest.mark.parametrize("pieces", [[b""], [b"x"], [b"head", COMPRESSIBLE], [bytes(1 << 21)]])
def test_zstd_command(tmp_path: Path, pieces: list[bytes]):
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

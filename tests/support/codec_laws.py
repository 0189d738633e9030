"""Laws of every codec: the same bytes back, from any thread, or an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankdump._codec.file_codec import CODECS, FileCodec, get_codec, select_codec
from rankdump.errors import CorruptedError

# Every codec runs the one inherited test; examples hold for each of them.
inherited = settings(suppress_health_check=[HealthCheck.differing_executors])
parts = st.lists(st.binary(max_size=2000), max_size=5)
COMPRESSIBLE = b"rankdump " * 5000


class CodecLaws:
    """Derive, and set the codec under test."""

    codec: FileCodec

    def encoded(self, *pieces: bytes) -> bytes:
        """Return a file's bytes as they would lie on disk."""
        return b"".join(self.codec.encode(pieces))

    def test_is_registered(self):
        """The codec is found by its name and by its suffix."""
        assert CODECS[self.codec.name] == self.codec
        assert get_codec(self.codec.name) == self.codec
        assert select_codec(f"a.npy{self.codec.suffix}") == self.codec

    @inherited
    @given(pieces=parts)
    def test_round_trip(self, pieces: list[bytes]):
        """Parts come back joined, whatever they were."""
        whole = b"".join(pieces)
        assert self.codec.decode(self.encoded(*pieces), limit_bytes=len(whole)) == whole

    @pytest.mark.parametrize("size", [0, 1, 127, 128, 129, (1 << 17) - 1, 1 << 17, (1 << 20) + 3])
    def test_sizes(self, size: int):
        """Sizes around the borders of blocks come back whole, compressible or not."""
        for whole in (bytes(size), (bytes(range(251)) * (size // 251 + 1))[:size]):
            assert self.codec.decode(self.encoded(whole), limit_bytes=size) == whole

    @inherited
    @given(pieces=parts)
    def test_same_bytes_every_time(self, pieces: list[bytes]):
        """Encoding is a function: equal parts make equal files, so links can be for copies."""
        assert self.encoded(*pieces) == self.encoded(*pieces)

    def test_takes_any_buffer(self):
        """Parts may be views; they are not changed."""
        source = bytearray(COMPRESSIBLE)
        packed = b"".join(self.codec.encode([memoryview(source)[:100], b"", source[100:]]))
        assert self.codec.decode(memoryview(packed), limit_bytes=len(source)) == COMPRESSIBLE
        assert source == COMPRESSIBLE

    def test_limit(self):
        """One byte over the limit is rejected, with both numbers."""
        packed = self.encoded(COMPRESSIBLE)
        size = len(COMPRESSIBLE)
        assert self.codec.decode(packed, limit_bytes=size) == COMPRESSIBLE
        with pytest.raises(CorruptedError, match=f"{size} bytes, at most {size - 1} are allowed"):
            self.codec.decode(packed, limit_bytes=size - 1)

    def test_threads(self):
        """Several threads at once do not mix their bytes."""
        pieces = [bytes([n]) * (50_000 + n) + COMPRESSIBLE[:n] for n in range(64)]

        def there_and_back(piece: bytes) -> bool:
            packed = self.encoded(piece[:1000], piece[1000:])
            return self.codec.decode(packed, limit_bytes=len(piece)) == piece

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(there_and_back, pieces * 4))

"""From elements to the bytes of a file."""

from __future__ import annotations

import io

import numpy as np
import pytest
import xxhash

from rankdump.codec import codec_named
from rankdumpd.agent.encode import encode
from rankdumpd.agent.values import Parcel, Ticket


@pytest.mark.parametrize("codec_name", ["none", "zstd"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(True),
        np.zeros((0, 3), dtype=np.complex64),
        np.arange(5, dtype=np.int8),
    ],
    ids=str,
)
def test_numpy_loads_what_was_sent(make_head, codec_name, array):
    """Unpacked, the file is what numpy loads as the very array; its digest is of the elements."""
    data = array.tobytes()
    head = make_head(dtype=array.dtype.name, shape=array.shape, byte_count=len(data))
    codec = codec_named(codec_name)
    encoded = encode(Parcel(Ticket("s", 1), head, memoryview(data)), codec)
    packed = b"".join(encoded.parts)
    assert encoded.bytes_stored == len(packed)
    assert encoded.digest == xxhash.xxh3_128_hexdigest(data)
    loaded = np.load(io.BytesIO(codec.decode(packed, limit_bytes=1 << 20)))
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
    assert loaded.tobytes() == data

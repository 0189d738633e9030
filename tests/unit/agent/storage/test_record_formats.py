"""Tests of npy encoding, and of statistics of received elements."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
import xxhash

from rankdump._codec.file_codec import ZstdCodec, get_codec, pack_file
from rankdumpd.agent.records import FrameId, ReceivedRecord
from rankdumpd.agent.storage.record_formats import encode_npy, examine_record


@pytest.mark.parametrize("codec_name", ["none", "zstd"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(True),
        np.zeros((0, 3), dtype=np.complex64),
        np.arange(5, dtype=np.int8),
        np.random.default_rng(4).integers(0, 256, 1 << 17, dtype=np.uint8),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{value.shape}",
)
def test_npy_file_is_loaded_by_numpy(make_head, codec_name, array):
    """numpy loads the unpacked file as the same array; the digest is that of its elements."""
    data = array.tobytes()
    head = make_head(dtype=array.dtype.name, shape=array.shape, byte_count=len(data))
    received = ReceivedRecord(FrameId("s", 1), head, memoryview(data))
    record, codec = examine_record(received, None), get_codec(codec_name)
    plain = encode_npy(record)
    parts = pack_file(codec, plain)
    assert record.digest == xxhash.xxh3_128_hexdigest(data)
    data_of_file = b"".join(parts)
    if parts is not plain:
        data_of_file = codec.decode(data_of_file, limit_bytes=1 << 20)
    loaded = np.load(io.BytesIO(data_of_file))
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
    assert loaded.tobytes() == data
    assert record.statistics is None


@pytest.mark.parametrize(
    ("array", "figures"),
    [
        (np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32), ("6", "1", "9.53939", "6")),
        (np.array([True, False]), ("1", "0", "1", "2")),
        (np.array([1.0, np.nan, np.inf], dtype=np.float64), ("nan", "nan", "nan", "3")),
        (np.array(-7, dtype=np.int8), ("-7", "-7", "7", "1")),
        (np.zeros((0, 3), dtype=np.float32), None),
        (np.ones(2, dtype=np.complex64), None),
    ],
    ids=str,
)
def test_statistics_are_computed_from_received_elements(make_head, array, figures):
    """A tensor without statistics has a file and no row."""
    data = array.tobytes()
    head = make_head(dtype=array.dtype.name, shape=array.shape, byte_count=len(data))
    received = ReceivedRecord(FrameId("s", 1), head, memoryview(data))
    record = examine_record(received, ("max", "min", "l2norm", "count"))
    assert record.statistics == figures
    assert pack_file(ZstdCodec(), encode_npy(record))


def test_md5_statistic_of_bfloat16_covers_its_own_bytes(make_head):
    """The md5 of bfloat16 is over two bytes an element, whatever the file holds."""
    data = bytes.fromhex("803f0040")
    head = make_head(dtype="bfloat16", shape=(2,), byte_count=4)
    received = ReceivedRecord(FrameId("s", 1), head, memoryview(data))
    record = examine_record(received, ("max", "md5"))
    assert record.statistics == ("2", hashlib.md5(data, usedforsecurity=False).hexdigest())

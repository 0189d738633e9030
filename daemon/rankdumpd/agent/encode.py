"""A parcel to its digest and figures, and to the bytes of its file. No clock, disk or network."""

from __future__ import annotations

import xxhash

from rankdump.codec import Codec
from rankdump.codec.packing import pack, pack_each
from rankdump.contract import dtypes, npy, statistics
from rankdump.contract.exchange import RecordHead
from rankdump.contract.layout.layouts import Layout
from rankdumpd.agent.binhead import bin_head
from rankdumpd.agent.members import BinTensor
from rankdumpd.agent.values import Encoded, Examined, Parcel


def examine(
    parcel: Parcel, data: memoryview, items: tuple[str, ...] | None, *, exact: bool = False
) -> Examined:
    """Return what a parcel's elements say: their digest, and the figures that `items` names.

    `items` is None for no figures; with `exact` these have all their digits.
    """
    digest = xxhash.xxh3_128_hexdigest(data)
    return Examined(parcel.ticket, parcel.head, digest, _figures(parcel.head, data, items, exact))


def is_corrupted(parcel: Parcel, record: Examined) -> bool:
    """Return whether the elements are not those that the rank sent; `record` is they, examined."""
    return bool(parcel.checksum) and parcel.checksum.hex() != record.digest


def encode(record: Examined, data: memoryview, codec: Codec) -> Encoded:
    """Return a record with its elements as an npy file, packed where the codec makes it smaller.

    Safe to call from several threads.
    """
    head = record.head
    header = npy.header(dtypes.element_type(head.kind.dtype).descr, head.kind.shape)
    packed = pack(codec, (header, dtypes.as_stored(head.kind.dtype, data)))
    return Encoded(record, packed.suffix, packed.parts)


def encode_bin(record: Examined, data: memoryview, codec: Codec, layout: Layout) -> Encoded:
    """Return a record as a `bin` file of its own: its elements as the framework held them."""
    kind = record.head.kind
    tensor = BinTensor(kind.side, kind.slot, kind.dtype, kind.shape, kind.byte_count)
    header = bin_head(kind.op_name, record.head.timestamp_us, (tensor,), layout)
    start = pack_each(codec, (header,))
    elements = pack_each(codec, (data,))
    parts = (*start.parts, *elements.parts)
    return Encoded(record, start.suffix, parts, head_bytes=sum(map(len, start.parts)))


def _figures(
    head: RecordHead, data: memoryview, items: tuple[str, ...] | None, exact: bool
) -> tuple[str, ...] | None:
    # MindSpore writes no row for a tensor without elements or with complex ones (3.5).
    if items is None or not head.byte_count or not statistics.countable(head.kind.dtype):
        return None
    return statistics.figures(items, head.kind.dtype, data, exact=exact)

"""A parcel to the bytes of its file, its digest and its figures. No clock, disk or network."""

from __future__ import annotations

import xxhash

from rankdump.codec import Codec
from rankdump.contract import dtypes, npy, statistics
from rankdumpd.agent.values import Encoded, Parcel


def encode(parcel: Parcel, codec: Codec, items: tuple[str, ...] | None) -> Encoded:
    """Return the parcel as an npy file packed by the codec; safe to call from several threads.

    `items` are the figures to compute, None for none. A parcel that brings its figures with it
    has no file.
    """
    head = parcel.head
    if head.figures is not None:
        return Encoded(parcel.ticket, head, "", "", (), 0, head.figures)
    kind = dtypes.element_type(head.dtype)
    header = npy.header(kind.descr, head.shape)
    parts = codec.encode((header, dtypes.as_stored(head.dtype, parcel.data)))
    return Encoded(
        ticket=parcel.ticket,
        head=head,
        digest=xxhash.xxh3_128_hexdigest(parcel.data),
        suffix=codec.suffix,
        parts=parts,
        bytes_stored=sum(map(len, parts)),
        figures=_figures(parcel, items),
    )


def _figures(parcel: Parcel, items: tuple[str, ...] | None) -> tuple[str, ...] | None:
    head = parcel.head
    # MindSpore writes no row for a tensor without elements or with complex ones (3.5).
    if items is None or not head.byte_count or not statistics.countable(head.dtype):
        return None
    return statistics.figures(items, head.dtype, parcel.data)

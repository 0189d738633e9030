"""A parcel to the bytes of its file, with the digest of its elements. No clock, disk or network."""

from __future__ import annotations

import xxhash

from rankdump.codec import Codec
from rankdump.contract import dtypes, npy
from rankdumpd.agent.values import Encoded, Parcel


def encode(parcel: Parcel, codec: Codec) -> Encoded:
    """Return the parcel as an npy file packed by the codec; safe to call from several threads."""
    head = parcel.head
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
    )

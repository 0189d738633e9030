"""What a file holds, by its name and its bytes; DamagedError when these do not agree. Pure.

Never unpickles, and believes no size before it has checked it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import xxhash

from rankdump.contract import npy
from rankdump.contract.dump_types import DATA_TYPES
from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.file_name import numbered
from rankdump.dumpdata import BinFile, Payload, parse
from rankdumpd.ingest.values import PACKED_SUFFIX, Content, Kind, Member

_SMALL_BYTES = 1 << 20
_STRAY_BYTES = 8
"""Most that stands behind an empty tensor: one element (mindspore-observed.md 2.6)."""
_BFLOAT16 = re.compile(rb"('descr': *')<[ETh]2'")
"""How MindSpore names a type that numpy does not know: `<h2` in 2.2, `<T2` in 2.3, then `<E2`."""


def kind_of(name: str) -> Kind:
    """Return what a file of that name is taken as."""
    if name.endswith(".npy"):
        return Kind.NPY
    if name.endswith(PACKED_SUFFIX):
        return Kind.PACKED
    return Kind.BIN if numbered(name) else Kind.PLAIN


def examine(name: str, data: memoryview) -> Content:
    """Return what a whole file holds."""
    kind = kind_of(name)
    if kind is Kind.NPY:
        return _npy(data)
    if kind is Kind.BIN:
        return _bin(data)
    return Content(kind, xxhash.xxh3_128_hexdigest(data), (data,))


def _npy(data: memoryview) -> Content:
    start, renamed = bytes(data[:_SMALL_BYTES]), 0
    if start.startswith(b"\x93NUMPY"):
        end = 10 + int.from_bytes(start[8:10], "little")
        head, renamed = _BFLOAT16.subn(rb"\1<u2'", start[:end], count=1)
        start = head + start[end:]
    header = npy.parse_header(start)
    try:
        expected = header.data_bytes
        dtype = "bfloat16" if renamed else str(np.dtype(header.descr))
    except TypeError as error:  # a type string that looks right and is none, such as `<f3`
        raise DamagedError(f"npy header: {error}") from None
    elements = data[header.data_offset :]
    if expected == 0 and len(elements) <= _STRAY_BYTES:
        elements = elements[:0]
    if len(elements) != expected:
        raise DamagedError(
            f"npy file with {len(elements)} bytes of elements, its header says {expected}"
        )
    member = Member(
        name="",
        op_name="",
        dtype=dtype,
        shape=header.shape,
        bytes_in=expected,
        digest=xxhash.xxh3_128_hexdigest(elements),
    )
    return Content(Kind.NPY, xxhash.xxh3_128_hexdigest(data), (data,), (member,))


def _bin(data: memoryview) -> Content:
    found = parse(data)
    first = found.payloads[0].offset if found.payloads else len(data)
    frames = [data[:first], *(found.bytes_of(payload) for payload in found.payloads)]
    # What stands behind the last payload nobody reads, but it is the source's.
    frames.append(data[sum(map(len, frames)) :])
    return Content(
        Kind.BIN,
        xxhash.xxh3_128_hexdigest(data),
        [frame for frame in frames if len(frame)],
        tuple(_members(found)),
    )


def _members(found: BinFile) -> Iterator[Member]:
    for payload in found.payloads:
        if payload.kind in ("input", "output") and not _placeholder(payload):
            part = payload.part
            shape = getattr(part, "shape", None)
            number: int = getattr(part, "data_type", 0)
            known = DATA_TYPES.get(number)
            yield Member(
                name=f"{payload.kind}.{payload.index}",
                op_name=found.header.op_name,
                dtype=(known.element or known.name) if known else str(number),
                shape=tuple(shape.dim) if shape else (),
                bytes_in=part.size,
                digest=xxhash.xxh3_128_hexdigest(found.bytes_of(payload)),
            )


def _placeholder(payload: Payload) -> bool:
    """Return whether it only keeps the slot of a tensor that was not dumped."""
    part = payload.part
    return not (part.size or getattr(part, "data_type", 0) or getattr(part, "shape", None))

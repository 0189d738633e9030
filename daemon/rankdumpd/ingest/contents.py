"""What a file holds, by its name and its bytes; DamagedError when these do not agree. Pure.

Never unpickles, and believes no size before it has checked it.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from rankdump.contract.dump_types import DATA_TYPES
from rankdump.contract.dumpdata import OpInput, OpOutput
from rankdump.contract.layout.file_name import PACKED, numbered
from rankdump.contract.npy_forms import form_of
from rankdump.dumpdata import BinFile, parse
from rankdumpd.ingest.values import Content, Kind, Member


def kind_of(name: str) -> Kind:
    """Return what a file of that name is taken as."""
    if name.endswith(".npy"):
        return Kind.NPY
    if name.endswith(PACKED):
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
    form = form_of(data)
    elements = data[form.header.data_offset : form.end]
    member = Member(
        name="",
        op_name="",
        dtype=form.dtype,
        shape=form.header.shape,
        bytes_in=len(elements),
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
        part = payload.part
        if isinstance(part, OpInput | OpOutput) and not part.placeholder:
            known = DATA_TYPES.get(part.data_type)
            yield Member(
                name=f"{payload.kind}.{payload.index}",
                op_name=found.header.op_name,
                dtype=(known.element or known.name) if known else str(part.data_type),
                shape=part.shape.dim if part.shape else (),
                bytes_in=part.size,
                digest=xxhash.xxh3_128_hexdigest(found.bytes_of(payload)),
            )

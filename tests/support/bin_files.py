"""Headers of bin files as hypothesis strategies, and files made from them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rankdump._binfile import header as values
from rankdump._binfile.bin_file import parse_bin_file, serialize_bin_head
from rankdump._codec.file_codec import ZstdCodec

GOLDEN = bytes.fromhex(
    "3b000000000000000a03322e3010a58294bb95d0ee021a10080110021a030a010230083a030a0102"
    "2210080110021a030a0102280832030a010232076e65742f4164640000803f000000400000404000008040"
)
"""Header of the operator `net/Add`, one FLOAT input [1, 2], one FLOAT output [3, 4]."""

uint64 = st.integers(0, (1 << 64) - 1) | st.integers(0, 9)
uint32 = st.integers(0, (1 << 32) - 1)
enums = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 60)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
sizes = st.integers(0, 40)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@st.composite
def unknown_fields(draw) -> bytes:
    """Return fields that no description here knows, of every wire type but groups."""
    out = b""
    for number in sorted(draw(st.sets(st.integers(100, 1 << 28), max_size=2))):
        wire = draw(st.sampled_from([0, 1, 2, 5]))
        body = draw(st.binary(min_size=8, max_size=8))
        tail = {0: _varint(draw(uint64)), 1: body, 2: b"\x08" + body, 5: body[:4]}[wire]
        out += _varint(number << 3 | wire) + tail
    return out


extras = unknown_fields()
shapes = st.none() | st.builds(values.Shape, st.lists(uint64, max_size=5).map(tuple), extra=extras)
inputs = st.builds(
    values.OpInput,
    data_type=enums,
    format=enums,
    shape=shapes,
    size=sizes,
    original_shape=shapes,
    sub_format=enums,
    address=uint64,
    offset=uint64,
    arg_index=uint32,
    input_type=uint32,
    extra=extras,
)
outputs = st.builds(
    values.OpOutput,
    data_type=enums,
    format=enums,
    shape=shapes,
    original_op=st.none() | st.builds(values.OriginalOp, texts, uint32, enums, enums, extras),
    data=st.binary(max_size=5),
    size=sizes,
    original_shape=shapes,
    sub_format=enums,
    address=uint64,
    dim_range=st.lists(st.builds(values.DimRange, uint64, uint64, extras), max_size=2).map(tuple),
    offset=uint64,
    extra=extras,
)


def _several(made):
    return st.lists(made, max_size=3).map(tuple)


headers = st.builds(
    values.DumpData,
    version=texts.filter(bool),  # or nothing at all would be in it
    dump_time=uint64,
    output=_several(outputs),
    input=_several(inputs),
    buffer=_several(st.builds(values.OpBuffer, enums, st.binary(max_size=5), sizes, extras)),
    op_name=texts,
    attr=_several(st.builds(values.OpAttr, texts, texts, extras)),
    space=_several(st.builds(values.Workspace, enums, st.just(b""), sizes, extras)),
    dfx_message=texts,
    extra=extras,
)


def file_of(header: values.DumpData, payloads: list[bytes]) -> bytes:
    """Return a plain file."""
    return serialize_bin_head(header) + b"".join(payloads)


def packed_file_of(plain: bytes) -> bytes:
    """Return a plain file as the agent packs it: a frame for the header, one for each payload."""
    found = parse_bin_file(memoryview(plain))
    first = plain[: found.payloads[0].offset if found.payloads else len(plain)]
    parts = [first, *(bytes(found.read_payload(p)) for p in found.payloads if p.part.size)]
    return b"".join(b"".join(ZstdCodec().encode([part])) for part in parts)


def operator(*payloads: bytes, **changes) -> bytes:
    """Return a file of one operator with one UINT8 output per payload."""
    output = tuple(
        values.OpOutput(4, 2, values.Shape((len(each),)), size=len(each)) for each in payloads
    )
    header = replace(values.DumpData(output=output, op_name="a/b"), **changes)
    return file_of(header, list(payloads))

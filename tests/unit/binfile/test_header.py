"""Headers of bin files: written and read back, with fields of newer releases."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.bin_files import GOLDEN, headers

from rankdump._binfile.bin_file import parse_bin_file, serialize_bin_head
from rankdump._binfile.header import (
    MAX_HEADER_FIELDS,
    parse_bin_header,
    serialize_bin_header,
)
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, OriginalOp, Shape
from rankdump.errors import CorruptedError

GOLDEN_HEADER = DumpData(
    dump_time=1612439563338021,
    output=(OpOutput(1, 2, Shape((2,)), size=8, original_shape=Shape((2,))),),
    input=(OpInput(1, 2, Shape((2,)), size=8, original_shape=Shape((2,))),),
    op_name="net/Add",
)


def test_bin_header_equals_the_golden_file():
    """The reference's file, byte for byte, both ways."""
    found = parse_bin_file(memoryview(GOLDEN))
    assert found.header == GOLDEN_HEADER
    assert serialize_bin_head(GOLDEN_HEADER) == GOLDEN[:67]
    first, second = found.payloads
    assert (first.kind, first.index, first.offset, first.end) == ("input", 0, 67, 75)
    assert (second.kind, second.index, second.offset, second.end) == ("output", 0, 75, 83)
    assert bytes(found.read_payload(first)) == bytes.fromhex("0000803f00000040")
    assert bytes(found.read_payload(second)) == bytes.fromhex("0000404000008040")


@given(header=headers)
def test_bin_header_round_trip(header: DumpData):
    """Written and read a header is itself; read and written again so are its bytes."""
    written = serialize_bin_header(header)
    read = parse_bin_header(written)
    assert read == header
    assert serialize_bin_header(read) == written


def test_bin_header_keeps_unknown_fields_at_every_level():
    """A newer release's fields and numbers stay where they were, at every level."""
    later = bytes([0xA0, 0x06, 0x07])  # field 100, varint 7
    header = DumpData(
        output=(
            OpOutput(
                99, -5, Shape((2,), later), OriginalOp("x", 1, 88, 77, later), extra=later * 2
            ),
        ),
        input=(OpInput(1 << 30, extra=later),),
        extra=later,
    )
    assert parse_bin_header(serialize_bin_header(header)) == header


def test_bin_header_keeps_fields_of_another_wire_type():
    """A field with a known number and another wire type is unknown, and kept as well."""
    as_text = bytes([0x12, 0x01, 0x41])  # dump_time, as bytes
    assert parse_bin_header(as_text).extra == as_text
    assert serialize_bin_header(parse_bin_header(as_text)) == as_text


@pytest.mark.parametrize(
    "data",
    [
        b"\x22\x00" * (MAX_HEADER_FIELDS + 1),  # inputs
        b"\x1a\xc0\x9a\x0c"
        + b"\x52\x00" * 100_000
        + b"\x1a\x00" * MAX_HEADER_FIELDS,  # ranges, outputs
        b"\x1a\x84\x80\x20\x1a\x81\x80\x20\x0a\xfe\xff\x1f"
        + b"\1" * (MAX_HEADER_FIELDS * 2),  # extents
        b"\xa3\x06" + b"\x22\x00" * (MAX_HEADER_FIELDS + 1) + b"\xa4\x06",  # inside a group
    ],
    ids=["inputs", "ranges", "extents", "group"],
)
def test_bin_header_with_too_many_fields_is_rejected(data: bytes):
    """A header with very many fields is rejected before it is parsed."""
    with pytest.raises(CorruptedError, match=f"more than {MAX_HEADER_FIELDS} fields"):
        parse_bin_header(data)


def test_bin_header_of_a_large_operator_is_accepted():
    """A thousand tensors and a long log are within the limits."""
    header = DumpData(
        input=tuple(OpInput(1, 2, Shape((n, 2, 3, 4)), size=96 * n) for n in range(3000)),
        dfx_message="a line of the log\n" * 100_000,
    )
    assert parse_bin_header(serialize_bin_header(header)) == header

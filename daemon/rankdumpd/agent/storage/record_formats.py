"""File formats of a record: digest and statistics of its elements, npy files, `bin` files with
their header, and the join of an operator's `bin` files into one.

Encoding is pure. A join copies elements as they are stored, compressed or not. A crash between any
two steps leaves either the operator's file or the tensors' files complete, and repeating the join
has the same result.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import xxhash

from rankdump._binfile.bin_file import HEADER_LENGTH_BYTES
from rankdump._binfile.header import serialize_bin_header
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, Shape
from rankdump._codec.file_codec import FileCodec, pack_part
from rankdump._codec.zstd_frames import ByteBuffer
from rankdump._core import element_types, npy_format, statistics, tensor_fingerprint
from rankdump._core.cann_types import DATA_TYPE_NUMBERS, FORMAT_NUMBERS
from rankdump._core.record import TensorKind, TensorSide
from rankdump._layout.tree_layouts import Layout
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import (
    BinTensor,
    FileTail,
    JoinedMember,
    OperatorMember,
    ReceivedRecord,
    load_elements,
)
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles

MAX_SLOTS = 1 << 14
"""Limit of slots, because a header has an item for every slot below the highest one."""
_MAX_REMEMBERED_SLOTS = 1 << 8
# About 5 MB, of the 100 MB that an idle agent may take.
_MAX_REMEMBERED_HEADERS = 1 << 13
_Part = TypeVar("_Part", OpInput, OpOutput)


def make_bin_header(
    op_name: str, timestamp_us: int, tensors: Sequence[BinTensor], layout: Layout
) -> bytes:
    """Return the length of the header and the header; lower slots without a tensor get
    placeholders.
    """
    if len(tensors) == 1 and tensors[0].slot < _MAX_REMEMBERED_SLOTS:
        described = _describe_one_tensor(op_name, tensors[0], layout)
    else:
        described = _describe_tensors(op_name, tensors, layout)
    # The concatenation of protobuf messages is one message, and `dump_time` precedes the other
    # fields.
    body = serialize_bin_header(DumpData(dump_time=timestamp_us)) + described
    return len(body).to_bytes(HEADER_LENGTH_BYTES, "little") + body


@lru_cache(maxsize=_MAX_REMEMBERED_HEADERS)
def _describe_one_tensor(op_name: str, tensor: BinTensor, layout: Layout) -> bytes:
    """Return the part of a header that is the same in every iteration."""
    return _describe_tensors(op_name, (tensor,), layout)


def _describe_tensors(op_name: str, tensors: Iterable[BinTensor], layout: Layout) -> bytes:
    sides: dict[TensorSide, dict[int, BinTensor]] = {side: {} for side in TensorSide}
    for tensor in tensors:
        sides[tensor.side][tensor.slot] = tensor
    header = DumpData(
        version="",
        op_name=op_name,
        input=_make_parts(OpInput, sides[TensorSide.INPUT], layout),
        output=_make_parts(OpOutput, sides[TensorSide.OUTPUT], layout),
    )
    return serialize_bin_header(header)


def _make_parts(
    kind: type[_Part], tensors: dict[int, BinTensor], layout: Layout
) -> tuple[_Part, ...]:
    slots = range(max(tensors, default=-1) + 1)
    placeholder = kind()
    return tuple(
        _make_part(kind, tensors[slot], layout) if slot in tensors else placeholder
        for slot in slots
    )


def _make_part(kind: type[_Part], tensor: BinTensor, layout: Layout) -> _Part:
    shape = Shape(tensor.shape)
    return kind(
        data_type=DATA_TYPE_NUMBERS.get(tensor.dtype, 0),
        format=FORMAT_NUMBERS[layout.tensor_format(tensor.shape)],
        shape=shape,
        size=tensor.byte_count,
        original_shape=shape,
    )


def examine_record(
    record: ReceivedRecord,
    items: tuple[str, ...] | None,
    *,
    exact: bool = False,
    fingerprints: bool = False,
) -> ReceivedRecord:
    """Return a record with its elements in memory, their digest, and the statistics `items`.

    `items` is None for no statistics; with `exact` the statistics have all their digits. With
    `fingerprints` the record has its fingerprint as well. CorruptedError when the elements differ
    from those that the rank sent, or when the file that has them was truncated.
    """
    frame_id, head, elements, checksum, *_ = record
    data = load_elements(elements)
    digest = xxhash.xxh3_128_hexdigest(data)
    if checksum and checksum.hex() != digest:
        raise CorruptedError(f"frame {frame_id.sequence} differs from what its rank sent")
    # MindSpore 2.3 writes no row for a tensor without elements or with complex elements.
    if items is not None and not (head.byte_count and statistics.has_statistics(head.kind.dtype)):
        items = None
    texts, fingerprint = None, b""
    if fingerprints:
        texts, fingerprint = _measure_with_fingerprint(head.kind, data, items, exact)
    elif items is not None:
        texts = statistics.compute_statistic_texts(items, head.kind.dtype, data, exact=exact)
    return ReceivedRecord(frame_id, head, data, checksum, digest, texts, fingerprint)


def encode_npy(record: ReceivedRecord) -> tuple[ByteBuffer, ByteBuffer]:
    """Return header and elements of a record's npy file, uncompressed."""
    kind = record.head.kind
    descr = element_types.get_element_type(kind.dtype).descr
    return (
        npy_format.format_npy_header(descr, kind.shape),
        element_types.convert_to_stored(kind.dtype, load_elements(record.data)),
    )


def encode_bin(record: ReceivedRecord, layout: Layout) -> tuple[ByteBuffer, ByteBuffer]:
    """Return header and elements of a record's own `bin` file, uncompressed.

    The elements stay as the framework had them.
    """
    kind = record.head.kind
    tensor = BinTensor(kind.side, kind.slot, kind.dtype, kind.shape, kind.byte_count)
    header = make_bin_header(kind.op_name, record.head.timestamp_us, (tensor,), layout)
    return header, load_elements(record.data)


def _measure_with_fingerprint(
    kind: TensorKind, data: memoryview, items: tuple[str, ...] | None, exact: bool
) -> tuple[tuple[str, ...] | None, bytes]:
    placement = tensor_fingerprint.place_fingerprint(kind.dtype, kind.shape, kind.layout)
    found = tensor_fingerprint.measure_with_fingerprint(
        items or (), kind.dtype, data, placement, exact=exact
    )
    if items is None:
        return None, found.fingerprint
    return tuple(found.statistics.split(",")) if items else (), found.fingerprint


class BinFileJoiner:
    """Joins the `bin` files of operators in one session; not for use from several threads."""

    def __init__(
        self, tree: DumpTree, names: MappingFiles, codec: FileCodec, layout: Layout
    ) -> None:
        self._tree, self._names = tree, names
        self._codec, self._layout = codec, layout

    def join(self, members: Sequence[OperatorMember], *, mark: str) -> list[JoinedMember]:
        """Write the file of an operator, or raise an OSError and change nothing.

        The tensors' own files stay until `remove`; if the operator has only one tensor, its file is
        renamed.
        """
        first = members[0]
        if len({(each.tensor.side, each.tensor.slot) for each in members}) < len(members):
            raise OSError(errno.EEXIST, "an operator with two tensors in one slot")
        self._names.write_mapping(first.whole)
        if len(members) == 1:
            self._tree.move(first.path, first.whole.name)
            return [JoinedMember(first.sequence, first.bytes_stored)]
        # Inputs come first, each side in the order of slots.
        ordered = sorted(
            members, key=lambda each: (each.tensor.side is TensorSide.OUTPUT, each.tensor.slot)
        )
        tensors = [each.tensor for each in ordered]
        header = make_bin_header(first.op_name, first.timestamp_us, tensors, self._layout)
        head = b"".join(pack_part(self._codec, header))
        pieces = [
            FileTail(each.path, each.head_bytes, each.bytes_stored - each.head_bytes)
            for each in ordered
        ]
        self._tree.join(first.whole.folder, first.whole.name, head, pieces, mark=mark)
        shares = [piece.length for piece in pieces]
        shares[0] += len(head)
        return [
            JoinedMember(each.sequence, share) for each, share in zip(ordered, shares, strict=True)
        ]

    def remove(self, members: Iterable[OperatorMember]) -> None:
        """Remove the separate files of tensors that are in their operators' files."""
        self._tree.remove(each.path for each in members if each.path != each.whole.path)

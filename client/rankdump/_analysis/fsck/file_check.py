"""Check of the bytes of one file against the records of its manifest: header, shape, element type,
packing and digest. Pure: it gets the bytes of the file as an argument.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from rankdump._analysis.fsck.damage import FileCheck, FileCheckResult
from rankdump._analysis.fsck.tree_scan import NPY_FILE_NAME
from rankdump._analysis.reader.tree_walk import is_packed_later
from rankdump._binfile import bin_file
from rankdump._binfile.bin_file import BinFile
from rankdump._binfile.header_parts import DumpData, OpInput, OpOutput, Shape
from rankdump._codec.file_codec import select_codec
from rankdump._codec.zstd_frames import (
    ByteBuffer,
    iterate_zstd_frames,
    make_memory_reader,
    make_stored_frame,
)
from rankdump._core import npy_format
from rankdump._core.cann_types import DATA_TYPE_NUMBERS, FORMAT_NUMBERS
from rankdump._core.element_types import ELEMENT_TYPES, convert_from_stored
from rankdump._core.manifest import ManifestRecord
from rankdump._core.npy_format import NpyFileForm, read_npy_form
from rankdump._core.record import TensorSide
from rankdump._layout.tree_layouts import LAYOUTS, Layout
from rankdump.errors import CorruptedError

_OperatorPart = TypeVar("_OperatorPart", OpInput, OpOutput)

_MAX_HEADER_BYTES = 4096
_MAX_BIN_HEADER_BYTES = 16 << 20
"""Largest size of a header, which describes every slot up to the last one."""
_MAX_FOREIGN_BYTES = 64 << 30
_DESCR_FIELD = re.compile(rb"'descr': *'([^']{1,8})'")


def _check_bin_header(
    file: BinFile, records: Sequence[ManifestRecord], plain_bytes: int, *, ours: bool
) -> None:
    """Raise a CorruptedError unless the header matches the manifest.

    A header that an agent wrote (`ours`) has to be exactly the expected one; of other headers, only
    the facts that the manifest also has are compared.
    """
    parts = {
        f"{each.kind}.{each.index}": each.part
        for each in file.payloads
        if isinstance(each.part, OpInput | OpOutput) and not each.part.is_placeholder
    }
    for record in records:
        part = parts.get(record.member)
        if part is None and not (ours and not record.bytes_in):
            raise CorruptedError(f"the file has no {record.member or 'single tensor'}")
        shape = part.shape.dim if part is not None and part.shape else ()
        size = part.size if part is not None else 0
        if (shape, size) != (record.shape, record.bytes_in):
            expected = f"but its manifest has {record.shape} and {record.bytes_in}"
            raise CorruptedError(f"{record.member}: shape {shape} and {size} bytes, {expected}")
    if ours:
        if file.header not in _expected_headers(records):
            raise CorruptedError("its header is not the one that an agent writes for these tensors")
        end = max((each.end for each in file.payloads), default=plain_bytes)
        if end != plain_bytes:
            raise CorruptedError(f"{plain_bytes - end} bytes follow its tensors")


def _expected_headers(records: Sequence[ManifestRecord]) -> Iterator[DumpData]:
    """Yield the header for these tensors in each layout that has bin files."""
    slots: dict[TensorSide, dict[int, ManifestRecord]] = {side: {} for side in TensorSide}
    for record in records:
        side, _, slot = record.member.partition(".")
        slots[TensorSide(side)][int(slot)] = record
    for layout in LAYOUTS.values():
        if layout.shares_timestamps:
            yield DumpData(
                dump_time=records[0].timestamp_us,
                op_name=records[0].op_name,
                input=_expected_parts(OpInput, slots[TensorSide.INPUT], layout),
                output=_expected_parts(OpOutput, slots[TensorSide.OUTPUT], layout),
            )


def _expected_parts(
    kind: type[_OperatorPart], of: dict[int, ManifestRecord], layout: Layout
) -> tuple[_OperatorPart, ...]:
    """Return the header parts up to the last slot; parts for slots without a tensor are empty."""
    parts = [kind()] * (max(of, default=-1) + 1)
    for slot, record in of.items():
        shape = Shape(record.shape)
        parts[slot] = kind(
            data_type=DATA_TYPE_NUMBERS.get(record.dtype, 0),
            format=FORMAT_NUMBERS[layout.tensor_format(record.shape)],
            shape=shape,
            size=record.bytes_in,
            original_shape=shape,
        )
    return tuple(parts)


def check_file(job: FileCheck, data: memoryview) -> FileCheckResult:
    """Return the result of checking the bytes of a file."""
    name = job.paths[0]
    try:
        is_npy = NPY_FILE_NAME.fullmatch(name) is not None
        has_other_size = job.stored_bytes not in (0, len(data))
        if has_other_size and not (is_npy and _may_be_packed_later(job, len(data))):
            raise CorruptedError(f"{len(data)} bytes, but its manifest has {job.stored_bytes}")
        tensors = _check_npy if is_npy else _check_bin
        sure, undecided = tensors(job, name, data)
    except (CorruptedError, ValueError, TypeError, OverflowError) as error:
        return FileCheckResult(job, " ".join(str(error).split()) or type(error).__name__)
    return FileCheckResult(job, digests=sure, undecided=undecided)


def _may_be_packed_later(job: FileCheck, file_bytes: int) -> bool:
    """Return whether a file has another size because it will be packed later; such a file is
    checked as any other.
    """
    known = [record._replace(bytes_stored=job.stored_bytes) for record in job.records]
    return len(known) == 1 and is_packed_later(known[0], job.paths[0], file_bytes)


def _check_npy(job: FileCheck, name: str, data: memoryview) -> tuple[int, int]:
    if len(job.records) != 1:
        raise CorruptedError(f"its manifest names {len(job.records)} tensors for a file of one")
    (record,) = job.records
    limit = math.prod(record.shape) * _stored_type(record).itemsize + _MAX_HEADER_BYTES
    plain = memoryview(select_codec(name).decode(data, limit_bytes=limit))
    form = read_npy_form(plain)
    offset = form.header.data_offset
    _check_form(form, bytes(plain[:offset]), record)
    if job.agent_wrote and form.data_end != len(plain):
        raise CorruptedError(f"{len(plain) - form.data_end} bytes follow its elements")
    _check_packing(name, data, (plain[:offset], plain[offset:]))
    elements = plain[offset : form.data_end]
    held = (elements,) if form.bfloat16 else convert_from_stored(record.dtype, elements)
    return _check_digest(record, held)


def _check_bin(job: FileCheck, name: str, data: memoryview) -> tuple[int, int]:
    limit = job.plain_bytes + _MAX_BIN_HEADER_BYTES if job.agent_wrote else _MAX_FOREIGN_BYTES
    plain = memoryview(select_codec(name).decode(data, limit_bytes=limit))
    file = bin_file.parse_bin_file(plain)
    _check_bin_header(file, job.records, len(plain), ours=job.agent_wrote)
    if select_codec(name).suffix:
        for frame in iterate_zstd_frames(make_memory_reader(data), len(data), limit_bytes=limit):
            content = plain[frame.content_offset : frame.content_end]
            _check_packing(name, data[frame.start : frame.end], (content,))
    payloads = {f"{each.kind}.{each.index}": file.read_payload(each) for each in file.payloads}
    found = [_check_digest(record, (payloads[record.member],)) for record in job.records]
    return sum(sure for sure, _ in found), sum(undecided for _, undecided in found)


def _stored_type(record: ManifestRecord) -> np.dtype[Any]:
    element = ELEMENT_TYPES.get(record.dtype)
    return np.dtype(element.descr if element else record.dtype)


def _check_form(form: NpyFileForm, head: bytes, record: ManifestRecord) -> None:
    if form.header.shape != record.shape:
        raise CorruptedError(f"shape {form.header.shape}, but its manifest has {record.shape}")
    due = _stored_type(record)
    same = record.dtype == "bfloat16" if form.bfloat16 else np.dtype(form.header.descr) == due
    if not same:
        raise CorruptedError(f"elements of {form.dtype}, but its manifest has {record.dtype}")
    found = _DESCR_FIELD.search(head)
    descr: str = found[1].decode("latin-1") if found is not None else ""
    # A type has several equivalent spellings, but writers use only one of them.
    usual = form.bfloat16 or (descr != "" and cast("str", np.dtype(descr).str) == descr)
    if not usual or head not in _iterate_headers(descr, form):
        raise CorruptedError("its header is not one that MindSpore, numpy or an agent writes")


def _iterate_headers(descr: str, form: NpyFileForm) -> Iterator[bytes]:
    """Yield the header that agents and MindSpore write for an array, and the header that numpy
    writes.
    """
    header = form.header
    if not header.fortran_order:
        yield npy_format.format_npy_header(descr, header.shape)
    written = io.BytesIO()
    facts = {"descr": descr, "fortran_order": header.fortran_order, "shape": header.shape}
    np.lib.format.write_array_header_1_0(written, facts)
    yield written.getvalue()


def _check_packing(name: str, packed: memoryview, parts: Sequence[ByteBuffer]) -> None:
    """Raise a CorruptedError if one byte of a frame is wrong although its content is right.

    Some bits of a frame have no effect, so neither its checksum nor the digest covers them. So the
    content is packed again: the same release of zstd gives the same bytes, another release gives
    entirely different ones; a difference of exactly one byte is therefore damage.
    """
    codec = select_codec(name)
    if not codec.suffix:
        return
    stored = b"".join(make_stored_frame(parts))
    due = stored if len(stored) == len(packed) else b"".join(codec.encode(parts))
    if len(due) == len(packed):
        odd = np.frombuffer(due, np.uint8) != np.frombuffer(packed, np.uint8)
        if int(np.count_nonzero(odd)) == 1:
            where = int(np.argmax(odd))
            raise CorruptedError(
                f"one byte of its compressed form, at offset {where}, was changed; its "
                "elements are intact"
            )


def _check_digest(record: ManifestRecord, held: Sequence[memoryview]) -> tuple[int, int]:
    """Return the number of digests that match and of those that are undecided; CorruptedError for a
    mismatch.
    """
    if not held:
        raise CorruptedError(f"some elements are not valid for {record.dtype}")
    if not record.digest:
        return 0, 1
    found = [xxhash.xxh3_128_hexdigest(each) for each in held]
    if record.digest in found:
        return 1, 0
    if len(held) > 1:
        return 0, 1
    member = f"{record.member}: " if record.member else ""
    raise CorruptedError(
        f"{member}elements with digest {found[0]}, but its manifest has {record.digest}"
    )

"""The bytes of one file against what a manifest says of its tensors. Pure."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import xxhash

from rankdump import dumpdata
from rankdump.codec import Buffer, codec_of
from rankdump.codec.frames import frames, from_memory
from rankdump.codec.stored import stored_frame
from rankdump.contract import npy
from rankdump.contract.dtypes import ELEMENT_TYPES, as_held
from rankdump.contract.errors import DamagedError
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.npy_forms import NpyForm, form_of
from rankdump.fsck.headers import check_header
from rankdump.fsck.sort import NPY
from rankdump.fsck.values import Checked, Job

_HEADER_ROOM_BYTES = 4096
_BIN_ROOM_BYTES = 16 << 20
"""A header says something of every slot below the last one."""
_UNKNOWN_LIMIT_BYTES = 64 << 30
_DESCR = re.compile(rb"'descr': *'([^']{1,8})'")


def check(job: Job, data: memoryview) -> Checked:
    """Return what the bytes of a file show."""
    name = job.paths[0]
    try:
        if job.stored_bytes not in (0, len(data)):
            raise DamagedError(f"{len(data)} bytes, its manifest says {job.stored_bytes}")
        tensors = _npy if NPY.fullmatch(name) else _bin
        sure, undecided = tensors(job, name, data)
    except (DamagedError, ValueError, TypeError, OverflowError) as error:
        return Checked(job, " ".join(str(error).split()) or type(error).__name__)
    return Checked(job, digests=sure, undecided=undecided)


def _npy(job: Job, name: str, data: memoryview) -> tuple[int, int]:
    if len(job.records) != 1:
        raise DamagedError(f"its manifest names {len(job.records)} tensors in it")
    (record,) = job.records
    limit = _stored_bytes(record) + _HEADER_ROOM_BYTES
    plain = memoryview(codec_of(name).decode(data, limit_bytes=limit))
    form = form_of(plain)
    offset = form.header.data_offset
    _check_form(form, bytes(plain[:offset]), record)
    if job.ours and form.end != len(plain):
        raise DamagedError(f"{len(plain) - form.end} bytes stand behind its elements")
    _check_packing(name, data, (plain[:offset], plain[offset:]))
    elements = plain[offset : form.end]
    held = (elements,) if form.bfloat16 else as_held(record.dtype, elements)
    return _check_digest(record, held)


def _bin(job: Job, name: str, data: memoryview) -> tuple[int, int]:
    limit = job.plain_bytes + _BIN_ROOM_BYTES if job.ours else _UNKNOWN_LIMIT_BYTES
    plain = memoryview(codec_of(name).decode(data, limit_bytes=limit))
    file = dumpdata.parse(plain)
    check_header(file, job.records, len(plain), ours=job.ours)
    if codec_of(name).suffix:
        for frame in frames(from_memory(data), len(data), limit_bytes=limit):
            content = plain[frame.offset : frame.content_end]
            _check_packing(name, data[frame.start : frame.end], (content,))
    payloads = {f"{each.kind}.{each.index}": file.bytes_of(each) for each in file.payloads}
    found = [_check_digest(record, (payloads[record.member],)) for record in job.records]
    return sum(sure for sure, _ in found), sum(undecided for _, undecided in found)


def _stored_bytes(record: ManifestRecord) -> int:
    element = ELEMENT_TYPES.get(record.dtype)
    item_bytes = np.dtype(element.descr if element else record.dtype).itemsize
    return math.prod(record.shape) * item_bytes


def _check_form(form: NpyForm, head: bytes, record: ManifestRecord) -> None:
    if form.header.shape != record.shape:
        raise DamagedError(f"shape {form.header.shape}, its manifest says {record.shape}")
    element = ELEMENT_TYPES.get(record.dtype)
    due = np.dtype(element.descr if element else record.dtype)
    same = record.dtype == "bfloat16" if form.bfloat16 else np.dtype(form.header.descr) == due
    if not same:
        raise DamagedError(f"elements of {form.dtype}, its manifest says {record.dtype}")
    found = _DESCR.search(head)
    descr: str = found[1].decode("latin-1") if found is not None else ""
    # Of the spellings of a type that mean the same only one is ever written.
    usual = form.bfloat16 or (descr != "" and cast("str", np.dtype(descr).str) == descr)
    if not usual or all(head != write(descr, form) for write in _HEADERS):
        raise DamagedError("its header is none that MindSpore, numpy or an agent writes")


def _mindspore_header(descr: str, form: NpyForm) -> bytes:
    return b"" if form.header.fortran_order else npy.header(descr, form.header.shape)


def _numpy_header(descr: str, form: NpyForm) -> bytes:
    header = form.header
    written = io.BytesIO()
    facts = {"descr": descr, "fortran_order": header.fortran_order, "shape": header.shape}
    np.lib.format.write_array_header_1_0(written, facts)
    return written.getvalue()


_HEADERS: tuple[Callable[[str, NpyForm], bytes], ...] = (_mindspore_header, _numpy_header)
"""As an agent and MindSpore write them, and as numpy does."""


def _check_packing(name: str, packed: memoryview, parts: Sequence[Buffer]) -> None:
    """Raise DamagedError where a frame gives what it should and one byte of it is wrong.

    Some bits of a frame mean nothing, so neither its checksum nor the digest sees them. Packed
    again by the same release of zstd it would be the same; by another one, altogether different.
    """
    codec = codec_of(name)
    if not codec.suffix:
        return
    again = stored_frame(memoryview(b"".join(parts))) if len(parts) == 1 else ()
    stored = b"".join(again)
    due = stored if len(stored) == len(packed) else b"".join(codec.encode(parts))
    if len(due) == len(packed):
        odd = np.frombuffer(due, np.uint8) != np.frombuffer(packed, np.uint8)
        if int(np.count_nonzero(odd)) == 1:
            where = int(np.argmax(odd))
            raise DamagedError(
                f"a byte of its packing, at {where}, was changed; its elements are whole"
            )


def _check_digest(record: ManifestRecord, held: Sequence[memoryview]) -> tuple[int, int]:
    """Return how many tensors are sure and how many undecided; DamagedError where it is another."""
    if not held:
        raise DamagedError(f"elements that no {record.dtype} has")
    if not record.digest:
        return 0, 1
    found = [xxhash.xxh3_128_hexdigest(each) for each in held]
    if record.digest in found:
        return 1, 0
    if len(held) > 1:
        return 0, 1
    raise DamagedError(
        f"{_member(record)}elements with digest {found[0]}, its manifest says {record.digest}"
    )


def _member(record: ManifestRecord) -> str:
    return f"{record.member}: " if record.member else ""

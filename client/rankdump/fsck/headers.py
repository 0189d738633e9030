"""The header of a `bin` file against the tensors that a manifest names in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rankdump.contract.dump_types import FORMAT_NUMBERS, NUMBERS
from rankdump.contract.dumpdata import DumpData, OpInput, OpOutput, Shape
from rankdump.contract.errors import DamagedError
from rankdump.contract.key import Side
from rankdump.contract.layout.layouts import LAYOUTS, Layout
from rankdump.contract.manifest import ManifestRecord
from rankdump.dumpdata import BinFile

_Part = TypeVar("_Part", OpInput, OpOutput)


def check_header(
    file: BinFile, records: Sequence[ManifestRecord], plain_bytes: int, *, ours: bool
) -> None:
    """Raise DamagedError unless a header says what the manifest does.

    Of one that an agent wrote nothing may be otherwise; of another's only what both speak of.
    """
    parts = {
        f"{each.kind}.{each.index}": each.part
        for each in file.payloads
        if isinstance(each.part, OpInput | OpOutput) and not each.part.placeholder
    }
    for record in records:
        part = parts.get(record.member)
        if part is None and not (ours and not record.bytes_in):
            raise DamagedError(f"no {record.member or 'single tensor'} in it")
        shape = part.shape.dim if part is not None and part.shape else ()
        size = part.size if part is not None else 0
        if (shape, size) != (record.shape, record.bytes_in):
            said = f"its manifest says {record.shape} and {record.bytes_in}"
            raise DamagedError(f"{record.member}: shape {shape} and {size} bytes, {said}")
    if ours:
        if file.header not in _headers(records):
            raise DamagedError("its header is not the one that an agent writes of these tensors")
        end = max((each.end for each in file.payloads), default=plain_bytes)
        if end != plain_bytes:
            raise DamagedError(f"{plain_bytes - end} bytes stand behind its tensors")


def _headers(records: Sequence[ManifestRecord]) -> Iterator[DumpData]:
    """Yield the header of these tensors in each layout that has such files."""
    slots: dict[Side, dict[int, ManifestRecord]] = {side: {} for side in Side}
    for record in records:
        side, _, slot = record.member.partition(".")
        slots[Side(side)][int(slot)] = record
    for layout in LAYOUTS.values():
        if layout.shares_stamps:
            yield DumpData(
                dump_time=records[0].timestamp_us,
                op_name=records[0].op_name,
                input=_parts(OpInput, slots[Side.INPUT], layout),
                output=_parts(OpOutput, slots[Side.OUTPUT], layout),
            )


def _parts(kind: type[_Part], of: dict[int, ManifestRecord], layout: Layout) -> tuple[_Part, ...]:
    every = range(max(of, default=-1) + 1)
    return tuple(_part(kind, of[slot], layout) if slot in of else kind() for slot in every)


def _part(kind: type[_Part], record: ManifestRecord, layout: Layout) -> _Part:
    shape = Shape(record.shape)
    return kind(
        data_type=NUMBERS.get(record.dtype, 0),
        format=FORMAT_NUMBERS[layout.tensor_format(record.shape)],
        shape=shape,
        size=record.bytes_in,
        original_shape=shape,
    )

"""What stands before the elements of a `bin` file that holds tensors of one operator. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rankdump import dumpdata
from rankdump.contract.dump_types import FORMAT_NUMBERS, NUMBERS
from rankdump.contract.dumpdata import DumpData, OpInput, OpOutput, Shape
from rankdump.contract.key import Side
from rankdump.contract.layout.layouts import Layout
from rankdumpd.agent.members import BinTensor

MOST_SLOTS = 1 << 14
"""A header says something of every slot below the last one."""
_Part = TypeVar("_Part", OpInput, OpOutput)


def bin_head(
    op_name: str, timestamp_us: int, tensors: Iterable[BinTensor], layout: Layout
) -> bytes:
    """Return the length and the header; slots below a tensor's that have none are placeholders."""
    parts = {(each.side, each.slot): each for each in tensors}
    inputs = {slot: each for (side, slot), each in parts.items() if side is Side.INPUT}
    outputs = {slot: each for (side, slot), each in parts.items() if side is Side.OUTPUT}
    header = DumpData(
        dump_time=timestamp_us,
        op_name=op_name,
        input=_parts(OpInput, inputs, layout),
        output=_parts(OpOutput, outputs, layout),
    )
    return dumpdata.head(header)


def _parts(kind: type[_Part], tensors: dict[int, BinTensor], layout: Layout) -> tuple[_Part, ...]:
    slots = range(max(tensors, default=-1) + 1)
    nothing = kind()
    return tuple(
        _part(kind, tensors[slot], layout) if slot in tensors else nothing for slot in slots
    )


def _part(kind: type[_Part], tensor: BinTensor, layout: Layout) -> _Part:
    shape = Shape(tensor.shape)
    return kind(
        data_type=NUMBERS.get(tensor.dtype, 0),
        format=FORMAT_NUMBERS[layout.tensor_format(tensor.shape)],
        shape=shape,
        size=tensor.byte_count,
        original_shape=shape,
    )

"""What stands before the elements of a `bin` file that holds tensors of one operator. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from rankdump.contract.dump_types import FORMAT_NUMBERS, NUMBERS
from rankdump.contract.dumpdata import DumpData, OpInput, OpOutput, Shape
from rankdump.contract.key import Side
from rankdump.contract.layout.layouts import Layout
from rankdump.dumpdata.file import LENGTH_BYTES
from rankdump.dumpdata.message import to_bytes
from rankdumpd.agent.members import BinTensor

MOST_SLOTS = 1 << 14
"""A header says something of every slot below the last one."""
_REMEMBERED_SLOTS = 1 << 8
# Some 5 MB, of the 100 that an idle agent may take.
_REMEMBERED = 1 << 13
_Part = TypeVar("_Part", OpInput, OpOutput)


def bin_head(
    op_name: str, timestamp_us: int, tensors: Sequence[BinTensor], layout: Layout
) -> bytes:
    """Return the length and the header; slots below a tensor's that have none are placeholders."""
    one = len(tensors) == 1 and tensors[0].slot < _REMEMBERED_SLOTS
    what = _one_tensor(op_name, tensors[0], layout) if one else _what(op_name, tensors, layout)
    # Messages one behind the other are one message, and these fields come first.
    body = to_bytes(DumpData(dump_time=timestamp_us)) + what
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


@lru_cache(maxsize=_REMEMBERED)
def _one_tensor(op_name: str, tensor: BinTensor, layout: Layout) -> bytes:
    """Return what is the same about a tensor in every iteration."""
    return _what(op_name, (tensor,), layout)


def _what(op_name: str, tensors: Iterable[BinTensor], layout: Layout) -> bytes:
    sides: dict[Side, dict[int, BinTensor]] = {side: {} for side in Side}
    for tensor in tensors:
        sides[tensor.side][tensor.slot] = tensor
    header = DumpData(
        version="",
        op_name=op_name,
        input=_parts(OpInput, sides[Side.INPUT], layout),
        output=_parts(OpOutput, sides[Side.OUTPUT], layout),
    )
    return to_bytes(header)


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

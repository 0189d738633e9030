"""Calls and tensors that dumps of other tools describe, with names in rankdump's spelling. Pure.

Default/{path with /}/{class}-op{number}                     a call of a module
Default/network-{root}/{path with /}/{operator}-op{number}   an operator within a module
Gradients/...                                                its backward
{kind}_{api}_{number}_{forward|backward}                     a call of an API
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.events import EventKind
from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

CRC_KIND = "crc32:"
XOR_KIND = "xor:"
"""Prefix of a digest that is a sum of exclusive ors: different tensors may have the same one."""
L1NORM_ITEM = "l1norm"
FOREIGN_TITLES = {L1NORM_ITEM: "L1Norm Value"}
"""Column title of each statistic that only other tools write."""
MAX_JSON_DEPTH = 64
_MAX_EXTENT = 1 << 62
_RANK_NUMBER = re.compile(r"(?i)rank[_-]?([0-9]{1,9})")
_STEP_NUMBER = re.compile(r"(?i)(?:step|iter(?:ation)?)[_-]?([0-9]{1,18})")
_INTERNAL_FILE = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:torch|torch_npu|msprobe|mindspore)[/\\]"
)
_COLLECTIVE_WORDS = (
    ("allreduce", EventKind.ALL_REDUCE),
    ("reducescatter", EventKind.REDUCE_SCATTER),
    ("allgather", EventKind.ALL_GATHER),
    ("alltoall", EventKind.ALL_TO_ALL),
    ("broadcast", EventKind.BROADCAST),
    ("gather", EventKind.GATHER),
    ("scatter", EventKind.SCATTER),
    ("reduce", EventKind.REDUCE),
    ("barrier", EventKind.BARRIER),
    ("send", EventKind.SEND),
    ("recv", EventKind.RECV),
)
"""Words with the kind of operation that they stand for; the first word contained in a
name counts.
"""
_LAST_NUMBER = re.compile(r"([0-9]{1,9})[^0-9]*$")


class ForeignTensor(NamedTuple):
    """One tensor of a call."""

    side: TensorSide
    slot: int
    """Number of the tensor among the leaves of its side, tensors or not."""
    argument: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Mapping[str, float]
    """Statistics by the names of `_core.statistics`, and `l1norm`."""
    digest: str = ""
    """Checksum of the tensor, after its kind; empty if there is none."""
    file: str = ""
    """Name of the tensor's file; empty if the dump has no file of it."""


class ForeignCall(NamedTuple):
    """One call of a rank, in execution order."""

    name: str
    """Name of the call as the tool spells it; a parameter's call has the name of the parameter
    appended.
    """
    op_type: str
    op_name: str
    tensors: tuple[ForeignTensor, ...]
    group: str = ""
    """For a collective: text that identifies its process group, as far as the dump tells it."""
    is_collective: bool = False


class CallPlace(NamedTuple):
    """Rank and iteration of a file of calls."""

    rank: int
    iteration: int


def make_module_name(path: str, kind: str, number: int, *, backward: bool = False) -> str:
    """Return the name of a call of a module or operator, given the path of the module.

    >>> make_module_name("layer.0", "Linear", 2, backward=True)
    'Gradients/Default/layer/0/Linear-op2'
    """
    scope = "/".join(("Default", *filter(None, path.split("."))))
    name = f"{scope}/{kind.replace('/', '_')}-op{number}"
    return f"{GRADIENTS_PREFIX}{name}" if backward else name


def make_parameter_call(
    name: str, parameter: str, tensor: ForeignTensor, *, gradient: bool
) -> ForeignCall:
    """Return a parameter, or its gradient, as the output of an operator of its own.

    `parameter` is the path of the parameter in the model.
    """
    op_name = f"{GRADIENTS_PREFIX}{parameter}" if gradient else parameter
    output = tensor._replace(side=TensorSide.OUTPUT, slot=0, argument="")
    return ForeignCall(name, PARAMETER_OP_TYPE, op_name, (output,))


def select_own_lines(lines: Sequence[SourceLine]) -> tuple[SourceLine, ...]:
    """Return the lines of a stack that belong neither to the framework nor to the tool; all lines
    if there is none.

    The innermost of these lines is the line of the program that made the call.
    """
    return tuple(line for line in lines if not _INTERNAL_FILE.search(line.file)) or tuple(lines)


def parse_extents(value: object) -> tuple[int, ...] | None:
    """Return a shape from a list of numbers; None for anything else."""
    if not isinstance(value, list):
        return None
    found: list[int] = []
    for extent in value:  # pyright: ignore[reportUnknownVariableType] - it is checked here
        if type(extent) is not int or not 0 <= extent < _MAX_EXTENT:  # pyright: ignore[reportUnknownArgumentType]
            return None
        found.append(extent)
    return tuple(found)


def count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor's elements; 0 for a type that only the tool knows."""
    element = ELEMENT_TYPES.get(dtype)
    return math.prod(shape) * element.item_bytes if element is not None else 0


def find_call_place(path: str) -> CallPlace:
    """Return rank and iteration in the names of a path, such as `step3/rank_1.json`; 0 for those
    that are missing.
    """
    ranks, steps = _RANK_NUMBER.findall(path), _STEP_NUMBER.findall(path)
    return CallPlace(int(ranks[-1]) if ranks else 0, int(steps[-1]) if steps else 0)


def find_last_number(name: str) -> int | None:
    """Return the last number in a name, such as the rank in `nccl_trace_rank_3`; None if it has
    none.
    """
    found = _LAST_NUMBER.search(name)
    return int(found[1]) if found is not None else None


def find_collective_kind(operation: str) -> EventKind:
    """Return the kind of a collective or message with this name; OPERATOR if it is unknown."""
    plain = operation.replace("_", "").lower()
    return next((kind for word, kind in _COLLECTIVE_WORDS if word in plain), EventKind.OPERATOR)

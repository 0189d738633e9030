"""Identity of records: the key of a tensor in a dump tree, the kind that a tensor keeps in every
iteration, and rows of statistics that share a frame. Pure.

A step has thousands of rows, so what repeats from step to step is one value, which both sides
make once and remember.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rankdump._core.tensor_layout import TensorLayout


class TensorSide(str, Enum):
    """Side of an operator that a tensor is on; the value is the word in file names."""

    INPUT = "input"
    OUTPUT = "output"

    # Enum's own hash is a Python call, which every key with a side would pay for.
    __hash__ = str.__hash__


class TensorKey(NamedTuple):
    """Identity of one tensor of one rank; a record's place in the tree follows from it alone.

    A NamedTuple, which is made fastest: there is one for each tensor.
    """

    rank: int
    net_name: str
    graph: int
    iteration: int
    timestamp_us: int
    """Microseconds since the epoch, rising and unique within a rank: sorts tensors by time."""
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: TensorSide
    slot: int
    task: int = 0
    stream: int = 0
    tensor_format: str = "DefaultFormat"
    constant: bool = False
    """It never changes, so it is written once for its graph."""
    element: str = ""
    """Element type as the file name spells it; empty where names have none."""
    argument: str = ""
    """Its place in the call, where names have that instead of the slot; else empty."""


_UNSAFE_CHARACTERS = str.maketrans("/\\. ", "____")


def sanitize_name(name: str) -> str:
    """Return a name without the characters that separate paths and dotted fields.

    MindSpore turns `/`, `\\`, `.` and space into `_`, one for one (MindSpore 2.3,
    `GetFileKernelName`); control characters and unpaired surrogates become `_` as well.
    """
    return sanitize_line(name).translate(_UNSAFE_CHARACTERS)


def sanitize_line(name: str) -> str:
    """Return a name for a line of a file, with `_` for characters that are not printable."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else "_" for c in name)


BUFFER_ARGUMENT = "buffer"
"""Argument of a module's buffer, which has the operator type of parameters in a tree."""
_CALL_PLACES = frozenset(("args", "kwargs", "out", "input", "output"))
"""First components of an argument that is a place in a call."""


def name_argument(argument: str) -> str:
    """Return the name that an argument has in its call; empty for one that only has a number.

    >>> name_argument("kwargs.labels"), name_argument("out.loss"), name_argument("out.0")
    ('labels', 'loss', '')
    """
    head, *parts = argument.partition(":")[0].split(".")
    if head not in _CALL_PLACES:
        return ""
    while parts and parts[0].isdigit():
        del parts[0]
    return sanitize_line(".".join(parts))


def format_slot(key: TensorKey) -> str:
    """Return the place of a tensor among those of its side, for people: its slot, or the place that
    its name has instead, which tells the elements of a list apart.

    >>> key = TensorKey(0, "", 0, 0, 0, "Torch_cat", "Torch_cat_0", TensorSide.INPUT, 0)
    >>> format_slot(key), format_slot(key._replace(argument="input.0.1"))
    ('0', '0.1')
    """
    side, _, place = key.argument.partition(".")
    return sanitize_line(place) if place and side == key.side.value else str(key.slot)


MAX_FRAME_ROWS = 1024
"""Most rows of one frame."""


PASS_PHASES = ("", "eval", "no_grad")
"""Words for what a forward pass trains: empty for one that trains."""


class TensorKind(NamedTuple):
    """Attributes that a tensor has in every iteration.

    A NamedTuple, which is made and looked up fastest: where each call has a name of its own, every
    tensor makes one.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: TensorSide
    slot: int
    dtype: str
    shape: tuple[int, ...]
    byte_count: int
    """Length of the elements in C order, little endian."""
    argument: str = ""
    """Place of the tensor in its call: `args.0`, `kwargs.mask`; empty when unknown."""
    constant: bool = False
    """It never changes, so it is kept once for its graph."""
    model: str = ""
    """Name of its model; the `net_name` of a plan replaces it."""
    layout: TensorLayout | None = None
    """Which part of a logical tensor the rank holds; None for a whole tensor."""
    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None when it is not divided."""
    phase: str = ""
    """`eval` or `no_grad` for a forward pass that trains nothing; else empty."""


@dataclass(frozen=True, slots=True)
class StatisticRows:
    """Statistics of tensors of one iteration, in order: columns of at most MAX_FRAME_ROWS rows."""

    iteration: int
    kinds: tuple[TensorKind, ...]
    timestamps_us: tuple[int, ...]
    """Microseconds since the epoch; unique within a rank."""
    statistics: tuple[str, ...]
    """Texts of the plan's statistics, joined by commas as a table has them."""
    switched_on: bool = False
    """The script itself switched dumping on: the plan's iterations do not matter."""
    degraded: str = ""
    """Why the statistics are kept in the place of the elements; empty where the plan says so."""
    fingerprints: tuple[bytes, ...] = ()
    """One for each row, empty where a tensor has none; no item where none has one."""

    def __len__(self) -> int:
        return len(self.kinds)

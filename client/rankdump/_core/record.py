"""Identity of records: the key of a tensor in a dump tree, the kind of a tensor, which is the same
in every iteration, and rows of statistics that share a frame. Pure.

A step has thousands of rows, so the properties that repeat in every step are one value, which rank
and agent each make once and remember.
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

    # The hash of `Enum` is a Python call, which would make every dictionary look-up by side slower.
    __hash__ = str.__hash__


class TensorKey(NamedTuple):
    """Identity of one tensor of one rank, from which the record's place in the tree follows.

    It is a NamedTuple because that is created fastest: there is one for each tensor.
    """

    rank: int
    net_name: str
    graph: int
    iteration: int
    timestamp_us: int
    """Microseconds since the epoch, rising and unique within a rank, so that tensors
    sort by time.
    """
    op_type: str
    op_name: str
    """Full scope name; its components are joined by `/`."""
    side: TensorSide
    slot: int
    task: int = 0
    stream: int = 0
    tensor_format: str = "DefaultFormat"
    constant: bool = False
    """Whether the tensor never changes, so that it is written only once for its graph."""
    element: str = ""
    """Element type as the file name spells it; empty if file names have none."""
    argument: str = ""
    """Place of the tensor in the call, if file names have it instead of the slot; else empty."""


_UNSAFE_CHARACTERS = str.maketrans("/\\. ", "____")


def sanitize_name(name: str) -> str:
    """Return a name without characters that separate paths or dotted fields.

    `/`, `\\`, `.` and space each become `_`, as in MindSpore (2.3, `GetFileKernelName`); control
    characters and unpaired surrogates become `_` too.
    """
    return sanitize_line(name).translate(_UNSAFE_CHARACTERS)


def sanitize_line(name: str) -> str:
    """Return a name for a line of a file, with `_` in the place of characters that are not
    printable.
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else "_" for c in name)


BUFFER_ARGUMENT = "buffer"
"""Argument name of a module's buffer, which has the operator type of parameters in a tree."""
_CALL_PLACES = frozenset(("args", "kwargs", "out", "input", "output"))
"""First components of an argument name that stands for a place in a call."""


def name_argument(argument: str) -> str:
    """Return the name of an argument in its call; empty if the argument only has a number.

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
    """Return the place of a tensor on its side, for people: its slot, or its place in the call if
    file names have that, which distinguishes the elements of a list.

    >>> key = TensorKey(0, "", 0, 0, 0, "Torch_cat", "Torch_cat_0", TensorSide.INPUT, 0)
    >>> format_slot(key), format_slot(key._replace(argument="input.0.1"))
    ('0', '0.1')
    """
    side, _, place = key.argument.partition(".")
    return sanitize_line(place) if place and side == key.side.value else str(key.slot)


MAX_FRAME_ROWS = 1024
"""Maximum number of rows in one frame."""


PASS_PHASES = ("", "eval", "no_grad")
"""Words for the mode of a forward pass; empty for a pass that trains."""


class TensorKind(NamedTuple):
    """Kind: the properties that a tensor has in every iteration.

    It is a NamedTuple because that is created and hashed fastest: if each call has its own name,
    every tensor makes a kind.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name; its components are joined by `/`."""
    side: TensorSide
    slot: int
    dtype: str
    shape: tuple[int, ...]
    byte_count: int
    """Bytes of the elements in C order, little endian."""
    argument: str = ""
    """Place of the tensor in its call, such as `args.0` or `kwargs.mask`; empty if unknown."""
    constant: bool = False
    """Whether the tensor never changes, so that it is kept only once for its graph."""
    model: str = ""
    """Name of the tensor's model; a plan's `net_name` replaces it."""
    layout: TensorLayout | None = None
    """Part of a logical tensor that the rank holds; None for a whole tensor."""
    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None if the iteration is not divided."""
    phase: str = ""
    """`eval` or `no_grad` for a forward pass without training; else empty."""


@dataclass(frozen=True, slots=True)
class StatisticRows:
    """Rows of statistics of one iteration as columns: at most MAX_FRAME_ROWS rows, in order."""

    iteration: int
    kinds: tuple[TensorKind, ...]
    timestamps_us: tuple[int, ...]
    """Time stamp of each row in microseconds since the epoch, unique within a rank."""
    statistics: tuple[str, ...]
    """Statistics of each row: the texts of the plan's items, joined by commas as in a table."""
    switched_on: bool = False
    """Whether the script itself switched dumping on, so that the plan's iterations do
    not matter.
    """
    degraded: str = ""
    """Reason for which statistics replace the elements; empty if the plan asks for
    statistics only.
    """
    fingerprints: tuple[bytes, ...] = ()
    """Fingerprint of each row, empty for a tensor without one; the tuple is empty if no row has
    one.
    """

    def __len__(self) -> int:
        return len(self.kinds)

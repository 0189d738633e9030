"""The name of one tensor in a dump tree. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Side(str, Enum):
    """Which side of an operator a tensor stands on; the value is the word in file names."""

    INPUT = "input"
    OUTPUT = "output"

    # That of Enum is a call of Python, paid wherever a side is part of a key.
    __hash__ = str.__hash__


class TensorKey(NamedTuple):
    """Identity of one tensor of one rank; a record's place in the tree follows from it alone.

    There is one for each tensor, wherever it goes: no value is made faster.
    """

    rank: int
    net_name: str
    graph: int
    iteration: int
    timestamp_us: int
    """Microseconds since the epoch, rising and unique within a rank: sorts tensors as they were."""
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: Side
    slot: int
    task: int = 0
    stream: int = 0
    tensor_format: str = "DefaultFormat"
    constant: bool = False
    """It never changes: written once for its graph, whatever the iteration."""
    element: str = ""
    """Element type as the file name spells it; empty where names do not say it."""
    argument: str = ""
    """Where in its call it stood, where names say that and not the slot; else empty."""


_TRIPPING = str.maketrans("/\\. ", "____")


def sanitised(name: str) -> str:
    """Return a name with nothing in it that a path or the dotted fields could trip over.

    MindSpore turns `/`, `\\`, `.` and space into `_`, one for one (mindspore-dump.md 2.3 cites
    GetFileKernelName); control characters and unpaired surrogates go the same way here.
    """
    # Names that can be printed are nearly all there are.
    return (name if name.isprintable() else one_line(name)).translate(_TRIPPING)


def one_line(name: str) -> str:
    """Return a name as it can stand in a file of lines: what cannot be printed becomes `_`."""
    return "".join(c if c.isprintable() else "_" for c in name)

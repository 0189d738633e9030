"""Names of records: the key of a tensor in a dump tree, the kind that a tensor keeps in every
iteration, rows of statistics that share a frame, and the closed list of reasons why a selected
tensor is not in the tree. Pure.

A step has thousands of rows, and each costs as little as its row: what repeats from step to step
is one value, which both sides make once and remember. Balances, rows of the ledger and metrics
count by the listed reasons; any other counts as OTHER_REASON.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class TensorSide(str, Enum):
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
    side: TensorSide
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


_UNSAFE_CHARACTERS = str.maketrans("/\\. ", "____")


def sanitize_name(name: str) -> str:
    """Return a name with nothing in it that a path or the dotted fields could trip over.

    MindSpore turns `/`, `\\`, `.` and space into `_`, one for one (mindspore-dump.md 2.3 cites
    GetFileKernelName); control characters and unpaired surrogates go the same way here.
    """
    # Names that can be printed are nearly all there are.
    return (name if name.isprintable() else sanitize_line(name)).translate(_UNSAFE_CHARACTERS)


def sanitize_line(name: str) -> str:
    """Return a name as it can stand in a file of lines: what cannot be printed becomes `_`."""
    return "".join(c if c.isprintable() else "_" for c in name)


MAX_FRAME_ROWS = 1024
"""Rows of one frame at most."""


class TensorKind(NamedTuple):
    """What is the same about a tensor in every iteration.

    Where each call has a name of its own every tensor makes one: of all frozen values this sort is
    made, and found in a dictionary, fastest.
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
    """Where in the call the tensor stood: `args.0`, `kwargs.mask`; empty when unknown."""
    constant: bool = False
    """It never changes: kept once for its graph, whatever the iteration."""
    model: str = ""
    """Name of its model, of which a plan that names them all knows better."""


@dataclass(frozen=True, slots=True)
class StatisticRows:
    """Tensors of one iteration in their order; three columns of one length, at most MAX_ROWS."""

    iteration: int
    kinds: tuple[TensorKind, ...]
    timestamps_us: tuple[int, ...]
    """Microseconds since the epoch; unique within a rank."""
    statistics: tuple[str, ...]
    """Texts of the plan's statistics, joined by commas as a table has them."""
    switched_on: bool = False
    """The script itself switched dumping on: the plan's iterations do not matter."""
    degraded: bool = False
    """There was no room for the elements: the statistics are all that is kept."""

    def __len__(self) -> int:
        return len(self.kinds)


OTHER_REASON = "other"

PLAN_REASONS = frozenset(
    {
        "device_excluded",
        "iteration_excluded",
        "operator_excluded",
        "side_excluded",
        "tensor_excluded",
    }
)
"""The agent found that the plan does not select it after all."""

TENSOR_REASONS = frozenset(
    {
        "changed_in_place",
        "figures_failed",
        "graph_capture",
        "no_data",
        "no_statistics",
        "operator_failed",
        "record_too_large",
        "slot_too_high",
        "storage_freed",
        "unreadable_array",
        "unsupported_dtype",
        "unsupported_nested",
        "unsupported_quantized",
        "unsupported_sparse",
        "unsupported_tensor_class",
    }
)
"""It is of a kind that cannot be dumped so."""

SPACE_REASONS = frozenset(
    {
        "buffer_full",
        "disk_cap",
        "disk_full",
        "disk_low",
        "inodes_low",
        "job_quota",
        "no_descriptors",
        "no_memory",
    }
)
"""There was no room for it: in memory, on the disk, or by a limit."""

FAULT_REASONS = frozenset(
    {
        "copy_failed",
        "corrupted",
        "internal_error",
        "name_taken",
        "not_taken_by_agent",
        "outside_root",
        "torn",
        "unreadable",
        "write_error",
    }
)
"""Something went wrong on its way."""

DROP_REASONS = PLAN_REASONS | TENSOR_REASONS | SPACE_REASONS | FAULT_REASONS | {OTHER_REASON}


def normalize_reason(reason: str) -> str:
    """Return a reason as it is counted."""
    return reason if reason in DROP_REASONS else OTHER_REASON

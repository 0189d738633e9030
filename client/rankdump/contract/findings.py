"""What the merge finds instead of guessing, each with its evidence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingKind(str, Enum):
    """What is odd."""

    OPERATION_MISMATCH = "operation_mismatch"
    """Members of one collective call different operations."""
    SIZE_MISMATCH = "size_mismatch"
    """They name different numbers of elements."""
    DTYPE_MISMATCH = "dtype_mismatch"
    """They name different element types."""
    MISSING_MEMBER = "missing_member"
    """A rank that executed other things never arrived at a collective."""
    SILENT_RANK = "silent_rank"
    """A member reported nothing at all of the iteration."""
    LONE_MESSAGE = "lone_message"
    """A send without its receive, or a receive without its send."""
    CYCLE = "cycle"
    """Collectives or messages that wait for each other in a circle."""
    SEQUENCE_DIFFERENCE = "sequence_difference"
    """Ranks whose collectives agree executed different operators."""
    GAP = "gap"
    """Events of a rank were lost on their way: what is missing there is not known to be missing."""
    CONFLICT = "conflict"
    """A rank reported two different events at one position."""
    PARTIAL = "partial"
    """The iteration was published before a rank had finished it."""
    LATE = "late"
    """Events came after their iteration was published, and are not in the order."""
    UNPUBLISHED = "unpublished"
    """The order of an iteration could not be written."""
    TWO_TREES = "two_trees"
    """Ranks of one job dump into different trees: its order is in one of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is odd in an iteration."""

    kind: FindingKind
    iteration: int
    text: str
    """One sentence that stands alone: it names iteration, ranks and operators."""
    ranks: tuple[int, ...] = ()
    """Those it is about: who is missing, who differs, who lost events."""
    group: str = ""
    sequence: int = -1
    """Number of the collective or message; -1 when it is not about one."""
    name: str = ""
    """The operator it is about; of a missing member the last one it did execute."""
    position: int = -1
    """Place of that in the program of the first of the ranks; -1 when it is not about one."""
    provisional: bool = False
    """The iteration still runs: what is missing may come."""

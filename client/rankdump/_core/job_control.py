"""Control of a running job: orders, answers of ranks, and what became of an order. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ControlAction(str, Enum):
    """What can be done to a running job; the value is its word on the wire."""

    START = "start"
    STOP = "stop"
    ITERATIONS = "iterations"
    OPERATORS = "operators"
    SAVED_DATA = "saved-data"
    FREEZE = "freeze"
    """The only one that changes no plan: the black boxes of all ranks are frozen."""


@dataclass(frozen=True, slots=True)
class ControlOrder:
    """An order to the ranks of a job."""

    id: str
    """Unique for ever: the same order is carried out once."""
    job_id: str
    action: ControlAction
    values: tuple[str, ...] = ()
    """Of iterations their text, of operators the entries, of saved data its word; why to freeze."""
    iteration: int | None = None
    """First iteration with the change; None in the question where ranks are."""


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """Answer of a rank, or of the agent in its place."""

    id: str
    applied: bool
    """Whether the order had an iteration."""
    iteration: int
    """The one that runs; of an order that is applied the first iteration with the change."""
    step_us: int = 0
    """A short one of the latest steps; 0 when it is not known."""
    refused: str = ""
    """Why the rank does not do it; empty when it does."""
    pending: int = 0
    """First iteration of the newest change that the rank has yet to begin with; 0 for none."""
    job_id: str = ""
    rank: int = 0
    session_id: str = ""
    begun: int | None = None
    """Of the question where ranks are: first iteration with the change, when the rank has carried
    the order out already, for a coordinator that has ended since."""
    note: str = ""
    """What has a surprising effect on the rank, a clause."""


@dataclass(frozen=True, slots=True)
class ControlledRank:
    """What a rank makes of an order."""

    rank: int
    iteration: int | None
    """First iteration with the change, or the one that is frozen; None when the rank has none."""
    reason: str = ""
    """Why it has none, or another one than other ranks; else empty."""
    unconfirmed: bool = False
    """Whether it may have the change all the same: it has not confirmed an iteration in time."""
    note: str = ""
    """What has a surprising effect on it, a clause; such as operators that match nothing."""


@dataclass(frozen=True, slots=True)
class ControlResult:
    """What became of an order."""

    iteration: int | None
    """The iteration that was chosen for all ranks; None when no rank can do it."""
    ranks: tuple[ControlledRank, ...]
    """Every rank of the job."""

    @property
    def exceptions(self) -> tuple[ControlledRank, ...]:
        """Ranks that are not changed or frozen, or later than the others."""
        return tuple(each for each in self.ranks if each.reason)

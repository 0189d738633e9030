"""Control of a running job: orders, answers of ranks, what became of an order, what it may change
of a plan, and which plan holds in which iteration. Pure.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    SavedDataMode,
    TensorSelection,
)


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


_MAX_DESCRIBED_ENTRIES = 8
NO_ITERATIONS = IterationSelection("none", ())
"""Selects nothing, as after a stop."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Change of a plan; what is None stays as it is."""

    iterations: IterationSelection | None = None
    """It also ends what `dump_start` and `dump_stop` of the script began."""
    operators: OperatorSelection | None = None
    """Of all models."""
    saved: SavedDataMode | None = None

    def apply_to(self, plan: DumpPlan) -> DumpPlan:
        """Return the changed plan."""
        selection, content = plan.selection, plan.content
        if self.iterations is not None:
            selection = replace(selection, iterations=self.iterations)
        if self.operators is not None:
            selection = replace(selection, operators=self.operators, models=())
        if self.saved is not None:
            content = replace(content, saved=self.saved)
        return replace(plan, selection=selection, content=content)


def describe_operators(selection: TensorSelection) -> str:
    """Return which operators are selected, as entries of a configuration; of many the first."""
    if selection.watched is not None:
        return "those that are watched"
    if selection.models:
        return "those of each model"
    found = selection.operators
    if found.marked:
        return "those that the script marks"
    entries = ["all"] if found.everything else [*found.names, *found.types]
    if not found.everything:
        entries += [f"name-regex({pattern})" for pattern in found.patterns]
        entries += [f"{first} to {last}" for first, last in found.ranges]
    more = len(entries) - _MAX_DESCRIBED_ENTRIES
    text = ", ".join(entries[:_MAX_DESCRIBED_ENTRIES]) + (f" and {more} more" if more > 0 else "")
    return f"{text} but for exclusions" if found.has_exclusions else text


def is_changeable_to(plan: DumpPlan, other: DumpPlan) -> bool:
    """Return whether a plan may become another one while its job runs."""
    theirs = other.selection
    selection = replace(
        plan.selection,
        iterations=theirs.iterations,
        operators=theirs.operators,
        models=theirs.models,
    )
    content = replace(plan.content, saved=other.content.saved)
    return replace(plan, selection=selection, content=content) == other


@dataclass(frozen=True, slots=True)
class _ScheduledChange:
    """A change with the first iteration that has it and, unless it is for good, the first that has
    it no longer.
    """

    change: PlanChange
    begin: int
    end: int | None = None


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """The plan of an iteration."""

    plan: DumpPlan
    ends_switch: bool = False
    """Whether `dump_start` and `dump_stop` of the script before it no longer count."""
    overrides_switch: bool = False
    """Whether they do not count in this iteration."""


class PlanSchedule:
    """The plan of each iteration of a rank; safe to use from several threads.

    Changes for good are made once, changes for some iterations are laid over them.
    """

    def __init__(self, plan: DumpPlan) -> None:
        self.plan = plan
        """The plan of the running iteration."""
        self._lock = threading.Lock()
        self._lasting = plan
        self._running = plan.selection.initial_iteration - 1
        self._waiting: list[_ScheduledChange] = []
        self._passing: list[_ScheduledChange] = []

    @property
    def pending(self) -> int:
        """First iteration of the last change for good that is not made yet; 0 when all are."""
        with self._lock:
            return max((each.begin for each in self._waiting), default=0)

    def find_latest(self) -> DumpPlan:
        """Return the plan after all changes for good."""
        with self._lock:
            return _apply_all(self._lasting, self._waiting)

    def add(self, change: PlanChange, begin: int, iterations: int = 0) -> int:
        """Add a change, for so many iterations or for good; return the first one that has it.

        That is not the one that runs.
        """
        with self._lock:
            begin = max(begin, self._running + 1)
            if iterations:
                self._passing.append(_ScheduledChange(change, begin, begin + iterations))
            else:
                self._waiting.append(_ScheduledChange(change, begin))
            return begin

    def begin_iteration(self, iteration: int) -> IterationPlan:
        """Make this the running iteration; return its plan."""
        with self._lock:
            self._running = iteration
            if not self._waiting and not self._passing:
                self.plan = self._lasting
                return IterationPlan(self.plan)
            due = [each for each in self._waiting if each.begin <= iteration]
            self._waiting = [each for each in self._waiting if each.begin > iteration]
            self._lasting = _apply_all(self._lasting, due)
            self._passing = [each for each in self._passing if (each.end or 0) > iteration]
            over = [each for each in self._passing if each.begin <= iteration]
            self.plan = _apply_all(self._lasting, over)
            return IterationPlan(
                self.plan,
                ends_switch=any(each.change.iterations is not None for each in due),
                overrides_switch=any(each.change.iterations is not None for each in over),
            )


def _apply_all(plan: DumpPlan, changes: Iterable[_ScheduledChange]) -> DumpPlan:
    for each in changes:
        plan = each.change.apply_to(plan)
    return plan

"""Control of a running job: orders, the answers of ranks, the result of an order, what an order may
change of a plan, and which plan an iteration has. Pure.
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
    """Action of an order on a running job; the value is its word on the wire."""

    START = "start"
    STOP = "stop"
    ITERATIONS = "iterations"
    OPERATORS = "operators"
    SAVED_DATA = "saved-data"
    FREEZE = "freeze"
    """The only action that changes no plan: it freezes the black boxes of all ranks."""


@dataclass(frozen=True, slots=True)
class ControlOrder:
    """An order to the ranks of a job."""

    id: str
    """Id that is never used again: an order with the same id is carried out only once."""
    job_id: str
    action: ControlAction
    values: tuple[str, ...] = ()
    """Arguments of the action: the text of an iteration selection, entries of an operator list, the
    word for saved data, or the reason for a freeze.
    """
    iteration: int | None = None
    """First iteration with the change; None if the order asks for the positions of ranks."""


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """Answer to an order by a rank, or by the agent in its place."""

    id: str
    applied: bool
    """Whether the order named an iteration."""
    iteration: int
    """The running iteration; if the order is applied, the first iteration with the change."""
    step_us: int = 0
    """Microseconds of a short step among the latest ones; 0 if unknown."""
    refused: str = ""
    """Why the rank does not carry out the order; empty if it does."""
    pending: int = 0
    """First iteration of the newest change that the rank has not begun yet; 0 if there is none."""
    job_id: str = ""
    rank: int = 0
    session_id: str = ""
    begun: int | None = None
    """In the answer to a question for the position: first iteration with the change, if the rank
    has already carried out the order. A coordinator that was restarted meanwhile needs it.
    """
    note: str = ""
    """Clause about a surprising effect of the order on the rank."""


@dataclass(frozen=True, slots=True)
class ControlledRank:
    """Result of an order on one rank."""

    rank: int
    iteration: int | None
    """First iteration with the change, or the iteration that is frozen; None if the
    rank has none.
    """
    reason: str = ""
    """Why the rank has no iteration, or another one than the other ranks; else empty."""
    unconfirmed: bool = False
    """Whether the rank may have the change although it did not confirm an iteration in time."""
    note: str = ""
    """Clause about a surprising effect on the rank, such as operators that match nothing."""


@dataclass(frozen=True, slots=True)
class ControlResult:
    """Result of an order on all ranks."""

    iteration: int | None
    """Iteration that was chosen for all ranks; None if no rank can carry out the order."""
    ranks: tuple[ControlledRank, ...]
    """Result for each rank of the job."""

    @property
    def exceptions(self) -> tuple[ControlledRank, ...]:
        """Ranks that are not changed or frozen, or only later than the other ranks."""
        return tuple(each for each in self.ranks if each.reason)


_MAX_DESCRIBED_ENTRIES = 8
NO_ITERATIONS = IterationSelection("none", ())
"""Selection of no iteration, as after a stop."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Change of a plan; fields that are None leave their part of the plan as it is."""

    iterations: IterationSelection | None = None
    """New iterations; they also end what `dump_start` and `dump_stop` of the script began."""
    operators: OperatorSelection | None = None
    """New operators, for all models."""
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
    """Return the selected operators as entries of a configuration; of a long list only the first
    entries.
    """
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
    """Return whether a plan may be changed to another plan while its job runs."""
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
    """A change with the first iteration that has it and, unless it is for good, the first iteration
    after it.
    """

    change: PlanChange
    begin: int
    end: int | None = None


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """The plan of an iteration."""

    plan: DumpPlan
    ends_switch: bool = False
    """Whether earlier calls of `dump_start` and `dump_stop` by the script no longer count."""
    overrides_switch: bool = False
    """Whether calls of `dump_start` and `dump_stop` do not count in this iteration."""


class PlanSchedule:
    """The plan of each iteration of a rank; safe to use from several threads.

    Changes for good are merged into the plan; changes for some iterations are applied on top of it.
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
        """First iteration of the last change for good that has not begun; 0 if there is none."""
        with self._lock:
            return max((each.begin for each in self._waiting), default=0)

    def find_latest(self) -> DumpPlan:
        """Return the plan after all changes for good."""
        with self._lock:
            return _apply_all(self._lasting, self._waiting)

    def add(self, change: PlanChange, begin: int, iterations: int = 0) -> int:
        """Add a change, for `iterations` iterations or (0) for good; return the first iteration
        that has it.

        The running iteration is never changed.
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

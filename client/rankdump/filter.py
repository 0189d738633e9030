"""Room 2: whether a tensor is kept, and why a run kept none.

Pure: no clock, no disk, no socket; cached per operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Operators
from rankdump.contract.selection import (
    Verdict,
    device_verdict,
    matched_name,
    operator_verdict,
    side_verdict,
)
from rankdump.values import Decision

KEEP = Decision(True)
# Call numbers make names; a loop without steps must not grow the cache for ever.
_CACHED_NAMES = 1 << 16
_NONE = Operators(everything=False)


class Filter:
    """A plan's selection of operators and sides, asked by name."""

    def __init__(self, plan: DumpPlan) -> None:
        self._plan = plan
        self._marks: dict[int, frozenset[str]] = {}
        self._unmatched = _entries(plan.selection.operators)
        self._asked = self._selected = False
        # Marks alone differ from graph to graph.
        self._by_graph = plan.selection.operators.marked
        self._decided: dict[Side, dict[tuple[str, int | None] | str, Decision]]
        self._decided = {side: {} for side in Side}

    @property
    def asked(self) -> bool:
        """Whether any operator was asked for."""
        return self._asked

    @property
    def selected(self) -> bool:
        """Whether any operator that was asked for is selected, with one side of it at least."""
        return self._selected

    @property
    def marked(self) -> bool:
        """Whether the script marked any operator."""
        return any(self._marks.values())

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Entries of `kernels` that no operator matched so far, as the configuration has them."""
        return tuple(self._unmatched)

    def mark(self, graph: int, names: frozenset[str]) -> None:
        """Say which scopes and parameters of a graph the script marked with `set_dump`."""
        if self._marks.get(graph) != names:
            self._marks[graph] = names
            for known in self._decided.values():
                known.clear()

    def decide(self, op_name: str, side: Side, graph: int | None = None) -> Decision:
        """Decide on the tensors on one side of an operator; None stands for any graph."""
        known = self._decided[side]
        place = (op_name, graph) if self._by_graph else op_name
        decision = known.get(place)
        if decision is None:
            if len(known) >= _CACHED_NAMES:
                known.clear()
            decision = known[place] = self._decide(op_name, side, graph)
        return decision

    def _decide(self, op_name: str, side: Side, graph: int | None) -> Decision:
        self._asked = True
        for entry, alone in list(self._unmatched.items()):
            if operator_verdict(alone, op_name).accepted:
                self._unmatched.pop(entry, None)
        verdict = operator_verdict(self._plan.selection.operators, op_name)
        if verdict.accepted and self._plan.selection.operators.marked:
            verdict = self._mark_verdict(op_name, graph)
        if verdict.accepted:
            verdict = side_verdict(self._plan, side)
        self._selected = self._selected or verdict.accepted
        return KEEP if verdict.accepted else Decision(False, verdict.reason)

    def _mark_verdict(self, op_name: str, graph: int | None) -> Verdict:
        own = matched_name(op_name)
        names = (own, own.removeprefix("Default/").rpartition("/")[0])
        graphs = self._marks if graph is None else (graph,)
        if any(name in self._marks.get(number, ()) for number in graphs for name in names):
            return Verdict(True)
        return Verdict(False, "set_dump did not mark it")


def size_decision(byte_count: int) -> Decision:
    """Decide on a tensor by its size: MindSpore writes nothing for one without elements."""
    return KEEP if byte_count else Decision(False, "it has no elements")


def _entries(operators: Operators) -> dict[str, Operators]:
    """Return each entry of `kernels` as the configuration spells it, with itself alone."""
    if operators.everything or operators.marked:
        return {}
    return {
        **{name: replace(_NONE, names=(name,)) for name in operators.names},
        **{kind: replace(_NONE, types=(kind,)) for kind in operators.types},
        **{f"name-regex({p})": replace(_NONE, patterns=(p,)) for p in operators.patterns},
    }


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank's run amounted to, for explaining an empty dump."""

    device: int
    iterations_seen: int
    iterations_armed: int
    last_iteration: int
    operators_seen: bool
    tensors_kept: int
    tensors_lost: int = 0
    operators_selected: bool = True
    marked: bool = False
    switched: bool = False
    """The script used `dump_start` or `dump_stop`."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why nothing was dumped."""

    reason: str
    fault: bool = True
    """False when an empty dump is what the plan hopes for."""


def why_nothing(plan: DumpPlan, run: Run) -> Cause | None:
    """Return why a run dumped nothing; None when it did dump something."""
    if run.tensors_kept:
        return None
    early = _never_armed(plan, run)
    if early:
        return Cause(early)
    if not run.operators_seen:
        return Cause("no operator was observed: is the model that runs the one given to attach()?")
    if not run.operators_selected:
        return Cause(_selected_nothing(plan, run))
    if run.tensors_lost:
        return Cause(f"every one of the {run.tensors_lost} tensors that the plan selects was lost")
    if plan.selection.trigger == "overflow":
        return Cause("no overflow occurred: every output was finite", fault=False)
    if plan.selection.trigger == "exception":
        words = "no operator was seen to raise; errors in computing gradients are not traced to one"
        return Cause(words, fault=False)
    return Cause("what the plan selects handed over no tensor with elements")


def _never_armed(plan: DumpPlan, run: Run) -> str:
    device = device_verdict(plan, run.device)
    if not device.accepted:
        return device.reason
    if not run.iterations_seen:
        return "no iteration ran"
    if run.iterations_armed:
        return ""
    if run.switched:
        return "dump_stop() was called, and no dump_start() after it"
    ran = f"the {run.iterations_seen} that ran, up to {run.last_iteration}"
    return f'iteration "{plan.selection.iterations.text}" selects none of {ran}'


def _selected_nothing(plan: DumpPlan, run: Run) -> str:
    if not plan.selection.operators.marked:
        return "kernels and input_output match no operator that ran"
    if not run.marked:
        return "dump_mode 2 keeps what set_dump() marks, and it marked nothing"
    return "set_dump() and input_output match no operator that ran"

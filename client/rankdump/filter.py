"""Room 2: whether a tensor is kept.

Pure: no clock, no disk, no socket; cached per operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from rankdump.contract.key import Side
from rankdump.contract.plan import UNNAMED, DumpPlan, Operators, Watched
from rankdump.contract.selection import (
    Verdict,
    exclusion_verdict,
    listed_verdict,
    matched_name,
    named_in,
    operator_verdict,
    side_verdict,
)
from rankdump.values import Decision

KEEP = Decision(True)
# Call numbers make names; a loop without steps must not grow the cache for ever.
_CACHED_NAMES = 1 << 16
_NONE = Operators(everything=False)
_BY_PLACE = Decision(False, "it is outside of every range")
"""Of an operator that no list names: where the program stands decides."""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """What a configuration names, and no operator matched."""

    kind: str
    """In which list it stands."""
    text: str
    """As the configuration spells it."""
    model: str = ""
    """Whose list it is; empty for that of all models."""


Place: TypeAlias = "tuple[int, str, str, Side, int]"
"""Graph, type and name of an operator, side and slot of one tensor of it."""
_Matches: TypeAlias = "Callable[[str], bool]"


class Filter:
    """A plan's selection of operators and sides, asked by name."""

    def __init__(
        self,
        plan: DumpPlan,
        model_of: Callable[[int], str] = lambda graph: UNNAMED,
        in_range: Callable[[int, str], bool] = lambda graph, op_name: False,
    ) -> None:
        """`model_of` names a graph, `in_range` says whether an operator is within the plan's."""
        self._plan = plan
        self._selection = selection = plan.selection
        self._model_of, self._in_range = model_of, in_range
        self._marks: dict[int, frozenset[str]] = {}
        self._entries = dict(_entries(plan))
        self._asked = self._selected = self._left_out = False
        self._excludes = any(each.excludes for each in selection.lists)
        # Else a name has one answer, whichever graph it is of.
        self._by_graph = bool(selection.models) or any(each.marked for each in selection.lists)
        # Else all names have one answer: where each call has its own, none comes again.
        self._by_name = selection.watched is not None or any(
            not each.everything or each.marked or each.ranges for each in selection.lists
        )
        self._decided: dict[Side, dict[tuple[str, int] | str, Decision]]
        self._decided = {side: {} for side in Side}
        self._excluded: dict[Place, bool] = {}

    @property
    def asked(self) -> bool:
        """Whether any operator was asked for."""
        return self._asked

    @property
    def selected(self) -> bool:
        """Whether any operator that was asked for is selected, with one side of it at least."""
        return self._selected

    @property
    def left_out(self) -> bool:
        """Whether any tensor of a selected operator was left out."""
        return self._left_out

    @property
    def marked(self) -> bool:
        """Whether the script marked any operator."""
        return any(self._marks.values())

    @property
    def unmatched(self) -> tuple[Unmatched, ...]:
        """Entries of the plan's lists that no operator matched so far."""
        return tuple(self._entries)

    def mark(self, graph: int, names: frozenset[str]) -> None:
        """Say which scopes and parameters of a graph the script marked with `set_dump`."""
        if self._marks.get(graph) != names:
            self._marks[graph] = names
            self.forget()

    def forget(self) -> None:
        """Decide anew: something else than a name has changed."""
        self._excluded.clear()
        for known in self._decided.values():
            known.clear()

    def decide(self, op_name: str, side: Side, graph: int) -> Decision:
        """Decide on the tensors on one side of an operator."""
        known = self._decided[side]
        place = (op_name, graph) if self._by_graph else op_name if self._by_name else ""
        decision = known.get(place)
        if decision is None:
            if len(known) >= _CACHED_NAMES:
                known.clear()
            decision = known[place] = self._decide(op_name, side, graph)
        if decision is _BY_PLACE and self._in_range(graph, op_name):
            self._selected = True
            return KEEP
        return decision

    def leaves_out(self, place: Place) -> bool:
        """Return whether a tensor is left out although its operator is selected."""
        if not self._excludes:
            return False
        graph, op_type, op_name, side, slot = place
        found = self._excluded.get(place)
        if found is None:
            if len(self._excluded) >= _CACHED_NAMES:
                self._excluded.clear()
            operators = self._selection.operators_of(self._model_of(graph))
            verdict = exclusion_verdict(operators, op_type, op_name, side, slot)
            found = self._excluded[place] = not verdict.accepted
        self._left_out = self._left_out or found
        return found

    def _decide(self, op_name: str, side: Side, graph: int) -> Decision:
        self._asked = True
        model = self._model_of(graph) if self._by_graph else ""
        operators = self._selection.operators_of(model)
        self._match(op_name, "" if operators is self._selection.operators else model)
        verdict = self._verdict(operators, op_name, side, graph)
        accepted = verdict.accepted
        if accepted or operators.ranges:
            verdict = side_verdict(self._plan, side)
        self._selected = self._selected or (accepted and verdict.accepted)
        if not verdict.accepted:
            return Decision(False, verdict.reason)
        return KEEP if accepted else _BY_PLACE

    def _match(self, op_name: str, model: str) -> None:
        for entry, matches in list(self._entries.items()):
            if entry.model == model and matches(op_name):
                self._entries.pop(entry, None)

    def _verdict(self, operators: Operators, op_name: str, side: Side, graph: int) -> Verdict:
        watched = self._selection.watched
        if watched is not None:
            found = side is Side.OUTPUT and named_in(watched.nodes, op_name)
            return Verdict(found, "" if found else "it is not watched")
        if operators.ranges and not operators.everything:
            return listed_verdict(operators, op_name)
        verdict = operator_verdict(operators, op_name)
        if verdict.accepted and operators.marked:
            return self._mark_verdict(op_name, graph)
        return verdict

    def _mark_verdict(self, op_name: str, graph: int) -> Verdict:
        own = matched_name(op_name)
        names = (own, own.removeprefix("Default/").rpartition("/")[0])
        if any(name in self._marks.get(graph, ()) for name in names):
            return Verdict(True)
        return Verdict(False, "set_dump did not mark it")


def size_decision(byte_count: int) -> Decision:
    """Decide on a tensor by its size: MindSpore writes nothing for one without elements."""
    return KEEP if byte_count else Decision(False, "it has no elements")


def _entries(plan: DumpPlan) -> Iterable[tuple[Unmatched, _Matches]]:
    """Return each entry of the plan's lists, and which operators it means."""
    selection = plan.selection
    if selection.watched is not None:
        yield from _watched_entries(selection.watched)
        return
    for model, operators in (("", selection.operators), *selection.models):
        if not (operators.everything or operators.marked):
            for kind, text, alone in _lists(operators):
                yield Unmatched(kind, text, model), _listed_by(alone)


def _lists(operators: Operators) -> Iterable[tuple[str, str, Operators]]:
    """Return each entry as the configuration spells it, with itself alone."""
    one = replace(_NONE, spelt=operators.spelt)
    kind = "layer" if operators.spelt else "kernels"
    yield from ((kind, name, replace(one, names=(name,))) for name in operators.names)
    yield from ((kind, word, replace(one, types=(word,))) for word in operators.types)
    for pattern in operators.patterns:
        yield kind, f"name-regex({pattern})", replace(one, patterns=(pattern,))
    for bounds in operators.ranges:
        for word, name in zip(("begin", "end"), bounds, strict=True):
            yield f"opname_range {word}", name, replace(_NONE, names=(name,), spelt=True)


def _watched_entries(watched: Watched) -> Iterable[tuple[Unmatched, _Matches]]:
    for kind, names in (("layer", watched.layers), ("watcher_nodes", watched.nodes)):
        for name in names:
            yield Unmatched(kind, name), lambda op_name, name=name: named_in((name,), op_name)


def _listed_by(operators: Operators) -> _Matches:
    return lambda op_name: listed_verdict(operators, op_name).accepted

"""Selection of tensors by the plan: lists, marks, sides and exclusions, cached per operator, and
the ranges of operators that the program enters and leaves.

A range goes from the first of two operators to the second, both included, in the order in which
operators begin: an operator that began before the range is outside, even if it ends within. A range
is passed once per iteration and model. A gradient or a recomputed call belongs to its operator.

Pure: no clock, no disk, no network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from rankdump._core.bounded_cache import remember
from rankdump._core.plan import (
    UNNAMED_MODEL,
    DumpPlan,
    OperatorSelection,
    TensorSelection,
    WatchedOperators,
)
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorDecision
from rankdump._core.selection import (
    SelectionVerdict,
    decide_exclusion,
    decide_listed_operator,
    decide_operator,
    decide_side,
    is_named_in,
    names_operators,
    strip_scope_prefix,
)

KEEP_DECISION = TensorDecision(True)
# Call numbers are part of names, so a training loop that never calls `step` would make the cache
# grow without end.
_MAX_CACHED_NAMES = 1 << 16
_MAX_COMPARED_NAMES = 1 << 17
"""Limit of the number of names times the number of entries that are compared, because the job runs
meanwhile.
"""
_MAX_NAMED_ENTRIES = 5
_NO_OPERATORS = OperatorSelection(everything=False)
_BY_RANGE = TensorDecision(False, "the operator is outside every opname_range")
"""Decision on an operator that no list names; it is selected only while it is in a range."""


MODEL_KIND = "model_name"
"""Kind of an entry that is a model: it is matched when any operator of the model ran."""
EXCLUSION_KINDS = ("optype_blacklist", "opname_blacklist")


@dataclass(frozen=True, slots=True)
class UnmatchedEntry:
    """Entry of a configuration that no operator matched, or no selected tensor."""

    kind: str
    """Configuration list that has the entry; `MODEL_KIND` for a model."""
    text: str
    """Text of the entry in the configuration."""
    model: str = ""
    """Model that the list is for; empty for the list of all models."""


TensorSlot: TypeAlias = "tuple[int, str, str, TensorSide, int]"
"""Graph, operator type, operator name, side and slot of one tensor."""
_NameMatcher: TypeAlias = "Callable[[str], bool]"


class RecordFilter:
    """The selection of a plan: operators by name, and the sides of each."""

    def __init__(
        self,
        plan: DumpPlan,
        model_of: Callable[[int], str] = lambda graph: UNNAMED_MODEL,
        in_range: Callable[[int, str], bool] = lambda graph, op_name: False,
    ) -> None:
        """`model_of` returns the name of a graph's model; `in_range` returns whether an operator is
        in a range.
        """
        self._model_of, self._in_range = model_of, in_range
        self._marks: dict[int, frozenset[str]] = {}
        self.has_decided = False
        """Whether any operator was decided on so far."""
        self.has_selected = False
        """Whether at least one side of any operator was selected so far."""
        self.has_excluded = False
        """Whether any tensor of a selected operator was excluded so far."""
        self.models: dict[str, None] = {}
        """Models of which operators were decided on, where the plan names models."""
        self.use_plan(plan)

    def use_plan(self, plan: DumpPlan) -> None:
        """Decide as another plan says from now on; marks that the script set stay."""
        self._plan = plan
        self._selection = selection = plan.selection
        self._entries = dict(_list_entries(plan))
        self._exclusions = dict(_list_exclusions(selection))
        self.excludes = any(each.has_exclusions for each in selection.operator_lists)
        """Whether any tensor may be excluded; if not, `is_excluded` need not be called."""
        # If decisions do not depend on the graph, a name has one decision for all graphs.
        self._by_graph = bool(selection.models) or any(
            each.marked for each in selection.operator_lists
        )
        # If decisions do not depend on the name either, one decision per side is enough: in an API
        # dump names never repeat, so a cache by name would be useless.
        self._by_name = selection.watched is not None or any(
            not each.everything or each.marked or each.ranges for each in selection.operator_lists
        )
        self._decided: dict[TensorSide, dict[tuple[str, int] | str, TensorDecision]]
        self._decided = {side: {} for side in TensorSide}
        self._excluded: dict[TensorSlot, bool] = {}
        self._names: dict[int, bool] = {}

    @property
    def has_marks(self) -> bool:
        """Whether the script marked any operator with `set_dump`."""
        return any(self._marks.values())

    @property
    def unmatched(self) -> tuple[UnmatchedEntry, ...]:
        """Entries of the plan's lists that nothing matched so far.

        A model of which nothing ran stands for its own entries.
        """
        absent = {entry.model for entry in self._entries if entry.kind == MODEL_KIND}
        entries = (each for each in self._entries if each.model not in absent)
        models = (each for each in self._entries if each.kind == MODEL_KIND)
        left_out = self._exclusions if self.has_selected else ()
        return (*models, *entries, *(each for each in left_out if each.model not in absent))

    @property
    def op_names(self) -> set[str]:
        """Names of operators that were decided on; called from any thread."""
        places = [place for known in self._decided.values() for place in list(known)]
        names = (place if isinstance(place, str) else place[0] for place in places)
        return set(filter(None, names))

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Set the scopes and parameters of a graph that the script marked with `set_dump`."""
        if self._marks.get(graph) != names:
            self._marks[graph] = names
            self.clear_cache()

    def clear_cache(self) -> None:
        """Forget all decisions, because something other than a name has changed."""
        self._excluded.clear()
        self._names.clear()
        for known in self._decided.values():
            known.clear()

    def decide(self, op_name: str, side: TensorSide, graph: int) -> TensorDecision:
        """Decide on the tensors on one side of an operator."""
        known = self._decided[side]
        place = (op_name, graph) if self._by_graph else op_name if self._by_name else ""
        decision = known.get(place)
        if decision is None:
            decision = remember(known, place, self._decide(op_name, side, graph), _MAX_CACHED_NAMES)
        if decision is _BY_RANGE and self._in_range(graph, op_name):
            self.has_selected = True
            return KEEP_DECISION
        return decision

    def names_operators(self, graph: int) -> bool:
        """Return whether the plan selects operators of a graph individually instead of
        all of them.
        """
        found = self._names.get(graph)
        if found is None:
            selection = self._selection
            listed = names_operators(selection.get_operators(self._model_of(graph)))
            found = self._names[graph] = listed or selection.watched is not None
        return found

    def is_excluded(self, place: TensorSlot) -> bool:
        """Return whether a tensor is excluded although its operator is selected."""
        if not self.excludes:
            return False
        graph, op_type, op_name, side, slot = place
        excluded = self._excluded.get(place)
        if excluded is None:
            operators = self._selection.get_operators(self._model_of(graph))
            self._match_exclusions(place, operators)
            verdict = decide_exclusion(operators, op_type, op_name, side, slot)
            excluded = remember(self._excluded, place, not verdict.accepted, _MAX_CACHED_NAMES)
        self.has_excluded = self.has_excluded or excluded
        return excluded

    def _decide(self, op_name: str, side: TensorSide, graph: int) -> TensorDecision:
        self.has_decided = True
        model = self._model_of(graph) if self._by_graph else ""
        if model:
            self.models[model] = None
        operators = self._selection.get_operators(model)
        self._match(op_name, "" if operators is self._selection.operators else model)
        verdict = self._find_verdict(operators, op_name, side, graph)
        accepted = verdict.accepted
        if accepted or operators.ranges:
            verdict = decide_side(self._plan, side)
        self.has_selected = self.has_selected or (accepted and verdict.accepted)
        if not verdict.accepted:
            return TensorDecision(False, verdict.reason)
        return KEEP_DECISION if accepted else _BY_RANGE

    def _match(self, op_name: str, model: str) -> None:
        for entry, matches in list(self._entries.items()):
            if entry.model == model and matches(op_name):
                self._entries.pop(entry, None)

    def _match_exclusions(self, place: TensorSlot, operators: OperatorSelection) -> None:
        graph, op_type, op_name, side, slot = place
        model = "" if operators is self._selection.operators else self._model_of(graph)
        for entry, alone in list(self._exclusions.items()):
            if entry.model == model:
                verdict = decide_exclusion(alone, op_type, op_name, side, slot)
                if not verdict.accepted:
                    self._exclusions.pop(entry, None)

    def _find_verdict(
        self, operators: OperatorSelection, op_name: str, side: TensorSide, graph: int
    ) -> SelectionVerdict:
        watched = self._selection.watched
        if watched is not None:
            found = side is TensorSide.OUTPUT and is_named_in(watched.nodes, op_name)
            return SelectionVerdict(found, "" if found else "the operator is not watched")
        if operators.ranges and not operators.everything:
            return decide_listed_operator(operators, op_name)
        verdict = decide_operator(operators, op_name)
        if verdict.accepted and operators.marked:
            return self._find_mark_verdict(op_name, graph)
        return verdict

    def _find_mark_verdict(self, op_name: str, graph: int) -> SelectionVerdict:
        own = strip_scope_prefix(op_name)
        names = (own, own.removeprefix("Default/").rpartition("/")[0])
        if any(name in self._marks.get(graph, ()) for name in names):
            return SelectionVerdict(True)
        return SelectionVerdict(False, "set_dump did not mark the operator")


def describe_unmatched(operators: OperatorSelection, names: Collection[str]) -> str:
    """Return a clause about the entries of a list that match none of these operator names.

    The clause is empty if all entries match, if no name is known, or if there is too much to
    compare.
    """
    entries = [] if operators.everything else list(_list_operators(operators))
    if not names or len(names) * len(entries) > _MAX_COMPARED_NAMES:
        return ""
    unmatched = [text for _, text, alone in entries if not any(map(_make_matcher(alone), names))]
    if not unmatched:
        return ""
    listed = ", ".join(map(repr, unmatched[:_MAX_NAMED_ENTRIES]))
    more = len(unmatched) - _MAX_NAMED_ENTRIES
    listed += f" and {more} more" if more > 0 else ""
    verb = "matches" if len(unmatched) == 1 else "match"
    return f"{listed} {verb} none of the {len(names):,} operators that it has seen so far"


def _list_entries(plan: DumpPlan) -> Iterable[tuple[UnmatchedEntry, _NameMatcher]]:
    """Return each entry of the plan's lists, with a matcher of its operators."""
    selection = plan.selection
    if selection.watched is not None:
        yield from _list_watched_entries(selection.watched)
        return
    for model, operators in (("", selection.operators), *selection.models):
        if model not in ("", UNNAMED_MODEL):  # arrays without a model need not be there
            yield UnmatchedEntry(MODEL_KIND, model, model), _match_any_name
        if not (operators.everything or operators.marked):
            for kind, text, alone in _list_operators(operators):
                yield UnmatchedEntry(kind, text, model), _make_matcher(alone)


def _match_any_name(op_name: str) -> bool:
    return True


def _list_exclusions(
    selection: TensorSelection,
) -> Iterable[tuple[UnmatchedEntry, OperatorSelection]]:
    """Return each entry of what is left out, with a selection that leaves out nothing else."""
    for model, operators in (("", selection.operators), *selection.models):
        for kind, entries in zip(
            EXCLUSION_KINDS, (operators.without_types, operators.without_names), strict=True
        ):
            by_type = kind == EXCLUSION_KINDS[0]
            for each in entries:
                positions = f" {', '.join(each.positions)}" if each.positions else ""
                alone = OperatorSelection(
                    without_types=(each,) if by_type else (),
                    without_names=() if by_type else (each,),
                )
                yield UnmatchedEntry(kind, f"{each.name}{positions}", model), alone


def _list_operators(operators: OperatorSelection) -> Iterable[tuple[str, str, OperatorSelection]]:
    """Return each entry with its list and its text in the configuration, and a selection of this
    entry alone.
    """
    one = replace(_NO_OPERATORS, spelt=operators.spelt)
    kind = "layer" if operators.spelt else "kernels"
    yield from ((kind, name, replace(one, names=(name,))) for name in operators.names)
    yield from ((kind, word, replace(one, types=(word,))) for word in operators.types)
    for pattern in operators.patterns:
        yield kind, f"name-regex({pattern})", replace(one, patterns=(pattern,))
    for bounds in operators.ranges:
        for word, name in zip(("begin", "end"), bounds, strict=True):
            yield f"opname_range {word}", name, replace(_NO_OPERATORS, names=(name,), spelt=True)


def _list_watched_entries(
    watched: WatchedOperators,
) -> Iterable[tuple[UnmatchedEntry, _NameMatcher]]:
    for kind, names in (("layer", watched.layers), ("watcher_nodes", watched.nodes)):
        for name in names:
            yield (
                UnmatchedEntry(kind, name),
                lambda op_name, name=name: is_named_in((name,), op_name),
            )


def _make_matcher(operators: OperatorSelection) -> _NameMatcher:
    return lambda op_name: decide_listed_operator(operators, op_name).accepted


_MAX_REMEMBERED_OPERATORS = 1 << 16
"""Limit for a training loop that never calls `step`, in which every call number makes a
new name.
"""


class RangePosition(Enum):
    """Position of the program relative to a range."""

    BEFORE = auto()
    WITHIN = auto()
    BEHIND = auto()
    NOWHERE = auto()
    """The last operator of the range ran before its first, so the range is empty."""


@dataclass(slots=True)
class _RangeProgress:
    """Progress of a range in one graph during the running iteration."""

    first: str
    last: str
    position: RangePosition = RangePosition.BEFORE

    def advance_to(self, op_name: str) -> bool:
        """Advance the range to an operator that begins; return whether the operator is in it."""
        first, last = is_named_in((self.first,), op_name), is_named_in((self.last,), op_name)
        before = self.position
        if before is RangePosition.BEFORE and (first or last):
            self.position = RangePosition.WITHIN if first else RangePosition.NOWHERE
        within = self.position is RangePosition.WITHIN
        if within and last:
            self.position = RangePosition.BEHIND
        return within


class OperatorRanges:
    """Ranges of operators in one rank's models; safe to use from several threads."""

    def __init__(
        self,
        selection: TensorSelection,
        model_of: Callable[[int], str],
        warn: Callable[[str], None],
    ) -> None:
        """`model_of` returns the name of a graph's model."""
        self._model_of, self._warn = model_of, warn
        self._lock = threading.Lock()
        self._graphs: dict[int, list[_RangeProgress]] = {}
        self._inside: set[tuple[int, str]] = set()
        self.use_selection(selection)

    def use_selection(self, selection: TensorSelection) -> None:
        """Use the ranges of another selection; the caller calls `restart` afterwards."""
        self._selection = selection
        self.has_ranges = any(operators.ranges for operators in selection.operator_lists)
        """Whether there is any range; if not, `enter_operator` need not be called."""

    def restart(self) -> None:
        """Restart all ranges; called when an iteration begins or the script switches dumping."""
        with self._lock:
            self._graphs.clear()
            self._inside.clear()

    def enter_operator(self, graph: int, op_name: str) -> None:
        """Advance all ranges to an operator that begins."""
        with self._lock:
            ranges = self._graphs.get(graph)
            if ranges is None:
                operators = self._selection.get_operators(self._model_of(graph))
                ranges = [_RangeProgress(first, last) for first, last in operators.ranges]
                self._graphs[graph] = ranges
            # A list and no generator: every range must advance, so `any` must not stop early.
            within = [self._advance(each, op_name) for each in ranges]
            if True in within:
                self._remember(graph, op_name)

    def is_in_range(self, graph: int, op_name: str) -> bool:
        """Return whether an operator of the running iteration is in a range."""
        inside = self._inside
        return (graph, op_name) in inside or (graph, strip_scope_prefix(op_name)) in inside

    def _advance(self, progress: _RangeProgress, op_name: str) -> bool:
        before = progress.position
        within = progress.advance_to(op_name)
        name = f"opname_range {progress.first} to {progress.last}"
        if before is RangePosition.BEFORE and progress.position is RangePosition.NOWHERE:
            self._warn(
                f"{name}: the last operator ran before the first, so nothing in the range is dumped"
            )
        elif before is RangePosition.BEHIND and is_named_in((progress.first,), op_name):
            self._warn(
                f"{name}: the first operator ran again after the last; only one pass is dumped"
            )
        return within

    def _remember(self, graph: int, op_name: str) -> None:
        if len(self._inside) < _MAX_REMEMBERED_OPERATORS:
            self._inside.add((graph, op_name))
        else:
            self._warn(
                f"more than {_MAX_REMEMBERED_OPERATORS} operators are in an opname_range: "
                "further ones are not dumped"
            )

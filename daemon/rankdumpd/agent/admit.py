"""Whether a tensor is taken, from its head alone. Pure: no clock, no disk, no network."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rankdump.contract import selection, statistics
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows, TensorKind
from rankdump.contract.key import Side
from rankdump.contract.plan import UNNAMED, DumpPlan
from rankdump.contract.selection import YES, Verdict
from rankdumpd.agent.policy import Room, room_reason

MOST_REMEMBERED_BYTES = 4 << 20
"""Of one session: ten thousand names of the usual length, or fewer that are longer."""
_ANSWER_BYTES = 192
"""What an answer takes besides the texts that it is about."""
_INPUT = Side.INPUT


class Admission:
    """What one rank's plan, and the room there is, say of its tensors; each reason is a word that
    is counted.

    It remembers what it said of an operator, a side and an element type: the same ones come with
    every step. For one thread at a time.
    """

    def __init__(self, plan: DumpPlan, device: int) -> None:
        self._plan = plan
        self._device_taken = selection.device_verdict(plan, device).accepted
        self._iteration: tuple[int, bool, str] = (-1, False, "")
        lists = plan.selection.lists
        # Else what is said of an operator is the same for all of its slots, and for all models.
        self._by_tensor = bool(plan.selection.models) or any(each.excludes for each in lists)
        self._remembered: dict[tuple[object, ...], str] = {}
        self._remembered_bytes = 0

    def of_record(self, head: RecordHead, room: Room) -> Verdict:
        """Decide on a record that brings its elements."""
        reason = (
            self._iteration_reason(head.iteration, head.switched_on)
            or self._kind_reason(head.kind, head.kind.model, False)
            or room_reason(room, head.byte_count)
        )
        return Verdict(False, reason) if reason else YES

    def of_rows(self, rows: FigureRows, room: Room) -> Mapping[str, Sequence[int]]:
        """Return the places of the rows of figures that are not taken, by reason."""
        common = self._iteration_reason(rows.iteration, rows.switched_on)
        if common:
            return {common: range(len(rows))} if rows.kinds else {}
        low, net_name = room_reason(room, 0), self._plan.output.net_name
        refused: defaultdict[str, list[int]] = defaultdict(list)
        for place, kind in enumerate(rows.kinds):
            model = net_name or kind.model or UNNAMED
            reason = self._kind_reason(kind, model, True) or low
            if reason:
                refused[reason].append(place)
        return refused

    def _iteration_reason(self, iteration: int, switched_on: bool) -> str:
        if (iteration, switched_on) != self._iteration[:2]:
            self._iteration = (iteration, switched_on, self._find_reason(iteration, switched_on))
        return self._iteration[2]

    def _find_reason(self, iteration: int, switched_on: bool) -> str:
        if not self._device_taken:
            return "device_excluded"
        if not switched_on and not selection.iteration_verdict(self._plan, iteration).accepted:
            return "iteration_excluded"
        return ""

    def _kind_reason(self, kind: TensorKind, model: str, figures: bool) -> str:
        asked = (kind.op_name, kind.side is _INPUT, kind.dtype, figures)
        if self._by_tensor:
            asked = (*asked, model, kind.op_type, kind.slot)
        reason = self._remembered.get(asked)
        if reason is None:
            reason = self._selection_reason(kind, model) or self._type_reason(kind.dtype, figures)
            self._remember(asked, reason)
        return reason

    def _remember(self, asked: tuple[object, ...], reason: str) -> None:
        size = _ANSWER_BYTES + sum(sys.getsizeof(each) for each in asked if isinstance(each, str))
        if self._remembered_bytes + size > MOST_REMEMBERED_BYTES:
            self._remembered.clear()
            self._remembered_bytes = 0
        self._remembered[asked] = reason
        self._remembered_bytes += size

    def _selection_reason(self, kind: TensorKind, model: str) -> str:
        name, side, watched = kind.op_name, kind.side, self._plan.selection.watched
        if not selection.side_verdict(self._plan, side).accepted:
            return "side_excluded"
        if watched is not None:
            taken = side is not _INPUT and selection.watch_verdict(watched, name).accepted
            return "" if taken else "operator_excluded"
        operators = self._plan.selection.operators_of(model)
        if not selection.operator_verdict(operators, name).accepted:
            return "operator_excluded"
        verdict = selection.exclusion_verdict(operators, kind.op_type, name, side, kind.slot)
        return "" if verdict.accepted else "tensor_excluded"

    def _type_reason(self, dtype: str, figures: bool) -> str:
        if dtype not in ELEMENT_TYPES:
            return "unsupported_dtype"
        content = self._plan.content
        if figures:
            known = not content.statistics or statistics.countable(dtype)
            return "" if known else "no_statistics"
        return "no_statistics" if content.saved == "statistic" else ""

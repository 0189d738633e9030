"""Which operators lie within the plan's ranges, as the program of a rank runs. Pure.

A range goes from the first of two operators to the second, both included, in the order in which
operators begin: one that began earlier lies outside, even if it ends within. It is met once in an
iteration and a model. A gradient or a recomputed call goes with its operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from rankdump.contract.plan import Selection
from rankdump.contract.selection import matched_name, named_in

_REMEMBERED = 1 << 16
"""Call numbers make names; a loop without steps must not be remembered for ever."""


class Standing(Enum):
    """Where the program is, seen from a range."""

    BEFORE = auto()
    WITHIN = auto()
    BEHIND = auto()
    NOWHERE = auto()
    """The end came first: there is no such range."""


@dataclass(slots=True)
class _Range:
    """A range in one graph, in the running iteration."""

    first: str
    last: str
    standing: Standing = Standing.BEFORE

    def takes(self, op_name: str) -> bool:
        """Go on to an operator that begins; return whether it lies within."""
        first, last = named_in((self.first,), op_name), named_in((self.last,), op_name)
        before = self.standing
        if before is Standing.BEFORE and (first or last):
            self.standing = Standing.WITHIN if first else Standing.NOWHERE
        within = self.standing is Standing.WITHIN
        if within and last:
            self.standing = Standing.BEHIND
        return within


class Ranges:
    """The ranges of one rank's models; safe to use from several threads."""

    def __init__(
        self, selection: Selection, model_of: Callable[[int], str], warn: Callable[[str], None]
    ) -> None:
        """`model_of` names a graph."""
        self._selection = selection
        self.any = any(operators.ranges for operators in selection.lists)
        """Whether there is any; without one nobody need tell which operators begin."""
        self._model_of, self._warn = model_of, warn
        self._lock = threading.Lock()
        self._graphs: dict[int, list[_Range]] = {}
        self._inside: set[tuple[int, str]] = set()

    def restart(self) -> None:
        """Begin anew: with an iteration, or where the script switched dumping."""
        with self._lock:
            self._graphs.clear()
            self._inside.clear()

    def entered(self, graph: int, op_name: str) -> None:
        """Go on to an operator that begins."""
        with self._lock:
            ranges = self._graphs.get(graph)
            if ranges is None:
                ranges = self._graphs[graph] = self._ranges_of(graph)
            # Every one of them goes on, whichever has the operator.
            within = [self._takes(each, op_name) for each in ranges]
            if True in within:
                self._remember(graph, op_name)

    def holds(self, graph: int, op_name: str) -> bool:
        """Return whether an operator of the running iteration began within a range."""
        inside = self._inside
        return (graph, op_name) in inside or (graph, matched_name(op_name)) in inside

    def _ranges_of(self, graph: int) -> list[_Range]:
        operators = self._selection.operators_of(self._model_of(graph))
        return [_Range(first, last) for first, last in operators.ranges]

    def _takes(self, stretch: _Range, op_name: str) -> bool:
        before = stretch.standing
        within = stretch.takes(op_name)
        name = f"opname_range {stretch.first} to {stretch.last}"
        if before is Standing.BEFORE and stretch.standing is Standing.NOWHERE:
            self._warn(f"{name}: the second ran before the first, so nothing of it is kept")
        elif before is Standing.BEHIND and named_in((stretch.first,), op_name):
            self._warn(f"{name}: the first ran again after the second, only one stretch is kept")
        return within

    def _remember(self, graph: int, op_name: str) -> None:
        if len(self._inside) < _REMEMBERED:
            self._inside.add((graph, op_name))
        else:
            self._warn(f"more than {_REMEMBERED} operators lie within a range: further ones do not")

"""Selection of tensors by rank, graph, iteration, operator and side, from keyword filters. Pure: no
disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from numbers import Integral
from typing import Protocol, TypedDict

from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._core.scope_names import format_scope_name
from rankdump._core.selection import find_idle_segments, parse_iterations
from rankdump.errors import ConfigError

_FILTER_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "rank": ((Integral,), "a number"),
    "graph": ((Integral,), "a number"),
    "iteration": ((Integral, str), 'a number, or text such as "0|2-3"'),
    "operator": ((str, re.Pattern), "a glob, or an expression of re.compile"),
    "op_type": ((str,), "a glob"),
    "side": ((str,), '"input" or "output"'),
    "attempt": ((Integral,), "a number"),
}


class Named(Protocol):
    """Object with a name: an entry of a tree, or a row of a table."""

    @property
    def key(self) -> TensorKey:
        """Key with the names as the tree spells them."""
        ...

    @property
    def op_type(self) -> str:
        """Type of the operator; the raw type if it is available."""
        ...

    @property
    def op_name(self) -> str:
        """Scope name of the operator; the raw name if it is available."""
        ...


class Filters(TypedDict, total=False):
    """Keyword filters; an omitted filter selects everything."""

    rank: int
    graph: int
    iteration: int | str
    """One number, or the grammar of the configuration: `0|2-3`."""
    operator: str | re.Pattern[str]
    """A glob over the whole name or type, or an expression found anywhere in the name."""
    op_type: str
    """A glob over the whole type."""
    side: str
    """`input` or `output`."""
    attempt: int
    """Attempt of a job that was restarted; it selects sessions, and is not part of a `Query`."""


@dataclass(frozen=True, slots=True)
class Query:
    """Selection of tensors; a field that is None selects all."""

    rank: int | None = None
    graph: int | None = None
    iterations: IterationSelection | None = None
    """If set, constants are left out, because they belong to no iteration."""
    glob: str | None = None
    """Glob that has to match the operator's whole name, its short name for people, or its type."""
    pattern: re.Pattern[str] | None = None
    """Expression that has to be found anywhere in the operator's name."""
    op_type: str | None = None
    """Glob that has to match the operator's whole type."""
    side: TensorSide | None = None

    @property
    def empty(self) -> bool:
        """Whether the query selects everything."""
        return self == Query()

    @property
    def places(self) -> Query:
        """This query restricted to rank, graph and iterations."""
        return Query(rank=self.rank, graph=self.graph, iterations=self.iterations)

    def keeps(self, tensor: Named) -> bool:
        """Return whether a tensor is selected."""
        key = tensor.key
        return (
            self.keeps_place(key.rank, key.graph, None if key.constant else key.iteration)
            and self.side in (None, key.side)
            and (self.op_type is None or fnmatchcase(tensor.op_type, self.op_type))
            and self.keeps_operator(tensor.op_type, tensor.op_name, tensor.key.op_name)
        )

    def keeps_operator(self, op_type: str, op_name: str, filed: str = "") -> bool:
        """Return whether an operator is selected; `filed` is its name as files spell it."""
        names = (op_name, filed or sanitize_name(op_name))
        return (self.glob is None or _matches_glob(op_type, names, self.glob)) and (
            self.pattern is None or any(map(self.pattern.search, names))
        )

    def keeps_place(
        self, rank: int, graph: int, iteration: int | None, *, dated: bool = True
    ) -> bool:
        """Return whether a folder is selected; the iteration of constants is None.

        Without `dated`, the folder may contain any iteration, so the filter of iterations is
        ignored.
        """
        return (
            self.rank in (None, rank)
            and self.graph in (None, graph)
            and (
                self.iterations is None
                or not dated
                or (iteration is not None and iteration in self.iterations)
            )
        )

    def keeps_iteration(self, rank: int, iteration: int) -> bool:
        """Return whether an iteration of a rank is selected, whatever its graphs."""
        return self.rank in (None, rank) and (
            self.iterations is None or iteration in self.iterations
        )


def selected(filters: Filters) -> Query:
    """Return the query for keyword filters; ConfigError for a value that is not allowed."""
    for name, value in filters.items():
        _check_filter(name, value)
    operator = filters.get("operator")
    iteration, side = filters.get("iteration"), filters.get("side")
    return Query(
        rank=filters.get("rank"),
        graph=filters.get("graph"),
        iterations=None if iteration is None else _parse_iterations(iteration),
        glob=operator if isinstance(operator, str) else None,
        pattern=operator if isinstance(operator, re.Pattern) else None,
        op_type=filters.get("op_type"),
        side=None if side is None else _parse_side(side),
    )


def _check_filter(name: str, value: object) -> None:
    # Checked here, because scripts may have no type checker, and a filter with a wrong name would
    # select everything.
    if name not in _FILTER_TYPES:
        raise ConfigError("filter", name, value, ", ".join(_FILTER_TYPES))
    kinds, allowed = _FILTER_TYPES[name]
    if value is not None and not isinstance(value, kinds):
        raise ConfigError("filter", name, value, allowed)


def _parse_iterations(given: int | str) -> IterationSelection:
    if not isinstance(given, str):
        return IterationSelection(str(given), ((int(given), int(given)),))
    iterations = parse_iterations(given)
    # In a configuration, segments that match nothing are allowed; here they are a mistake.
    if iterations is None or find_idle_segments(given):
        raise ConfigError("filter", "iteration", given, 'a number, or text such as "0|2-3"')
    return iterations


def _parse_side(given: str) -> TensorSide:
    try:
        return TensorSide(given)
    except ValueError:
        raise ConfigError("filter", "side", given, '"input" or "output"') from None


def _matches_glob(op_type: str, names: tuple[str, str], glob: str) -> bool:
    return (
        any(fnmatchcase(name, glob) for name in (op_type, *names))
        or fnmatchcase(names[1], _sanitize_glob(glob))
        or fnmatchcase(_shorten_name(names[0]), glob)
    )


_sanitize_glob = lru_cache(maxsize=8)(sanitize_name)
_shorten_name = lru_cache(maxsize=1 << 14)(format_scope_name)

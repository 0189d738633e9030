"""Selection of tensors by rank, graph, iteration, operator and side, from keyword filters, and the
short spelling of many numbers as `0-3,7`. Pure: no disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from numbers import Integral
from typing import Protocol, TypedDict

from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorKey, TensorSide, sanitize_name
from rankdump._core.selection import parse_iterations
from rankdump.errors import ConfigError

_FILTER_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "rank": ((Integral,), "a number"),
    "graph": ((Integral,), "a number"),
    "iteration": ((Integral, str), 'a number, or text such as "0|2-3"'),
    "operator": ((str, re.Pattern), "a glob, or an expression of re.compile"),
    "op_type": ((str,), "a glob"),
    "side": ((str,), '"input" or "output"'),
}


class Named(Protocol):
    """A tensor with a name: a file, or a row of a table."""

    @property
    def key(self) -> TensorKey:
        """Its place, with the names as the tree spells them."""
        ...

    @property
    def op_type(self) -> str:
        """Type of the operator, raw where it is known."""
        ...

    @property
    def op_name(self) -> str:
        """Scope name of the operator, raw where it is known."""
        ...


class Filters(TypedDict, total=False):
    """Keyword filters; one that is not given selects everything."""

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


@dataclass(frozen=True, slots=True)
class Query:
    """Selection of tensors; None selects all."""

    rank: int | None = None
    graph: int | None = None
    iterations: IterationSelection | None = None
    """When set, constants are left out: they belong to no iteration."""
    glob: str | None = None
    """Over the operator's whole name or its type."""
    pattern: re.Pattern[str] | None = None
    """Found anywhere in the operator's name."""
    op_type: str | None = None
    """Glob over the operator's whole type."""
    side: TensorSide | None = None

    @property
    def empty(self) -> bool:
        """Whether the query selects everything."""
        return self == Query()

    @property
    def places(self) -> Query:
        """The same for ranks, graphs and iterations alone."""
        return Query(rank=self.rank, graph=self.graph, iterations=self.iterations)

    def keeps(self, tensor: Named) -> bool:
        """Decide on one tensor."""
        key = tensor.key
        return (
            self.keeps_place(key.rank, key.graph, None if key.constant else key.iteration)
            and self.side in (None, key.side)
            and (self.op_type is None or fnmatchcase(tensor.op_type, self.op_type))
            and self.keeps_operator(tensor.op_type, tensor.op_name, tensor.key.op_name)
        )

    def keeps_operator(self, op_type: str, op_name: str, filed: str = "") -> bool:
        """Decide on an operator by its type and name; `filed` is its name as files spell it."""
        names = (op_name, filed or sanitize_name(op_name))
        return (self.glob is None or _matches_glob(op_type, names, self.glob)) and (
            self.pattern is None or any(map(self.pattern.search, names))
        )

    def keeps_place(
        self, rank: int, graph: int, iteration: int | None, *, dated: bool = True
    ) -> bool:
        """Decide on a folder; None is the iteration of constants.

        One that does not say the iteration may hold any: without `dated`, it does not matter.
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


def selected(filters: Filters) -> Query:
    """Return the query that keyword filters mean; ConfigError says what is allowed."""
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
    # Filters come from scripts that no type checker has seen; a wrong one would keep everything.
    if name not in _FILTER_TYPES:
        raise ConfigError("filter", name, value, ", ".join(_FILTER_TYPES))
    kinds, allowed = _FILTER_TYPES[name]
    if value is not None and not isinstance(value, kinds):
        raise ConfigError("filter", name, value, allowed)


def _parse_iterations(given: int | str) -> IterationSelection:
    if not isinstance(given, str):
        return IterationSelection(str(given), ((int(given), int(given)),))
    iterations = parse_iterations(given)
    if iterations is None:
        raise ConfigError("filter", "iteration", given, 'a number, or text such as "0|2-3"')
    return iterations


def _parse_side(given: str) -> TensorSide:
    try:
        return TensorSide(given)
    except ValueError:
        raise ConfigError("filter", "side", given, '"input" or "output"') from None


def _matches_glob(op_type: str, names: tuple[str, str], glob: str) -> bool:
    return any(fnmatchcase(name, glob) for name in (op_type, *names)) or fnmatchcase(
        names[1], _sanitise_glob(glob)
    )


@lru_cache(maxsize=8)
def _sanitise_glob(glob: str) -> str:
    return sanitize_name(glob)


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending runs as `0-3,7`; an empty text for no numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(_format_run(low, high) for low, high in runs)


def missing_ranges(numbers: Iterable[int], count: int) -> str:
    """Return which of the numbers below a count are not among these; any count costs the same."""
    ends = (-1, *sorted(number for number in set(numbers) if number < count), count)
    gaps = [(low + 1, high - 1) for low, high in pairwise(ends) if high - low > 1]
    return ",".join(_format_run(low, high) for low, high in gaps)


def _format_run(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"

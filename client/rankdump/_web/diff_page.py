"""Comparison of two trees, or of two ranks or iterations of one: where a difference starts, and the
pairs of tensors in the order of execution, by verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankdump._analysis.compare.report import TensorVerdict
from rankdump._analysis.compare.report_summary import VERDICTS_BY_SEVERITY
from rankdump._web.comparison_process import ComparisonRequest, ComparisonState
from rankdump._web.comparison_view import RowSelection
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import PageKind
from rankdump._web.page_parameters import PageParameters, ParameterError

_NUMBERS = ("rank_a", "rank_b", "iteration_a", "iteration_b")
_MAX_ROW = 1 << 40
ComparisonLook = Callable[[ComparisonRequest, RowSelection], ComparisonState]


class DiffRequest(NamedTuple):
    """What is compared, and which rows are shown."""

    a: int | None
    """Number of the tree; None when nothing is compared yet."""
    b: int | None
    rank_a: int | None
    rank_b: int | None
    iteration_a: int | None
    iteration_b: int | None
    noise: int | None
    verdicts: tuple[str, ...]
    """The worst first; empty for those that do not agree."""
    row: int | None
    """Number of the first row on the page."""

    def get_values(self) -> dict[str, object]:
        """Return the parameters of the comparison, without those of rows."""
        return {
            name: value
            for name, value in self._asdict().items()
            if name not in ("verdicts", "row") and value is not None
        }


class VerdictChip(NamedTuple):
    """A verdict of the filter."""

    verdict: str
    pairs: int
    is_chosen: bool
    toggled: str
    """Parameter `verdicts` with the other choice about this one."""


@dataclass(frozen=True, slots=True)
class DiffPage:
    """Content of the page."""

    request: DiffRequest
    trees: tuple[str, ...]
    comparison: ComparisonState | None
    """None when nothing is compared yet."""
    chips: tuple[VerdictChip, ...]


def make_diff_page(sources: Sequence[DumpSource], look: ComparisonLook) -> PageKind[DiffRequest]:
    """Return the page; `look` returns how far a comparison is."""

    def parse_diff(parameters: PageParameters) -> DiffRequest:
        return _parse_diff(parameters, len(sources))

    def build_diff(_: DumpSource, request: DiffRequest) -> DiffPage:
        trees = tuple(str(source.root) for source in sources)
        if request.a is None or request.b is None:
            return DiffPage(request, trees, None, ())
        noise = None if request.noise is None else sources[request.noise].root
        numbers = {name: getattr(request, name) for name in _NUMBERS}
        roots = sources[request.a].root, sources[request.b].root
        asked = ComparisonRequest(*roots, **numbers, noise=noise)
        chosen = frozenset(request.verdicts or _list_disagreeing())
        found = look(asked, RowSelection(chosen, request.row or 0))
        return DiffPage(request, trees, found, _make_chips(found, chosen))

    return PageKind("/diff", "diff.html", "Diff", parse_diff, build_diff, fragment="diff_part.html")


def _parse_diff(parameters: PageParameters, trees: int) -> DiffRequest:
    chosen = {
        name: parameters.read_number(name, high=max(0, trees - 1)) for name in ("a", "b", "noise")
    }
    numbers = {name: parameters.read_number(name) for name in _NUMBERS}
    verdicts = _parse_verdicts(parameters.read_text("verdicts", longest=200))
    row = parameters.read_number("row", high=_MAX_ROW)
    request = DiffRequest(**chosen, **numbers, verdicts=verdicts, row=row)
    _check_sides(request)
    return request


def _parse_verdicts(text: str) -> tuple[str, ...]:
    known = [verdict.value for verdict in VERDICTS_BY_SEVERITY]
    words = text.split(",") if text else []
    for word in words:
        if word not in known:
            raise ParameterError("verdicts", text, f"words with commas, of {', '.join(known)}")
    return tuple(word for word in known if word in words)


def _check_sides(request: DiffRequest) -> None:
    if request.a is None and request.b is None:
        return
    for name in ("a", "b"):
        if getattr(request, name) is None:
            raise ParameterError(name, "", "the number of a tree, as a and b belong together")
    own = request.a, request.rank_a, request.iteration_a
    if own == (request.b, request.rank_b, request.iteration_b):
        allowed = "another tree, rank_b or iteration_b than those of a"
        raise ParameterError("b", str(request.b), allowed)


def _list_disagreeing() -> list[str]:
    return [verdict.value for verdict in TensorVerdict if not verdict.agrees]


def _make_chips(found: ComparisonState, chosen: frozenset[str]) -> tuple[VerdictChip, ...]:
    if found.summary is None:
        return ()
    known = [verdict.value for verdict in VERDICTS_BY_SEVERITY]
    return tuple(
        VerdictChip(
            each.verdict,
            each.pairs,
            each.verdict in chosen,
            ",".join(word for word in known if word in chosen ^ {each.verdict}),
        )
        for each in found.summary.counts
    )

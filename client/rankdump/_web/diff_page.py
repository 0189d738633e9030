"""Page that compares two trees, or two ranks or iterations of one tree: where a difference starts,
and the pairs of tensors in execution order, by verdict. Pairs of names that a person chose are in
the address, and in a file for `rankdump diff --map`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankdump._analysis.compare.call_names import parse_name_mapping
from rankdump._analysis.compare.report_summary import VERDICTS_BY_SEVERITY
from rankdump._core.tolerance_text import TOLERANCE_FORM, parse_tolerances
from rankdump._web.comparison_process import ComparisonRequest, ComparisonState
from rankdump._web.comparison_view import RowSelection
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import MAX_TEXT, PageKind, PageParameters, ParameterError
from rankdump.errors import ConfigError

_VERDICTS = [verdict.value for verdict in VERDICTS_BY_SEVERITY]
_DISAGREEING = [verdict.value for verdict in VERDICTS_BY_SEVERITY if not verdict.agrees]
_NUMBERS = (*("rank_a", "rank_b", "iteration_a", "iteration_b", "attempt_a", "attempt_b"),)
_JOBS = ("job_a", "job_b")
_MAX_ROW = 1 << 40
_MAX_JOB = 512
_MAX_TOLERANCES = 1024
ComparisonLook = Callable[[ComparisonRequest, RowSelection], ComparisonState]


class DiffRequest(NamedTuple):
    """The trees and settings of a comparison, and which rows are shown."""

    a: int | None
    """Number of the tree on side a; None if nothing is compared yet."""
    b: int | None
    rank_a: int | None
    rank_b: int | None
    iteration_a: int | None
    iteration_b: int | None
    attempt_a: int | None
    attempt_b: int | None
    job_a: str
    job_b: str
    noise: int | None
    rtol: float | None
    atol: float | None
    tolerance: str
    """Largest normal errors by name: one `PATTERN=ERROR` per line."""
    unshard: str
    """`1` to join ranks, `0` to compare rank with rank; empty for the choice that fits the jobs."""
    pairs: NamePairs
    """Names that a person paired."""
    pick_a: str
    """Name of a call on side a that a person will pair with one of side b."""
    pick_b: str
    verdicts: tuple[str, ...]
    """Verdicts that are shown, the worst first; empty for those that do not agree."""
    row: int | None
    """Number of the first row on the page."""
    opened: int | None
    """Number of the row for which facts of both sides are shown."""

    def get_values(self) -> dict[str, object]:
        """Return the parameters of the comparison, without those that select rows."""
        values = self._asdict() | {"pairs": format_pairs(self.pairs)}
        own = "verdicts", "row", "opened", "pick_a", "pick_b"
        return {
            name: value
            for name, value in values.items()
            if name not in own and value not in (None, "")
        }

    def get_row_values(self) -> dict[str, object]:
        """Return all parameters, for forms that change one of them."""
        own = {"verdicts": ",".join(self.verdicts), "row": self.row, "pick_a": self.pick_a}
        named = self.get_values() | own | {"pick_b": self.pick_b}
        return {name: value for name, value in named.items() if value not in (None, "")}


class VerdictChip(NamedTuple):
    """One verdict in the filter of verdicts."""

    verdict: str
    pairs: int
    is_chosen: bool
    toggled: str
    """Parameter `verdicts` if this verdict is switched on or off."""


@dataclass(frozen=True, slots=True)
class DiffPage:
    """Content of the page."""

    request: DiffRequest
    trees: tuple[str, ...]
    comparison: ComparisonState | None
    """State of the comparison; None if nothing is compared yet."""
    chips: tuple[VerdictChip, ...]
    has_attempts: bool
    """Whether a chosen tree has several jobs or attempts."""


def make_diff_page(sources: Sequence[DumpSource], look: ComparisonLook) -> PageKind[DiffRequest]:
    """Return the page; `look` returns the state of a comparison."""

    def parse_diff(parameters: PageParameters) -> DiffRequest:
        return _parse_diff(parameters, len(sources))

    def build_diff(_: DumpSource, request: DiffRequest) -> DiffPage:
        trees = tuple(str(source.root) for source in sources)
        # Only the chosen trees are asked, because there may be many trees and each takes memory.
        sides = {request.a, request.b} - {None}
        has_attempts = any(len(sources[side or 0].attempts) > 1 for side in sides)
        if request.a is None or request.b is None:
            return DiffPage(request, trees, None, (), has_attempts)
        asked = _make_request(request, [source.root for source in sources])
        chosen = frozenset(request.verdicts or _DISAGREEING)
        found = look(asked, RowSelection(chosen, request.row or 0, request.opened))
        return DiffPage(request, trees, found, _make_chips(found, chosen), has_attempts)

    return PageKind("/diff", "diff.html", "Diff", parse_diff, build_diff, fragment="diff_part.html")


def _make_request(request: DiffRequest, roots: Sequence[Path]) -> ComparisonRequest:
    kept = {name: getattr(request, name) for name in (*_NUMBERS, *_JOBS, "rtol", "atol")}
    return ComparisonRequest(
        roots[request.a or 0],
        roots[request.b or 0],
        **kept,
        noise=None if request.noise is None else roots[request.noise],
        tolerance=_split_lines(request.tolerance),
        mapping=request.pairs,
        unshard=request.unshard == "1" if request.unshard else None,
    )


def _parse_diff(parameters: PageParameters, trees: int) -> DiffRequest:
    high = max(0, trees - 1)
    chosen = {name: parameters.read_number(name, high=high) for name in ("a", "b", "noise")}
    numbers = {name: parameters.read_number(name) for name in _NUMBERS}
    request = DiffRequest(
        **chosen,
        **numbers,
        **{name: parameters.read_text(name, longest=_MAX_JOB) for name in _JOBS},
        rtol=parameters.read_amount("rtol"),
        atol=parameters.read_amount("atol"),
        tolerance=_parse_tolerance(parameters.read_text("tolerance", longest=_MAX_TOLERANCES)),
        unshard=parameters.read_choice("unshard", ("1", "0"), ""),
        **parse_pairs(parameters)._asdict(),
        verdicts=_parse_verdicts(parameters.read_text("verdicts", longest=200)),
        row=parameters.read_number("row", high=_MAX_ROW),
        opened=parameters.read_number("opened", high=_MAX_ROW),
    )
    _check_sides(request)
    return request


def _split_lines(text: str) -> tuple[str, ...]:
    return tuple(stripped for line in text.splitlines() if (stripped := line.strip()))


def _parse_tolerance(text: str) -> str:
    try:
        found = parse_tolerances(_split_lines(text))
    except ValueError as error:
        raise ParameterError("tolerance", str(error), f"lines {TOLERANCE_FORM}") from None
    for pattern, value in found.items():
        if not isinstance(value, str) and not 0 <= value < math.inf:
            raise ParameterError("tolerance", f"{pattern}={value}", "an error of 0 or more")
    return text


def _parse_verdicts(text: str) -> tuple[str, ...]:
    words = text.split(",") if text else []
    for word in words:
        if word not in _VERDICTS:
            raise ParameterError("verdicts", text, f"words with commas, of {', '.join(_VERDICTS)}")
    return tuple(word for word in _VERDICTS if word in words)


def _check_sides(request: DiffRequest) -> None:
    if request.a is None and request.b is None:
        return
    for name in ("a", "b"):
        if getattr(request, name) is None:
            raise ParameterError(name, "", "the number of a tree, as a and b belong together")
    own = request.a, request.rank_a, request.iteration_a, request.attempt_a, request.job_a
    other = request.b, request.rank_b, request.iteration_b, request.attempt_b, request.job_b
    if own == other:
        allowed = "another tree, rank_b or iteration_b than those of a"
        raise ParameterError("b", str(request.b), allowed)


def _make_chips(found: ComparisonState, chosen: frozenset[str]) -> tuple[VerdictChip, ...]:
    if found.summary is None:
        return ()
    return tuple(
        VerdictChip(
            each.verdict,
            each.pairs,
            each.verdict in chosen,
            ",".join(word for word in _VERDICTS if word in chosen ^ {each.verdict}),
        )
        for each in found.summary.counts
    )


NamePairs: TypeAlias = "tuple[tuple[str, str], ...]"
"""Names on side a, each with the name on side b."""
_FORM = "a JSON object of names of a with names of b, or lines name_a,name_b"
_FULL = (
    f"pairs of together {MAX_TEXT:,} characters: download the mapping, and use rankdump diff --map"
)


class PairChoice(NamedTuple):
    """Pairs of names, and the name on one side that has no partner yet."""

    pairs: NamePairs
    pick_a: str
    pick_b: str


def parse_pairs(parameters: PageParameters) -> PairChoice:
    """Return the choice that an address contains. Names that are picked on both sides become a
    pair; the pair with the number `drop` is removed.
    """
    pairs = _parse_text(parameters.read_text("pairs"))
    pick_a, pick_b = parameters.read_text("pick_a"), parameters.read_text("pick_b")
    dropped = parameters.read_number("drop", high=MAX_TEXT)
    pairs = tuple(pair for at, pair in enumerate(pairs) if at != dropped)
    if not (pick_a and pick_b):
        return PairChoice(pairs, pick_a, pick_b)
    others = (pair for pair in pairs if pair[0] != pick_a and pair[1] != pick_b)
    pairs = (*others, (pick_a, pick_b))
    if len(format_pairs(pairs)) > MAX_TEXT:
        raise ParameterError("pick_a", pick_a, _FULL)
    return PairChoice(pairs, "", "")


def _parse_text(text: str) -> NamePairs:
    try:
        found = parse_name_mapping("pairs", text)
        # a text from JSON may have surrogates
        _ = [name.encode() for pair in found.items() for name in pair]
        return tuple(found.items())
    except (ConfigError, UnicodeEncodeError):
        raise ParameterError("pairs", text, _FORM) from None


def format_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the pairs as a text for an address; empty if there are none."""
    return json.dumps(dict(pairs), separators=(",", ":")) if pairs else ""


def format_mapping_file(pairs: Sequence[tuple[str, str]]) -> bytes:
    """Return the content of a file for `rankdump diff --map`."""
    return f"{json.dumps(dict(pairs), indent=1)}\n".encode()

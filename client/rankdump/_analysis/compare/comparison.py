"""Comparison of two dumps: the dumps are opened, their tensors are paired and compared, and the
origins of differences are searched for. This module connects the other modules of the package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, repeat
from operator import attrgetter
from os import PathLike, fspath
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from rankdump._analysis.compare.call_names import read_name_mapping
from rankdump._analysis.compare.call_pairs import check_pairing_rules
from rankdump._analysis.compare.card_findings import compare_cards
from rankdump._analysis.compare.compare_pool import compare_pairs
from rankdump._analysis.compare.coverage_findings import (
    MISSING_FILE_ENDING,
    SideCoverage,
    find_uneven_microbatches,
    list_coverage_findings,
    mark_undecided_rows,
)
from rankdump._analysis.compare.error_tolerance import collect_errors, judge_rows
from rankdump._analysis.compare.joined_programs import (
    count_microbatches,
    have_same_layout,
    join_programs,
)
from rankdump._analysis.compare.origin_search import (
    ComparedDumps,
    find_origins,
    resolve_nonfinite_rows,
)
from rankdump._analysis.compare.programs import add_fingerprints, read_programs
from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    ComparisonSettings,
    DumpedProgram,
    ElementTolerances,
    NamedTolerance,
    PairOutcome,
    ProgramPlace,
    TensorPair,
)
from rankdump._analysis.compare.tensor_pairs import pair_program_tensors, pair_programs
from rankdump._analysis.reader.dump import Dump, open_dump
from rankdump._analysis.reader.manifests import retired_sentences
from rankdump._analysis.reader.query import Filters
from rankdump._analysis.reader.tree_walk import collector_paused
from rankdump._core.determinism import PERTURB_SETTING
from rankdump._core.number_ranges import ranges
from rankdump._core.tolerance_text import ROUNDING
from rankdump.errors import ConfigError, CorruptedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

DumpSource: TypeAlias = "str | PathLike[str] | Dump"
PairsComparer: TypeAlias = Callable[[Sequence[TensorPair], ComparisonSettings], list[PairOutcome]]
"""Function such as `compare_pairs`, with its number of processes already chosen."""
_ProgramPairs: TypeAlias = "Sequence[tuple[DumpedProgram, DumpedProgram]]"
MIN_TABLED_TENSORS = 20_000
"""Number of statistics from which on comparing columns saves more time than loading
pyarrow takes.
"""


class _GivenDump(NamedTuple):
    """A dump of one job, as the caller gave it."""

    dump: Dump
    own: Mapping[str, int | None]
    """Filters that apply to this dump only."""
    choice: str = ""
    """Which job was chosen, if there are several and the caller selected none."""


@dataclass(frozen=True, slots=True)
class DumpSide:
    """One of the two dumps, with those of its programs that are compared."""

    label: str
    dump: Dump
    programs: list[DumpedProgram]
    coverage: SideCoverage = field(default_factory=SideCoverage)


def compare(
    a: DumpSource,
    b: DumpSource,
    *,
    rank_a: int | None = None,
    rank_b: int | None = None,
    iteration_a: int | None = None,
    iteration_b: int | None = None,
    attempt_a: int | None = None,
    attempt_b: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    match: str | Iterable[str] = ("exact", "type", "sequence"),
    mapping: Mapping[str, str] | str | PathLike[str] | None = None,
    msaccucmp: bool = False,
    processes: int | None = None,
    dask: str = "",
    unshard: bool | None = None,
    noise: Sequence[DumpSource] = (),
    tolerance: Mapping[str, float | str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **filters: Unpack[Filters],
) -> ComparisonReport:
    """Compare two dumps tensor by tensor, and find where they diverge.

    `a` and `b` are trees of any layout, or parts selected with `where`; `b` is the reference. With
    `rank_a` and `rank_b`, or `iteration_a` and `iteration_b`, two ranks or iterations are compared,
    also of one tree; filters are those of `Dump.where` and apply to both sides. Of several jobs in
    a tree the last is compared unless `Dump.of_job` selects one, of a restarted job the last
    attempt. Two elements are close when
    `abs(a - b) <= atol + rtol * abs(b)`, 1e-4 each by default; NaN equals NaN only with
    `equal_nan`. `noise` are runs that should agree with `b`: then their errors are the tolerances.
    Without them, and without `rtol` and `atol`, ranks that are joined are judged by the error of
    rounding. `tolerance` gives by globs of names the largest normal error of a tensor, relative to
    the reference, or `"rounding"`; the last that matches holds. `match` names the rules that
    pair calls, in their order; the rule of `mapping`, a mapping of names or a file of one (lines
    `name_a,name_b`, or a JSON object), comes first. `unshard` joins the ranks of each side first,
    by default where the jobs had different numbers of ranks or micro-batches, or other layouts, and
    no ranks are selected. `processes` bounds the local pool; the workers of the scheduler `dask`
    see all trees. `progress` takes the number of pairs compared and the total. ConfigError for a
    setting that is not allowed, CorruptedError when nothing can be compared.
    """
    started, notes = time.monotonic(), list[str]()
    tolerances = _make_tolerances(rtol, atol, equal_nan=equal_nan)
    named = _make_named_tolerances(tolerance or {})
    settings = _make_settings(tolerances, named, match, mapping, msaccucmp)
    own = {"rank": rank_a, "iteration": iteration_a, "attempt": attempt_a}
    other = {"rank": rank_b, "iteration": iteration_b, "attempt": attempt_b}
    given = _open_dumps([(a, own), (b, other), *((each, other) for each in noise)])
    compare_all = partial(compare_pairs, processes=processes, dask=dask, progress=progress)
    report = None if unshard else _compare_tables(given, filters, settings, notes, compare_all)
    if report is None:
        sides, is_joined = _select_sides(given, filters, unshard, notes)
        by_rounding = is_joined and rtol is None and atol is None and not noise
        labels = tuple(map(_name_noise, sides[2:]))
        settings = replace(settings, noise=labels, by_rounding=by_rounding)
        report = _compare_sides(sides, settings, notes, compare_all, is_joined=is_joined)
    seconds = time.monotonic() - started
    return replace(report, notes=tuple(dict.fromkeys(notes)), seconds=seconds)


@collector_paused()
def build_report(
    sides: Sequence[DumpSide],
    settings: ComparisonSettings,
    rows: Sequence[ComparisonRow],
    programs: _ProgramPairs,
    *,
    is_joined: bool = False,
) -> ComparisonReport:
    """Return the report of rows, without notes and time. It includes the origins of differences,
    what the sides lack, and what differs between the run cards for the ranks and iterations in the
    rows.
    """
    a, b, *_ = sides
    places = {own.place: its.place for own, its in programs if own.place != its.place}
    of_all, of_ranks = find_origins(rows, ComparedDumps(a.dump, b.dump, places))
    pairs = [(own, places.get(own, own)) for own in dict.fromkeys(row.place for row in rows)]
    cards = compare_cards(
        a.dump.find_cards_of({iteration for (_, iteration), _ in pairs}),
        b.dump.find_cards_of({iteration for _, (_, iteration) in pairs}),
        pairs,
        is_joined=is_joined,
    )
    return ComparisonReport(
        a=a.label,
        b=b.label,
        settings=settings,
        rows=tuple(rows),
        origins=of_all,
        rank_origins=of_ranks,
        places_of_b=places,
        card_findings=(*list_coverage_findings(a.coverage, b.coverage), *cards),
        is_joined=is_joined,
    )


def _name_noise(side: DumpSide) -> str:
    """Return the name of a noise run, with a remark about what was perturbed in it according to its
    run cards.
    """
    first = {program.iteration for program in side.programs[:1]}
    settings = (each.card.settings for each in side.dump.find_cards_of(first).cards)
    moved = sorted({found for each in settings if (found := each.get(PERTURB_SETTING))})
    return f"{side.label} (input moved by {', '.join(moved)})" if moved else side.label


def _compare_tables(
    given: Sequence[_GivenDump],
    common: Filters,
    settings: ComparisonSettings,
    notes: list[str],
    compare_all: PairsComparer,
) -> ComparisonReport | None:
    """Return a report without notes and time if both sides have so many statistics without tensors
    that columns are worth their start; else None. Iterations with tensors are compared as programs.
    """
    dumps = [each.dump for each in given]
    has_filter = any(value is not None for value in common.values())
    if has_filter or settings.named or not _are_worth_columns(given):
        return None
    try:
        from rankdump._analysis.compare.column_comparison import compare_columns
        from rankdump._analysis.compare.tree_columns import read_comparable_columns
    except ImportError:  # if pyarrow is not installed, or cannot be imported
        return None
    with collector_paused():
        columns = read_comparable_columns(dumps[0], dumps[1])
        filed = {number for dump in dumps for number in dump.filed_iterations}
        if columns is None or (filed and any(dump.retired or dump.problems for dump in dumps)):
            return None
        at = [
            {each[:2]: each for each in side.places if each.iteration not in filed}
            for side in columns
        ]
        told = [problem for dump in dumps for problem in dump.problems]
        sides = [_list_side_programs(*each, filed, told) for each in zip(dumps, at, strict=True)]
        sides = _add_fingerprints(sides, told)
        programs = _pair_sides(sides[0], sides[1], told)
        if any((own.iteration in filed) != (its.iteration in filed) for own, its in programs):
            return None
        notes += told
        pairs = [
            (at[0][own.rank, own.iteration], at[1][its.rank, its.iteration])
            for own, its in programs
            if own.iteration not in filed
        ]
        rows = compare_columns(*columns, pairs, settings)
    others = [each for each in programs if each[0].iteration in filed]
    rows += measure_programs(others, settings, compare_all)
    return build_report(sides, settings, _finish_rows(rows), programs)


def _are_worth_columns(given: Sequence[_GivenDump]) -> bool:
    """Return whether two whole dumps are compared that have many tensors without files."""
    selected = [number for each in given for number in each.own.values() if number is not None]
    if len(given) > 2 or selected or any(each.dump.is_filtered for each in given):
        return False
    # The first access reads the whole tree.
    with collector_paused():
        return all(each.dump.tabled_tensors >= MIN_TABLED_TENSORS for each in given)


def _list_side_programs(
    dump: Dump, places: Iterable[ProgramPlace], filed: Iterable[int], notes: list[str]
) -> DumpSide:
    """Return a side with empty programs for `places`, except for those iterations whose programs
    are read.
    """
    programs = [DumpedProgram(*place, ()) for place in places]
    wanted = "|".join(map(str, sorted(filed)))
    if wanted:
        programs += read_programs(dump.where(iteration=wanted), notes)
    programs.sort(key=attrgetter("rank", "iteration"))
    return DumpSide(str(dump.root), dump, programs)


def _compare_sides(
    sides: Sequence[DumpSide],
    settings: ComparisonSettings,
    notes: list[str],
    compare_all: PairsComparer,
    *,
    is_joined: bool,
) -> ComparisonReport:
    """Return a report on the first two sides without notes and time; any further sides are noise
    runs, which give the tolerances.
    """
    left, right, *noises = sides
    programs = _pair_sides(left, right, notes)
    rows = _finish_rows(measure_programs(programs, settings, compare_all))
    errors = [
        collect_errors(measure_programs(_pair_sides(each, right, []), settings, compare_all))
        for each in noises
    ]
    rows = judge_rows(rows, settings, errors)
    rows = mark_undecided_rows(rows, left.coverage, right.coverage)
    return build_report(sides, settings, rows, programs, is_joined=is_joined)


def _select_sides(
    given: Sequence[_GivenDump],
    common: Filters,
    unshard: bool | None,
    notes: list[str],
) -> tuple[list[DumpSide], bool]:
    """Return both sides, each with its own filters applied, and whether their ranks are joined.
    Ranks are joined if that is requested, or if the layouts differ.
    """
    with collector_paused():
        sides = [_select_side(each, common, notes) for each in given]
        if unshard is None:
            ranks = [each.own["rank"] for each in given] + [common.get("rank")]
            has_ranks = any(rank is not None for rank in ranks)
            others = [side for side in sides if side is not sides[1]]
            unshard = not has_ranks and any(
                _have_different_layouts(each, sides[1]) for each in others
            )
        sides = _add_fingerprints(sides, notes, is_joined=unshard)
        return (_join_ranks(sides, notes) if unshard else sides), unshard


def _add_fingerprints(
    sides: list[DumpSide], notes: list[str], *, is_joined: bool = False
) -> list[DumpSide]:
    """Return the sides with fingerprints, if these can say more than digests: when ranks are
    joined, or when a tensor has no file.
    """
    if not any(side.dump.has_fingerprints for side in sides):
        return sides
    tensors = (each for side in sides for program in side.programs for each in program.tensors)
    if not is_joined and all(tensor.entry for tensor in tensors):
        return sides
    return [
        replace(side, programs=add_fingerprints(side.programs, side.dump.read_fingerprints(notes)))
        for side in sides
    ]


def _have_different_layouts(a: DumpSide, b: DumpSide) -> bool:
    """Return whether the jobs had different numbers of ranks, meshes or micro-batches, as far as
    known. A rank that is only missing in a tree makes no difference.
    """
    sizes = {side.dump.world_size for side in (a, b)} - {0}
    return len(sizes) > 1 or not have_same_layout(a.programs, b.programs)


def _join_ranks(sides: Sequence[DumpSide], notes: list[str]) -> list[DumpSide]:
    counts = {count_microbatches(side.programs) for side in sides}
    joined: list[DumpSide] = []
    for side in sides:
        ranks = sorted({each.rank for each in side.programs})
        size = side.dump.world_size
        missing = tuple(sorted({*range(size)} - {*ranks}))
        coverage = replace(side.coverage, is_joined=True, missing_ranks=missing, world_size=size)
        programs, outside = join_programs(side.programs, notes, joins_microbatches=len(counts) > 1)
        told = [f"ranks {ranges(ranks)} joined"] if len(ranks) > 1 else []
        told += [f"{outside:,} calls outside of micro-batches left out"] if outside else []
        label = f"{side.label} ({', '.join(told)})" if told else side.label
        joined.append(replace(side, label=label, programs=programs, coverage=coverage))
    return joined


def _make_tolerances(
    rtol: float | None, atol: float | None, *, equal_nan: bool
) -> ElementTolerances:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError("compare", name, value, "a number of 0 or more")
    default = ElementTolerances()
    return ElementTolerances(
        default.rtol if rtol is None else rtol, default.atol if atol is None else atol, equal_nan
    )


def _make_named_tolerances(given: Mapping[str, float | str]) -> tuple[NamedTolerance, ...]:
    found: list[NamedTolerance] = []
    for pattern, error in given.items():
        if error == ROUNDING:
            found.append(NamedTolerance(pattern, None))
        elif isinstance(error, (int, float)) and 0 <= error < math.inf:
            found.append(NamedTolerance(pattern, error))
        else:
            allowed = f"a relative error of 0 or more, or {ROUNDING!r}"
            raise ConfigError("compare", f"tolerance of {pattern!r}", error, allowed)
    return tuple(found)


def _make_settings(
    tolerances: ElementTolerances,
    named: tuple[NamedTolerance, ...],
    match: str | Iterable[str],
    mapping: Mapping[str, str] | str | PathLike[str] | None,
    msaccucmp: bool,
) -> ComparisonSettings:
    texts = match.split(",") if isinstance(match, str) else match
    rules = check_pairing_rules(rule.strip() for rule in texts)
    names: Mapping[str, str] = read_name_mapping(mapping) if mapping is not None else {}
    if names and "mapping" not in rules:
        rules = ("mapping", *rules)
    return ComparisonSettings(tolerances, rules, names, msaccucmp, named=named)


def _open_dumps(
    sources: Sequence[tuple[DumpSource, Mapping[str, int | None]]],
) -> list[_GivenDump]:
    """Return the dumps of the sources with their filters; for a tree with several jobs, the last
    job. A path that is given twice is read once.
    """
    open_once = cache(open_dump)
    given: list[_GivenDump] = []
    for (source, own), side in zip(sources, chain("ab", repeat("")), strict=False):
        dump = source if isinstance(source, Dump) else open_once(fspath(source))
        jobs, choice = dump.list_jobs_by_time(), ""
        if len(jobs) > 1:
            other = f": --job-{side} selects another" if side else ""
            dump, choice = dump.of_job(jobs[-1]), f" (the last of {len(jobs)} jobs{other})"
        given.append(_GivenDump(dump, own, choice))
    return given


def _select_side(source: _GivenDump, common: Filters, notes: list[str]) -> DumpSide:
    dump, own, choice = source
    given = {name: value for name, value in common.items() if value is not None}
    given.update((name, value) for name, value in own.items() if value is not None)
    if "attempt" not in given and dump.has_several_attempts:
        given["attempt"] = dump.attempts[-1]
        choice += f" (the last of attempts {ranges(dump.attempts)})"
    label = str(dump.root) + "".join(f" {name} {given[name]}" for name in own if name in given)
    label += choice
    filters = cast("Filters", given)
    left = dump.where(**filters) if filters else dump
    missing = tuple(each for each in left.problems if each.endswith(MISSING_FILE_ENDING))
    damages = tuple(each for each in left.problems if not each.endswith(MISSING_FILE_ENDING))
    notes.extend(damages)
    gone = set(left.retired)
    found = read_programs(left, notes)
    # While an iteration is being removed, only some of its files exist; its table rows are
    # complete.
    programs = [p for p in found if p.place not in gone or not any(t.entry for t in p.tensors)]
    if not programs and gone:
        why = "; ".join(retired_sentences(gone))
        raise CorruptedError(f"{dump.root}: nothing to compare: {why}")
    if not programs:
        raise _make_empty_error(dump, filters)
    coverage = SideCoverage(find_uneven_microbatches(programs), missing, damages)
    return DumpSide(label, left, programs, coverage)


def _make_empty_error(dump: Dump, filters: Filters) -> Exception:
    """Return an error that names the filter that nothing in the dump matches."""
    there: list[tuple[str, Callable[[], tuple[int, ...]]]] = [
        ("rank", lambda: dump.ranks),
        ("iteration", lambda: dump.iterations),
        ("graph", lambda: dump.graphs),
    ]
    for name, numbers in there:
        value = filters.get(name)
        if value is not None and not (isinstance(value, int) and value in numbers()):
            return ConfigError(str(dump.root), name, value, ", ".join(map(str, numbers())))
    if filters:
        asked = ", ".join(f"{name} {value!r}" for name, value in filters.items())
        return CorruptedError(f"{dump.root}: nothing to compare: no tensor has {asked}")
    return CorruptedError(f"{dump.root}: nothing to compare: the dump has no tensor")


def measure_programs(
    programs: _ProgramPairs,
    settings: ComparisonSettings,
    compare_all: PairsComparer,
) -> list[ComparisonRow]:
    """Return the rows for the tensors of pairs of programs, in execution order."""
    with collector_paused():
        rows = pair_program_tensors(programs, settings)
    outcomes = compare_all([row.pair for row in rows], settings)
    return [row._replace(outcome=each) for row, each in zip(rows, outcomes, strict=True)]


def _pair_sides(
    a: DumpSide, b: DumpSide, notes: list[str]
) -> list[tuple[DumpedProgram, DumpedProgram]]:
    """Return the programs of both sides in pairs; CorruptedError when there is no pair."""
    noted: list[str] = []
    gone = {"gone_a": a.dump.retired, "gone_b": b.dump.retired}
    programs = pair_programs(a.programs, b.programs, noted, **gone)
    notes += noted
    if not programs:
        why = "; ".join(("they have no rank and iteration in common", *noted))
        raise CorruptedError(f"{a.label} and {b.label}: nothing to compare: {why}")
    return programs


@collector_paused()
def _finish_rows(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows in the order of a report, with everything filled in that decides on an
    origin.
    """
    sort_rows(rows)
    return resolve_nonfinite_rows(rows)


def sort_rows(rows: list[ComparisonRow]) -> None:
    """Sort rows in the order of a report; the tensors of a call stay together."""
    rows.sort(key=attrgetter("iteration", "position", "rank"))

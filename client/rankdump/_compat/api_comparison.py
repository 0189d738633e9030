"""Comparison of two dumps of API calls, `api_dump_compare`, with troubleshooter's rows and numbers.
It prints tables and writes CSV files.

It reads the dumps of releases 1.0.13 to 1.0.18, and those of rankdump's `api_dump_start`. The
alternative `rankdump diff` has rounded numbers, the origin of a difference, and an exit code.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rankdump._analysis.compare.api_tables import ApiTableSet, write_api_tables
from rankdump._analysis.compare.report import ElementTolerances
from rankdump._compat.comparison_tables import (
    ApiComparisonSettings,
    ComparedRank,
    format_table,
    make_step_tables,
)
from rankdump._compat.dump_files import ApiRankDump, find_rank_dumps
from rankdump._compat.dump_request import check_path
from rankdump._compat.tensor_pairs import (
    ApiDumpInfo,
    ApiDumpStep,
    group_by_call,
    group_counted_steps,
    guess_steps,
    pair_steps,
    read_dump_info,
)

_ONLY_METHOD = "recursion"


def api_dump_compare(
    origin_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str] | None = None,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-4,
    equal_nan: bool = False,
    ignore_unmatched: bool = False,
    ignore_backward: bool = False,
    convinced_match_method: str = _ONLY_METHOD,
) -> None:
    """Print the differences of two API dumps call by call; with `output_path`, write CSV files.

    Both paths contain `rank0`, and more folders if several ranks dumped. The ranks that both dumps
    have are compared; the files of ranks other than 0 have the rank in their names. The framework
    of each side is determined from its files. Elements are close if `abs(a - b) <= atol + rtol *
    abs(b)`, where b is the target. `ignore_unmatched` omits rows without a partner,
    `ignore_backward` omits gradients. `convinced_match_method` accepts only troubleshooter's
    default.

    TypeError or ValueError for wrong parameters, ValueError for a path without a dump,
    CorruptedError for a damaged info file, ExhaustedError when a file cannot be written.
    """
    _check_tolerances(rtol, atol, convinced_match_method)
    origin, target = (
        find_rank_dumps(check_path(name, path), name)
        for name, path in (("origin_path", origin_path), ("target_path", target_path))
    )
    settings = ApiComparisonSettings(
        ElementTolerances(rtol, atol, equal_nan), ignore_unmatched, ignore_backward
    )
    folder = check_path("output_path", output_path) if output_path is not None else None
    for a, b in _pair_ranks(origin, target):
        label = a.rank if len(origin) > 1 or len(target) > 1 else 0
        _compare_ranks(a, b, settings, label, folder)


def _check_tolerances(rtol: object, atol: object, method: str) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}: {value!r} is not allowed; allowed: a number from 0 on")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: {value!r} is not allowed; allowed: a number from 0 on")
    if method != _ONLY_METHOD:
        raise ValueError(
            f"convinced_match_method: {method!r} is not allowed; allowed: {_ONLY_METHOD!r}"
        )


def _pair_ranks(
    origin: Mapping[int, ApiRankDump], target: Mapping[int, ApiRankDump]
) -> list[tuple[ApiRankDump, ApiRankDump]]:
    """Return pairs of ranks: those with the same number, or the only rank of each side."""
    common = [rank for rank in origin if rank in target]
    if not common and len(origin) == len(target) == 1:
        return list(zip(origin.values(), target.values(), strict=True))
    if not common:
        raise ValueError(
            f"the dumps have no rank in common: origin_path has {_format_ranks(origin)}, "
            f"target_path has {_format_ranks(target)}"
        )
    alone = sorted(origin.keys() ^ target.keys())
    if alone:
        _print_line(f"ranks that only one dump has are omitted: {_format_ranks(alone)}")
    return [(origin[rank], target[rank]) for rank in common]


def _read_info(dump: ApiRankDump) -> ApiDumpInfo:
    """Read the info file of one rank, and print notes about what is left out."""
    found = read_dump_info(dump.info, counted=dump.counted)
    for note in found.notes:
        _print_line(note)
    listed = {tensor.name for tensor in found.tensors}
    unlisted = sum(name not in listed for name in dump.files)
    if unlisted:
        _print_line(f"{dump.info}: {unlisted} npy files that are not listed in it are omitted")
    return found


def _compare_ranks(
    a: ApiRankDump, b: ApiRankDump, settings: ApiComparisonSettings, rank: int, folder: Path | None
) -> None:
    """Compare two ranks step by step."""
    info_a, info_b = _read_info(a), _read_info(b)
    settings = replace(settings, by=_select_comparison(a, b, info_a, info_b))
    both = ((a, info_a), (b, info_b))
    side_a, side_b = (
        ComparedRank(
            dump, group_by_call(found.tensors, dump.files if settings.by == "elements" else None)
        )
        for dump, found in both
    )
    counted = info_a.counted and info_b.counted
    steps_of = group_counted_steps if counted else guess_steps
    steps, note = pair_steps(*(steps_of(found.tensors, dump.framework) for dump, found in both))
    if note or not steps:
        _print_line(note or "nothing is compared: at least one dump has no forward calls")
    repeats_a, repeats_b = (_find_repeats(dump, found, counted) for dump, found in both)
    for number, (one, other) in enumerate(steps):
        repeats = (repeats_a.get(one.number), repeats_b.get(other.number))
        parts = [(one, other), *_pair_repeats(repeats)]
        tables, problems = make_step_tables(parts, side_a, side_b, settings, rank)
        for problem in problems:
            _print_line(problem)
        _print_tables(tables, number, (one.number, other.number))
        if folder is not None:
            write_api_tables([tables], folder, number)


def _select_comparison(
    a: ApiRankDump, b: ApiRankDump, info_a: ApiDumpInfo, info_b: ApiDumpInfo
) -> str:
    """Return what is compared: elements if both sides have files, else statistics."""
    if a.files and b.files:
        return "elements"
    _print_line("at least one dump has no npy files: the statistics of the info files are compared")
    if info_a.has_no_statistics or info_b.has_no_statistics:
        _print_line("at least one dump has no statistics either: only calls are paired")
        return "nothing"
    return "statistics"


def _find_repeats(
    dump: ApiRankDump, found: ApiDumpInfo, counted: bool
) -> Mapping[int | None, ApiDumpStep]:
    """Return the recomputed calls of each step; empty if steps are guessed, because those include
    them.
    """
    if not counted:
        return {}
    steps = group_counted_steps(found.tensors, dump.framework, recomputed=True)
    return {step.number: step for step in steps}


def _pair_repeats(
    repeats: tuple[ApiDumpStep | None, ApiDumpStep | None],
) -> list[tuple[ApiDumpStep, ApiDumpStep]]:
    """Return the recomputed calls of a step if both sides have some; otherwise print
    their number.
    """
    one, other = repeats
    if one is not None and other is not None:
        return [(one, other)]
    for side, step in (("origin_path", one), ("target_path", other)):
        if step is not None:
            _print_line(f"{len(step.calls)} recomputed calls that only {side} has are omitted")
    return []


def _print_tables(tables: ApiTableSet, step: int, real: tuple[int | None, int | None]) -> None:
    """Print the tables of a step."""
    where = f"(step {step}, rank {tables.rank})" if tables.rank else f"(step {step})"
    if any(number not in (None, step) for number in real):
        _print_line(
            f"step {step} compares step {real[0]} of origin_path with step {real[1]} of target_path"
        )
    for title, table in (
        ("The APIs mapping results of the two frameworks", tables.mapping),
        ("The forward comparison results", tables.forward),
        ("The backward comparison results", tables.backward),
    ):
        if table is not None:
            sys.stdout.write(format_table(f"{title} {where}", table))


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _format_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))

"""The call that troubleshooter has: two paths in, tables out, nothing returned."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rankdump.diff.api_tables import ApiTables, write
from rankdump.diff.values import Tolerances
from rankdump.migrator.comparing import info
from rankdump.migrator.comparing.found import RankDump, find
from rankdump.migrator.comparing.info import Info
from rankdump.migrator.comparing.printed import printed
from rankdump.migrator.comparing.rows import held
from rankdump.migrator.comparing.steps import Step, counted_steps, guessed_steps, paired
from rankdump.migrator.comparing.tables import Settings, Side, step_tables

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
    """Print how two API dumps differ, call by call; write CSV files where a folder is given.

    Both paths hold `rank0`, and more when several ranks dumped: ranks that both have are compared,
    and the files of other ranks than 0 have their number in the name. The framework of each side
    follows from its files. Elements are close when `abs(a - b) <= atol + rtol * abs(b)`, b the
    target's. `ignore_unmatched` leaves rows without a partner out, `ignore_backward` the
    gradients. The last parameter exists for the sake of scripts that name the tool's default.

    ValueError for a path without a dump and for a parameter out of its range, DamagedError for an
    info file that is none, ExhaustedError when a file cannot be written.
    """
    _check(rtol, atol, convinced_match_method)
    origin, target = find(Path(origin_path), "origin_path"), find(Path(target_path), "target_path")
    settings = Settings(Tolerances(rtol, atol, equal_nan), ignore_unmatched, ignore_backward)
    folder = Path(output_path) if output_path is not None else None
    for a, b in _ranks(origin, target):
        label = a.rank if len(origin) > 1 or len(target) > 1 else 0
        _compare(a, b, settings, label, folder)


def _check(rtol: float, atol: float, method: str) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: {value!r} is not allowed; allowed: a number from 0 on")
    if method != _ONLY_METHOD:
        raise ValueError(
            f"convinced_match_method: {method!r} is not allowed; allowed: {_ONLY_METHOD!r}"
        )


def _ranks(
    origin: Mapping[int, RankDump], target: Mapping[int, RankDump]
) -> list[tuple[RankDump, RankDump]]:
    """Return which ranks are compared: the same of both, or the only ones."""
    common = [rank for rank in origin if rank in target]
    if not common and len(origin) == len(target) == 1:
        return list(zip(origin.values(), target.values(), strict=True))
    if not common:
        raise ValueError(
            f"no rank is in both: origin_path has {_listed(origin)}, target_path {_listed(target)}"
        )
    alone = sorted(origin.keys() ^ target.keys())
    if alone:
        _say(f"ranks of one side only are left out: {_listed(alone)}")
    return [(origin[rank], target[rank]) for rank in common]


def _read(dump: RankDump) -> Info:
    """Read one rank's info file, and say what of it is left out."""
    found = info.read(dump.info, counted=dump.counted)
    for note in found.notes:
        _say(note)
    listed = {tensor.name for tensor in found.tensors}
    strangers = sum(name not in listed for name in dump.files)
    if strangers:
        _say(f"{dump.info}: {strangers} npy files that it does not list are left out")
    return found


def _compare(a: RankDump, b: RankDump, settings: Settings, rank: int, folder: Path | None) -> None:
    """Compare two ranks step by step."""
    info_a, info_b = _read(a), _read(b)
    settings = replace(settings, by=_by(a, b, info_a, info_b))
    both = ((a, info_a), (b, info_b))
    side_a, side_b = (
        Side(dump, held(found.tensors, dump.files if settings.by == "elements" else None))
        for dump, found in both
    )
    counted = info_a.counted and info_b.counted
    steps_of = counted_steps if counted else guessed_steps
    steps, said = paired(*(steps_of(found.tensors, dump.framework) for dump, found in both))
    if said or not steps:
        _say(said or "one side or both have no forward calls: nothing is compared")
    repeats_a, repeats_b = (_repeats(dump, found, counted) for dump, found in both)
    for number, (one, other) in enumerate(steps):
        repeats = (repeats_a.get(one.number), repeats_b.get(other.number))
        parts = [(one, other), *_repeated(repeats)]
        tables, problems = step_tables(parts, side_a, side_b, settings, rank)
        for problem in problems:
            _say(problem)
        _show(tables, number, (one.number, other.number))
        if folder is not None:
            write([tables], folder, number)


def _by(a: RankDump, b: RankDump, info_a: Info, info_b: Info) -> str:
    """Return what is compared: elements where both sides have files, else figures."""
    if a.files and b.files:
        return "elements"
    _say("there are no npy files on both sides: figures of the info files are compared")
    if info_a.figureless or info_b.figureless:
        _say("one side has no figures either: only calls are paired")
        return "nothing"
    return "figures"


def _repeats(dump: RankDump, found: Info, counted: bool) -> Mapping[int | None, Step]:
    """Return the recomputed calls of each step; none where steps are guessed, which hold them."""
    if not counted:
        return {}
    steps = counted_steps(found.tensors, dump.framework, recomputed=True)
    return {step.number: step for step in steps}


def _repeated(repeats: tuple[Step | None, Step | None]) -> list[tuple[Step, Step]]:
    """Return the recomputed calls of a step where both sides have some; else say how many."""
    one, other = repeats
    if one is not None and other is not None:
        return [(one, other)]
    for side, step in (("origin_path", one), ("target_path", other)):
        if step is not None:
            _say(f"{len(step.calls)} recomputed calls of {side} alone are left out")
    return []


def _show(tables: ApiTables, step: int, real: tuple[int | None, int | None]) -> None:
    """Print the tables of a step."""
    where = f"(step {step}, rank {tables.rank})" if tables.rank else f"(step {step})"
    if any(number not in (None, step) for number in real):
        _say(f"step {step}: {real[0]} of origin_path, {real[1]} of target_path")
    for title, table in (
        ("The APIs mapping results of the two frameworks", tables.mapping),
        ("The forward comparison results", tables.forward),
        ("The backward comparison results", tables.backward),
    ):
        if table is not None:
            sys.stdout.write(printed(f"{title} {where}", table))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))

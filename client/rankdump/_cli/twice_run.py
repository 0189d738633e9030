"""Work of `rankdump run --twice`: two runs of the same command, each into its own tree, the
comparison of their bits, and the output. The comparison is imported on use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankdump._cli.output import print_json, print_lines
from rankdump._config.output_path import OUTPUT_VARIABLE
from rankdump._core.number_ranges import ranges
from rankdump._core.plan import IterationSelection
from rankdump._core.units import format_count

if TYPE_CHECKING:
    from rankdump._analysis.compare.exact_comparison import ExactReport

FIRST, SECOND = "first", "second"
"""Names of the two trees in the output folder."""
CONFIG_NAME = "twice.json"
REPORT_VERSION = 1
_HASH_SEED_VARIABLE = "PYTHONHASHSEED"
_LOCAL_DEVICES = 256


def make_exact_config(root: Path, iterations: IterationSelection | None) -> str:
    """Return a configuration that saves statistics and fingerprints of all operators, which tell
    different bits apart, but no elements.
    """
    common = {
        "dump_mode": 0,
        "path": str(root),
        "net_name": "Net",
        "iteration": iterations.text if iterations is not None else "all",
        "saved_data": "statistic",
        "input_output": 0,
        "kernels": [],
        "support_device": list(range(_LOCAL_DEVICES)),
    }
    switches = {"enable": True, "trans_flag": True}
    body = {
        "common_dump_settings": common,
        "e2e_dump_settings": switches,
        "rankdump": {"fingerprints": True},
    }
    return json.dumps(body)


def check_new_trees(root: Path) -> None:
    """Raise a UsageError if one of the two trees exists, because a run would continue it as another
    attempt.
    """
    for path in (root / FIRST, root / SECOND):
        if path.exists():
            raise click.UsageError(f"--twice writes two new trees, but {path} exists")


def run_twice(
    run_once: Callable[[Mapping[str, str]], int],
    environ: Mapping[str, str],
    root: Path,
    *,
    as_json: bool,
) -> int:
    """Run a job twice with the same environment and compare the trees; return the exit code.

    It is the exit code of a run that failed, else 0 if all bits are the same and 1 if not.
    `run_once` runs the job with an environment, and returns its exit code.
    """
    hashed = environ.get(_HASH_SEED_VARIABLE)
    if not hashed or hashed == "random":
        print_lines([f"rankdump: both runs have {_HASH_SEED_VARIABLE}=0"], err=True)
        environ = {**environ, _HASH_SEED_VARIABLE: "0"}
    codes: list[int] = []
    for name in (FIRST, SECOND):
        print_lines([f"rankdump: {name} run of 2"], err=True)
        codes.append(run_once({**environ, OUTPUT_VARIABLE: str(root / name)}))
        if name == FIRST and codes[0]:
            text = f"the first run ended with code {codes[0]}: there is no second one to compare"
            print_lines([f"rankdump: {text}"], err=True)
            return codes[0]
        if not (root / name).is_dir():
            text = f"the {name} run dumped nothing: there is nothing to compare"
            print_lines([f"rankdump: {text}"], err=True)
            return codes[-1] or 1
    return _report(root, codes, as_json=as_json)


def _report(root: Path, codes: list[int], *, as_json: bool) -> int:
    from rankdump._analysis.compare.exact_comparison import compare_exactly

    found = compare_exactly(root / FIRST, root / SECOND)
    if as_json:
        print_json(make_body(found, codes))
    else:
        print_lines(format_twice(found), err=True)
    if codes[1]:
        print_lines([f"rankdump: the second run ended with code {codes[1]}, not 0"], err=True)
    return codes[1] or (0 if found.is_deterministic else 1)


def format_twice(found: ExactReport) -> list[str]:
    """Return the lines about two runs: how they began, then where each rank differs first."""
    from rankdump._analysis.compare.report_text import format_origins, format_rank_origins

    report = found.report
    lines = _format_start(found) if found.differing else []
    iterations = ranges({row.iteration for row in report.rows if row.iteration >= 0})
    compared = f"{format_count(found.compared, 'tensor')} of rank {ranges(found.ranks)}"
    where = f"in iteration {iterations}" if iterations else "of constants"
    lost = " and ".join(f"{count:,}" for count in dict.fromkeys(found.dropped))
    left = f"; {lost} were dropped and not compared" if any(found.dropped) else ""
    if not found.compared:
        lines.append("nothing was compared: the runs have no rank and iteration in common")
    elif found.differing:
        verdict = "" if found.start_findings else "not deterministic: "
        lines += [
            f"{verdict}{found.differing:,} of {compared} {where} differ{left}",
            *format_origins(report),
            *format_rank_origins(report),
        ]
        same = [rank for rank in found.ranks if not _has_differing_row(found, rank)]
        lines += [f"rank {ranges(same)} has the same bits in both runs"] if same else []
    else:
        lines.append(f"deterministic: {compared} {where} have the same bits in both runs{left}")
        lines += _format_start(found)
    if found.by_statistics:
        lines.append(
            f"{format_count(found.by_statistics, 'tensor')} compared by statistics alone, which "
            "may agree where bits do not: fingerprints, a key of the section rankdump, has digests"
        )
    lines += report.notes
    lines.append(f"more: rankdump diff {report.a} {report.b}")
    return lines


def _format_start(found: ExactReport) -> list[str]:
    """Return the lines about differences before the first operator."""
    if not found.start_findings:
        return []
    names = {name for each in found.start_findings for name in (*each.names, each.subject)}
    has_seed = any("seed" in name or "random" in name for name in names)
    what = "do not have the same seed" if has_seed else "did not start alike"
    lines = [f"the runs {what}:", *(f"  {each.text}" for each in found.start_findings)]
    untold = "what follows does not tell whether the job is deterministic"
    return [*lines, untold] if found.differing else lines


def _has_differing_row(found: ExactReport, rank: int) -> bool:
    return any(row.rank == rank and not row.agrees for row in found.report.rows)


def make_body(found: ExactReport, codes: list[int]) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "version": REPORT_VERSION,
        "deterministic": found.is_deterministic,
        "codes": codes,
        "trees": [found.report.a, found.report.b],
        "start": list(map(asdict, found.start_findings)),
        "compared": found.compared,
        "differing": found.differing,
        "by_statistics": found.by_statistics,
        "dropped": list(found.dropped),
        "ranks": [_make_rank(found, rank) for rank in found.ranks],
        "notes": list(found.report.notes),
    }


def _make_rank(found: ExactReport, rank: int) -> dict[str, object]:
    origin = found.find_rank_origin(rank)
    body: dict[str, object] = {"rank": rank, "differs": _has_differing_row(found, rank)}
    if origin is None:
        return body
    first = asdict(origin.suspects[0])
    kept = ("iteration", "op_type", "backward", "reason", "source")
    return {
        **body,
        "operator": first["name_a"] or first["name_b"],
        **{name: first[name] for name in kept},
        "certain": origin.certain,
        "why": origin.ambiguity,
    }

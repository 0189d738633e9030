"""Command `rankdump fsck`: checks every byte of a tree, repairs it, and rebuilds an agent's ledger
from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click

from rankdump._analysis import fsck as tree_fsck
from rankdump._analysis.fsck.damage import DAMAGE_ADVICE, CheckReport, DamageKind
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import print_json, print_lines, show_progress
from rankdump._core.json_values import make_plain
from rankdump._core.units import format_bytes, format_count

_MAX_THREADS = 8
_MAX_LINES_SHOWN = 100


@click.command()
@click.argument("tree", type=TREE_PATH)
@click.option("--repair", is_flag=True, help="Remove leftover and duplicate files.")
@click.option(
    "--rebuild", is_flag=True, help="Rebuild an agent's ledger from the tree; excludes --repair."
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the rebuilt ledger; it must not contain a ledger yet.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Maximum number of threads; default: all cores, at most 8.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def fsck(
    *,
    tree: Path,
    repair: bool,
    rebuild: bool,
    state_dir: Path | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Check every file of TREE against its manifest.

    Sizes and checksums are compared. Every file with a problem is listed under one of these words:
    torn, missing, foreign, duplicate, leftover, unmanifested, unbalanced, manifest. Exit code 1
    when a problem was found and not repaired, or when the tree has no manifest to check it against.
    Links are never followed. A tensor is only removed when another file contains it as well.
    """
    if rebuild != (state_dir is not None):
        raise click.UsageError("--rebuild and --state-dir DIR must be given together")
    if rebuild and repair:
        raise click.UsageError("--repair and --rebuild cannot be combined: repair first")
    if repair:
        tree_fsck.check_tree_unlocked(tree)
    workers = jobs or min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    with show_progress("checking") as report_progress:
        report = tree_fsck.check_tree(tree, workers=workers, report_progress=report_progress)
    if repair:
        report = tree_fsck.repair_tree(tree, report)
    if as_json:
        clean = report.is_verifiable and not report.damages
        print_json({"tree": str(tree), "clean": clean} | make_plain(report), indent=None)
    else:
        print_lines(_format_report(tree, report))
    # `--repair` succeeds when no damage is left, even if not everything could be checked.
    code = 1 if report.damages or not (report.is_verifiable or repair) else 0
    if rebuild and state_dir is not None:
        return max(code, _rebuild_ledger(tree, state_dir))
    return code


def _format_report(tree: Path, report: CheckReport) -> list[str]:
    lines = [f"removed: {damage.path}" for damage in report.mended]
    for kind in DamageKind:
        some = [damage for damage in report.damages if damage.kind is kind]
        lines += (f"{kind.value}: {each.path}: {each.text}" for each in some[:_MAX_LINES_SHOWN])
        if some:
            more = len(some) - _MAX_LINES_SHOWN
            lines += [f"{kind.value}: {more:,} more, listed by --json"] if more > 0 else []
            lines.append(f"  {kind.value}: {DAMAGE_ADVICE[kind]}")
    lines += (*report.unchecked, *report.retired, *report.table)
    return [*lines, _summarize_report(tree, report)]


def _summarize_report(tree: Path, report: CheckReport) -> str:
    counts = Counter(damage.kind.value for damage in report.damages)
    found = ", ".join(f"{count:,} {word}" for word, count in counts.items())
    if not report.manifests:
        looked = f"only the names of {format_count(report.looked_at, 'file')} were checked"
        return f"{tree}: no tensor was checked, {looked}; {found or 'none is a link or a leftover'}"
    read = f"{format_count(report.files, 'file')} read, {format_bytes(report.bytes_read)}"
    links = f" (under {format_count(report.names, 'name')})" if report.names > report.files else ""
    sure = f"{format_count(report.digests, 'digest')} correct"
    return f"{tree}: {read}{links}, {sure}; {found or 'no problem found'}"


def _rebuild_ledger(tree: Path, state_dir: Path) -> int:
    """Run `rankdumpd rebuild`, which writes the ledger; return its exit code."""
    command = [sys.executable, "-m", "rankdumpd", "rebuild", str(tree.absolute())]
    command += ["--state-dir", str(state_dir.absolute())]
    # The working folder is `/`, because `-m` looks for modules in it first. The output of the
    # command must not mix with the JSON of this one.
    return subprocess.run(command, cwd="/", stdout=sys.stderr.fileno(), check=False).returncode

"""`rankdump fsck`: a tree checked to the last byte, mended, and its ledger made anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from rankdump import fsck as room
from rankdump.cli.options import TREE
from rankdump.cli.progress import counting
from rankdump.cli.screen import say
from rankdump.cli.text import counted, size
from rankdump.fsck import ADVICE, Damage, Kind, Report

_MOST_THREADS = 8
_MOST_LINES = 100


@click.command()
@click.argument("tree", type=TREE)
@click.option("--repair", is_flag=True, help="Remove what is left over or stands there twice.")
@click.option("--rebuild", is_flag=True, help="Make an agent's ledger from the tree; not --repair.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the ledger; it may hold none yet.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Most threads; up to 8 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def fsck(
    *,
    tree: Path,
    repair: bool,
    rebuild: bool,
    state_dir: Path | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Check every file of TREE against its manifest and its checksum.

    Files are named with one word: torn, missing, foreign, duplicate, leftover, unmanifested,
    unbalanced or manifest. Exit code 1 when anything is wrong, and was not repaired, or no manifest
    says what should be here. Links are never followed, and a tensor is never removed but one that
    stands in another file as well.
    """
    if rebuild != (state_dir is not None):
        raise click.UsageError("--rebuild and --state-dir DIR go together")
    if rebuild and repair:
        raise click.UsageError("--repair and --rebuild do not go together: repair first")
    if repair:
        room.check_left(tree)
    with counting("checking") as tell:
        report = room.check_tree(tree, workers=jobs or _threads(), tell=tell)
    if repair:
        report = room.mend(tree, report)
    if as_json:
        click.echo(json.dumps(_as_json(tree, report)))
    else:
        say(_lines(tree, report))
    # Who has a tree mended asks for that, not whether all of it could be checked.
    code = 1 if report.damages or not (report.checked or repair) else 0
    if rebuild and state_dir is not None:
        return max(code, _rebuilt(tree, state_dir))
    return code


def _threads() -> int:
    return max(1, min(len(os.sched_getaffinity(0)), _MOST_THREADS))


def _as_json(tree: Path, report: Report) -> dict[str, object]:
    return {"tree": str(tree), "clean": _clean(report), **asdict(report)}


def _clean(report: Report) -> bool:
    return report.checked and not report.damages


def _lines(tree: Path, report: Report) -> list[str]:
    lines = [f"removed: {damage.path}" for damage in report.mended]
    for kind in Kind:
        some = [damage for damage in report.damages if damage.kind is kind]
        lines += map(_line, some[:_MOST_LINES])
        if some:
            more = len(some) - _MOST_LINES
            lines += [f"{kind.value}: {more:,} more, which --json names"] if more > 0 else []
            lines.append(f"  {kind.value}: {ADVICE[kind]}")
    lines += (*report.unchecked, *report.retired)
    return [*lines, _summary(tree, report)]


def _line(damage: Damage) -> str:
    return f"{damage.kind.value}: {damage.path}: {damage.text}"


def _summary(tree: Path, report: Report) -> str:
    found = _found(report.damages)
    if not report.manifests:
        looked = f"of {counted(report.looked_at, 'file')} only the names were looked at"
        return f"{tree}: no tensor was checked, {looked}; {found or 'none is a link or left over'}"
    read = f"{counted(report.files, 'file')} read, {size(report.bytes_read)}"
    links = f" (under {counted(report.names, 'name')})" if report.names > report.files else ""
    sure = f"{counted(report.digests, 'digest')} right"
    return f"{tree}: {read}{links}, {sure}; {found or 'nothing is wrong'}"


def _found(damages: Iterable[Damage]) -> str:
    counts = Counter(damage.kind.value for damage in damages)
    return ", ".join(f"{count:,} {word}" for word, count in counts.items())


def _rebuilt(tree: Path, state_dir: Path) -> int:
    """Let the daemon's program write its own file; return its exit code."""
    command = [sys.executable, "-m", "rankdumpd", "rebuild", str(tree.absolute())]
    command += ["--state-dir", str(state_dir.absolute())]
    # `-m` looks for modules in the current folder first. What it says is no part of our JSON.
    return subprocess.run(command, cwd="/", stdout=sys.stderr.fileno(), check=False).returncode

"""Command `rankdump hints`: shows how much of its timeout each process group uses, and the settings
to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.reader.job_sentences import format_causes
from rankdump._cli.live_tree import fetch_live_hints, find_live_job
from rankdump._cli.options import TREE_PATH, resolve_coordinator_address
from rankdump._cli.output import TableColumn, number_columns, print_json, print_lines, print_rows
from rankdump._core.timeouts import HintLevel, TimeoutHint, hint_to_json
from rankdump._core.units import format_duration, format_percentage

_COLUMNS = (
    TableColumn("group", is_flexible=True),
    TableColumn("backend"),
    *number_columns("limit"),
    TableColumn("set by"),
    TableColumn("read from", is_flexible=True),
    *number_columns("widest", "by dump", "share", "expected"),
)


@click.command()
@click.argument("tree", type=TREE_PATH, required=False)
@click.option("--job", "job_id", metavar="ID", help="Only this job.")
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def hints(tree: Path | None, job_id: str | None, coordinator: str | None, as_json: bool) -> int:
    """Show how close each process group comes to its timeout.

    The hints are those of the job in TREE, from its coordinator while it runs; without TREE they
    come from the coordinator. Exit code 1 when half of a timeout is used, or is expected to be.
    """
    if tree and coordinator:
        raise click.UsageError("TREE and --coordinator cannot be combined")
    found = _read_hints(tree, coordinator, job_id or "")
    if as_json:
        print_json({"hints": list(map(hint_to_json, found))})
    else:
        _print_hints(found)
    return 1 if any(hint.level is not HintLevel.OK for hint in found) else 0


def _read_hints(tree: Path | None, coordinator: str | None, job_id: str) -> tuple[TimeoutHint, ...]:
    if tree is not None:
        job = find_live_job(tree, job_id)
        live = fetch_live_hints(job) if job else None
        return reader.read_hints(tree, job_id) if live is None else live
    # Imported on use, because loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_timeout_hints

    address = resolve_coordinator_address(coordinator)
    return fetch_timeout_hints(address, job_id=job_id)


def _print_hints(found: Sequence[TimeoutHint]) -> None:
    jobs = list(dict.fromkeys(hint.job_id for hint in found))
    for job_id in jobs:
        own = [hint for hint in found if hint.job_id == job_id]
        if len(jobs) > 1:
            print_lines([f"job {job_id}"])
        print_rows(_COLUMNS, list(map(_hint_cells, own)))
        print_lines(["", *_hint_sentences(own)])
    if not found:
        print_lines(["no process group of several ranks is known"])


def _hint_cells(hint: TimeoutHint) -> list[str]:
    group = f"{hint.group} (waits)" if hint.waiting else hint.group
    limit = set_by = read_from = "-"
    if hint.limit is not None:
        limit, read_from = format_duration(hint.limit.limit_us), hint.limit.source
        set_by = hint.limit.name.removeprefix("timeout of ")
    share = format_percentage(hint.share) if hint.limit else "-"
    times = (hint.spread_us, hint.dump_us, hint.projected_us)
    widest, dumped, expected = map(format_duration, times)
    return [group, hint.backend or "-", limit, set_by, read_from, widest, dumped, share, expected]


def _hint_sentences(found: Sequence[TimeoutHint]) -> list[str]:
    sentences: list[str] = []
    for hint in found:
        sentences.append(f"{hint.level.value}: {hint.reason}")
        sentences += [f"  {line}" for line in hint.settings]
    sentences += format_causes(found, ())
    return sentences

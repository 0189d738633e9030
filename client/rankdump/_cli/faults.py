"""Command `rankdump faults`: reports what the black box recorded about a fault, from a
frozen tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from rankdump._analysis.black_box.fault_report import (
    FaultReport,
    StepSummary,
    describe_fault,
    iter_bad_value_lines,
    iter_rank_lines,
    make_fault_report,
)
from rankdump._analysis.black_box.freeze_files import find_frozen_tree, read_freeze_records
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import number_columns, print_json, print_lines, print_rows
from rankdump._core.record import sanitize_line
from rankdump._core.statistics import format_statistic_number

_COLUMNS = number_columns(
    "iteration", "ranks", "unfinished", "loss", "gradient norm", "largest", "not finite", "skipped"
)


@click.command()
@click.argument("tree", type=TREE_PATH, default=".")
@click.option("--stacks", "with_stacks", is_flag=True, help="Show the stacks of ranks that hang.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def faults(tree: Path, with_stacks: bool, as_json: bool) -> int:
    """Report a fault from a frozen tree.

    TREE is a frozen tree, or the dump beside which it is; then its latest one is read. The report
    has the cause, the first value over all ranks that was not finite, the steps before, and the
    ranks that are missing. Exit code 1 when there is no frozen tree, or it is damaged.
    """
    root = find_frozen_tree(tree)
    report = make_fault_report(str(root), read_freeze_records(root))
    if as_json:
        print_json(report)
        return 0
    print_lines(map(sanitize_line, _format_head(report)))
    print_lines([""])
    print_rows(_COLUMNS, list(map(_format_step, report.steps)))
    notes = (f"rank {each.rank}, iteration {each.iteration}: {each.text}" for each in report.notes)
    print_lines(["", *map(sanitize_line, notes)])
    print_lines(
        [*map(sanitize_line, iter_rank_lines(report, ": --stacks")), f"tree: {report.root}"]
    )
    if with_stacks:
        print_lines(map(sanitize_line, _format_stacks(report)))
    return 0


def _format_head(report: FaultReport) -> Iterator[str]:
    attempt = f", attempt {report.attempt}" if report.attempt else ""
    yield f"job {report.job_id}{attempt}, frozen at iteration {report.iteration}"
    yield f"cause: {describe_fault(report.cause)}"
    if report.first_bad_value is not None:
        yield from iter_bad_value_lines(report.first_bad_value, report.root)
    elif report.steps:
        yield "all tensors that were measured are finite"
    yield from (f"later: {describe_fault(cause)}" for cause in report.later_causes)
    yield from (call.describe() for call in report.standing_calls)


def _format_step(step: StepSummary) -> list[str]:
    numbers = (step.loss, step.gradient_norm, step.largest)
    texts = (format_statistic_number(float(each)) if each else "-" for each in numbers)
    counts = (step.nonfinite, step.skipped)
    heads = (step.iteration, step.ranks, step.unfinished)
    return [*map(str, heads), *texts, *map(str, counts)]


def _format_stacks(report: FaultReport) -> Iterator[str]:
    for end in report.ends:
        for stack in end.stacks:
            yield f"rank {end.rank}, iteration {end.iteration}:"
            yield from (f"  {line}" for line in stack.splitlines())

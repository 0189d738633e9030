"""Command `rankdump faults`: what a black box has about a fault, from a frozen tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from rankdump._analysis.black_box.fault_report import (
    FaultReport,
    FirstBadValue,
    RankEnd,
    StepSummary,
    describe_bad_value,
    make_fault_report,
)
from rankdump._analysis.black_box.freeze_files import find_frozen_tree, read_freeze_records
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import (
    format_table,
    measure_width,
    number_columns,
    print_lines,
    print_table,
)
from rankdump._cli.text_format import format_count, format_scope_name
from rankdump._core.freeze_record import FrozenCause, describe_absence
from rankdump._core.json_values import make_plain
from rankdump._core.record import sanitize_line
from rankdump._core.statistics import format_statistic_number
from rankdump._core.status import SessionState

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
        click.echo(json.dumps(make_plain(report), indent=1, default=make_plain))
        return 0
    print_lines(map(sanitize_line, _format_head(report)))
    print_lines([""])
    steps = list(map(_format_step, report.steps))
    print_table(format_table(_COLUMNS, steps, width=measure_width()))
    print_lines(["", *map(sanitize_line, _format_notes(report))])
    print_lines([*map(sanitize_line, _format_ranks(report)), f"tree: {report.root}"])
    if with_stacks:
        print_lines(map(sanitize_line, _format_stacks(report)))
    return 0


def _format_head(report: FaultReport) -> Iterator[str]:
    attempt = f", attempt {report.attempt}" if report.attempt else ""
    yield f"job {report.job_id}{attempt}, frozen at iteration {report.iteration}"
    yield f"cause: {_describe_cause(report.cause)}"
    if report.first_bad_value is not None:
        yield from _format_bad_value(report.first_bad_value, report.root)
    elif report.steps:
        yield "all tensors that were measured are finite"
    yield from (f"later: {_describe_cause(cause)}" for cause in report.later_causes)
    yield from (call.describe() for call in report.standing_calls)


def _describe_cause(cause: FrozenCause) -> str:
    who = f"rank {cause.rank}, " if cause.rank is not None else ""
    where = f"; {cause.side} {cause.slot} of {format_scope_name(cause.op_name)}"
    line = f"; {cause.source}" if cause.source else ""
    about = where if cause.op_name else ""
    return f"{cause.kind.value}, {who}iteration {cause.iteration}: {cause.text}{about}{line}"


def _format_bad_value(found: FirstBadValue, root: str) -> Iterator[str]:
    yield describe_bad_value(found, format_scope_name(found.tensor.op_name))
    clean = format_count(found.tensor.finite_before, "tensor")
    yield f"  clean before it on that rank in that iteration: {clean}"
    if found.source:
        yield f"  {found.source}"
    if found.full_tensors:
        count = format_count(found.full_tensors, "tensor")
        where = f"--rank {found.rank} --iteration {found.iteration}"
        yield f"  {count} of that iteration in full: rankdump ls {root} {where}"


def _format_step(step: StepSummary) -> list[str]:
    numbers = (step.loss, step.gradient_norm, step.largest)
    texts = (format_statistic_number(float(each)) if each else "-" for each in numbers)
    counts = (step.nonfinite, step.skipped)
    heads = (step.iteration, step.ranks, step.unfinished)
    return [*map(str, heads), *texts, *map(str, counts)]


def _format_notes(report: FaultReport) -> Iterator[str]:
    for note in report.notes:
        yield f"rank {note.rank}, iteration {note.iteration}: {note.text}"


def _format_ranks(report: FaultReport) -> Iterator[str]:
    for end in report.ends:
        if end.state is SessionState.LOST:
            how = f" ({end.ended_by})" if end.ended_by else ""
            yield f"rank {end.rank} is lost{how}; its last step is iteration {end.iteration}"
        elif end.unfinished:
            yield f"rank {end.rank} had not ended iteration {end.iteration}{_mention_stacks(end)}"
    yield from map(describe_absence, report.absent)
    counts = ((report.dropped_steps, "step"), (report.dropped_tensors, "full tensor"))
    dropped = [format_count(count, f"older {what}") for count, what in counts if count]
    if dropped:
        yield f"{' and '.join(dropped)} had been dropped because the agent's memory was short"


def _mention_stacks(end: RankEnd) -> str:
    return f" ({format_count(len(end.stacks), 'stack')}: --stacks)" if end.stacks else ""


def _format_stacks(report: FaultReport) -> Iterator[str]:
    for end in report.ends:
        for stack in end.stacks:
            yield f"rank {end.rank}, iteration {end.iteration}:"
            yield from (f"  {line}" for line in stack.splitlines())

"""Page of frozen steps: what happened, the first value that was not finite and which tensors it
spoilt, the steps before, and the ranks that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.black_box.fault_report import (
    FaultReport,
    FirstBadValue,
    StepSummary,
    describe_fault,
    iter_bad_value_lines,
    iter_rank_lines,
    make_fault_report,
)
from rankdump._analysis.black_box.freeze_files import (
    find_frozen_tree,
    list_frozen_trees,
    read_freeze_records,
)
from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._web.dump_source import (
    EXECUTION_ORDER,
    DumpSource,
    TensorRow,
    find_tree_number,
    read_rows,
)
from rankdump._web.page_kinds import AbsentPageError, PageKind, PageParameters
from rankdump.errors import CorruptedError

_MAX_LISTED = 100
_MAX_STACK = 20_000
"""Largest number of characters of a stack."""
_MAX_WAY = 20


class BlackBoxRequest(NamedTuple):
    """Which freeze the page shows."""

    freeze: int | None
    """Number of the freeze among the frozen trees, the earliest first; None for the latest one."""


class RankStack(NamedTuple):
    """Call stack of a rank at the freeze."""

    rank: int
    iteration: int
    text: str


class FaultContent(NamedTuple):
    """Report of one freeze."""

    job_id: str
    attempt: int
    iteration: int
    world_size: int
    cause: str
    """The cause as a sentence, as `rankdump faults` prints it."""
    bad_value: tuple[str, ...]
    """Sentences about the first value that was not finite; empty if there is none."""
    carried: tuple[str, ...]
    """Sentences about later causes, and about collectives in which ranks waited."""
    steps: tuple[StepSummary, ...]
    ranks: tuple[str, ...]
    """Sentences about ranks that are missing, lost or unfinished."""
    notes: tuple[str, ...]
    stacks: tuple[RankStack, ...]


@dataclass(frozen=True, slots=True)
class BlackBoxPage:
    """Content of the page."""

    request: BlackBoxRequest
    frozen: tuple[str, ...]
    """Roots of the frozen trees, the earliest first."""
    root: str = ""
    """Root of the frozen tree that is shown; empty if there is none."""
    fault: FaultContent | None = None
    problem: str = ""
    """Why a freeze cannot be shown; empty if it can."""
    tree: int | None = None
    """Number of the frozen tree among the served trees; None if it is not served."""
    way: tuple[TensorRow, ...] = ()
    """If the frozen tree is served: the tensors of the operator with the first bad value, and all
    tensors that are not finite, on its rank in its iteration.
    """


def make_black_box_page(sources: Sequence[DumpSource]) -> PageKind[BlackBoxRequest]:
    """Return the page; tensors are shown if the frozen tree is among `sources`."""

    def build_black_box(source: DumpSource, request: BlackBoxRequest) -> BlackBoxPage:
        frozen = source.keep("frozen trees", lambda: _list_trees(source.root))
        names = tuple(map(str, frozen))
        if request.freeze is not None and request.freeze >= len(frozen):
            raise AbsentPageError(f"no freeze {request.freeze}: there are {len(frozen)}")
        if not frozen:
            return BlackBoxPage(request, names)
        root = frozen[-1 if request.freeze is None else request.freeze]
        try:
            report = source.keep(("fault", root), lambda: _read_report(root))
        except CorruptedError as error:
            return BlackBoxPage(request, names, str(root), problem=str(error))
        tree = find_tree_number(sources, root)
        bad = report.first_bad_value
        way = () if tree is None or bad is None else _find_way(sources[tree], bad)
        return BlackBoxPage(request, names, str(root), _make_content(report), "", tree, way)

    return PageKind("/blackbox", "blackbox.html", "Black box", parse_black_box, build_black_box)


def parse_black_box(parameters: PageParameters) -> BlackBoxRequest:
    """Return the request that the parameters describe."""
    return BlackBoxRequest(parameters.read_number("freeze"))


def _list_trees(root: Path) -> tuple[Path, ...]:
    trees = list_frozen_trees(root)
    if trees:
        return tuple(trees)
    try:
        return (find_frozen_tree(root),)
    except CorruptedError:  # there is neither a frozen tree at the path nor one beside it
        return ()


def _read_report(root: Path) -> FaultReport:
    records = read_freeze_records(root)
    if not records:
        raise CorruptedError(f"{root}: the records of the freeze are gone")
    return make_fault_report(str(root), records)


def _make_content(report: FaultReport) -> FaultContent:
    bad = report.first_bad_value
    lines = () if bad is None else iter_bad_value_lines(bad, report.root)
    carried = [call.describe() for call in report.standing_calls]
    carried += [describe_fault(cause) for cause in report.later_causes]
    stacks = (
        RankStack(end.rank, end.iteration, stack[:_MAX_STACK])
        for end in report.ends
        for stack in end.stacks
    )
    return FaultContent(
        *(report.job_id, report.attempt, report.iteration, report.world_size),
        cause=describe_fault(report.cause),
        bad_value=tuple(line.strip() for line in lines),
        carried=tuple(carried[:_MAX_LISTED]),
        steps=report.steps,
        ranks=tuple(islice(iter_rank_lines(report), _MAX_LISTED)),
        notes=tuple(
            f"rank {note.rank}, iteration {note.iteration}: {note.text}" for note in report.notes
        ),
        stacks=tuple(islice(stacks, _MAX_WAY)),
    )


def _find_way(source: DumpSource, bad: FirstBadValue) -> tuple[TensorRow, ...]:
    return read_rows(
        source,
        f"rank = ? AND iteration = ? AND (CAST(name AS VARCHAR) = ? OR ({NONFINITE})) "
        f"ORDER BY {EXECUTION_ORDER} LIMIT {_MAX_WAY}",
        (bad.rank, bad.iteration, bad.tensor.op_name),
    )

"""Frozen trees at the end of a run: each is whole, with the latest steps of the ranks it names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from faults.deployment import RING_STEPS
from faults.values import RankLife

from rankdump._analysis.black_box.freeze_files import read_freeze_records
from rankdump._analysis.fsck import check_tree
from rankdump._core.freeze_record import BLACK_BOX_FOLDER, FreezeRecord, FrozenRank
from rankdump.errors import RankdumpError

_POST_STEPS = 1
_RUNNING_STEPS = 1
"""The step that runs is frozen as well."""


def list_trees(root: Path) -> list[Path]:
    """Return the frozen trees beside a dump, also those that are not complete."""
    above = root / BLACK_BOX_FOLDER
    return sorted(each for each in above.iterdir() if each.is_dir()) if above.is_dir() else []


def list_raw_files(states: Iterable[Path]) -> list[Path]:
    """Return what agents have kept of freezes that are in no tree."""
    return [path for state in states for path in state.rglob("blackbox/*") if path.is_file()]


def check_frozen_trees(
    roots: Iterable[Path], lives: Iterable[RankLife], answered: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong with the frozen trees, after all agents have stopped."""
    by_session = {life.session_id: life for life in lives}
    found: set[str] = set()
    for tree in (tree for root in roots for tree in list_trees(root)):
        found.add(str(tree))
        report = check_tree(tree, workers=1)
        yield from (f"{tree}: {damage}" for damage in report.damages)
        try:
            records = read_freeze_records(tree)
        except RankdumpError as error:
            yield str(error)
            continue
        if not records:
            yield f"{tree} has no record of its freeze"
        for record in records:
            yield from (f"{tree}: {fault}" for fault in _check_record(record, by_session))
    yield from (f"{tree} was answered, and is not there" for tree in {*answered} - found)


def _check_record(record: FreezeRecord, lives: Mapping[str, RankLife]) -> Iterator[str]:
    if not any(rank.steps for rank in record.ranks):
        yield "no rank has a step"
    for missing in record.missing:
        if not missing.reason:
            yield f"rank {missing.rank} is missing without a reason"
    for rank in record.ranks:
        life = lives.get(rank.session_id)
        if life is None or life.rank != rank.rank:
            yield f"rank {rank.rank} had no session {rank.session_id}"
            continue
        yield from _check_steps(rank, life)


def _check_steps(rank: FrozenRank, life: RankLife) -> Iterator[str]:
    steps = [step.iteration for step in rank.steps]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        yield f"rank {rank.rank}: its steps are {steps}"
    if steps and steps[-1] > life.begun:
        yield f"rank {rank.rank}: step {steps[-1]}, and {life.begun} was the last that it began"
    if len(steps) > RING_STEPS + _POST_STEPS + _RUNNING_STEPS:
        yield f"rank {rank.rank}: {len(steps)} steps, and {RING_STEPS} are kept"
    for step in rank.steps:
        loss = f"{1 / (step.iteration + 1)!r}"
        if step.numbers.get("loss", loss) != loss:
            yield f"rank {rank.rank} step {step.iteration}: loss {step.numbers['loss']}, was {loss}"

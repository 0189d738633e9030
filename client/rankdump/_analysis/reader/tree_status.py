"""Status of a tree without a daemon: sessions as their files state them, balances of iterations,
missing ranks and iterations, and damage. Reads no more than a walk with `balances_only`, and the
session files; never a tensor.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rankdump._analysis.reader.manifests import retired_sentences
from rankdump._analysis.reader.query import group_ranks, missing_ranges, ranges
from rankdump._analysis.reader.session_files import read_tree_sessions
from rankdump._analysis.reader.tree import Table, Tree
from rankdump._analysis.reader.tree_walk import walk
from rankdump._core.manifest import Manifest
from rankdump._core.status import (
    AgentLoad,
    IterationStatus,
    SessionState,
    SessionStatus,
    StatusView,
)


def status(root: Path) -> StatusView:
    """Return the status of the job in the manifests of a tree, with findings about the tree."""
    return status_of(walk(root, balances_only=True))


def status_of(tree: Tree) -> StatusView:
    """Return the status of a tree already walked."""
    complete = [manifest.status for manifest in tree.manifests]
    unfinished = _unfinished_iterations(tree)
    return StatusView(
        sessions=_session_statuses(tree),
        iterations=_add_table_bytes((*complete, *unfinished), tree.tables),
        load=_disk_load(tree.root),
        roots=(str(tree.root),),
        # Unfinished and unbalanced iterations are visible in `iterations`.
        findings=_tree_findings(tree),
    )


def _add_table_bytes(
    iterations: tuple[IterationStatus, ...], tables: tuple[Table, ...]
) -> tuple[IterationStatus, ...]:
    """Return the iterations; those without files have the size of their tables.

    A table of all iterations of a rank counts for the last one.
    """
    last = {each.rank: each.iteration for each in sorted(iterations, key=lambda i: i.iteration)}
    taken: Counter[tuple[int, int]] = Counter()
    for table in tables:
        when = table.iteration if table.dated else last.get(table.rank)
        if when is not None and not table.constant:
            taken[table.rank, when] += table.stored_bytes
    return tuple(
        each
        if each.bytes_stored
        else replace(each, bytes_stored=taken.pop((each.rank, each.iteration), 0))
        for each in iterations
    )


def findings(tree: Tree) -> tuple[str, ...]:
    """Return sentences about everything that is missing or damaged in the tree."""
    return (*_unfinished_sentences(tree), *_unbalanced_sentences(tree), *_tree_findings(tree))


def faults(tree: Tree) -> tuple[str, ...]:
    """Return the findings that are errors: unbalanced iterations and problems."""
    return (*_unbalanced_sentences(tree), *tree.problems)


def damaged(tree: Tree) -> bool:
    """Return whether the tree has faults."""
    return bool(faults(tree))


def _tree_findings(tree: Tree) -> tuple[str, ...]:
    # In a part of a tree, missing ranks and iterations cannot be found.
    absences = (_missing_ranks, _empty_ranks, _missing_iterations) if tree.whole else ()
    return (
        *(sentence for finds in absences for sentence in finds(tree)),
        *retired_sentences(tree.gone),
        *tree.problems,
    )


def _session_statuses(tree: Tree) -> tuple[SessionStatus, ...]:
    """Return the sessions in files, and those that only manifests know, which count as closed."""
    filed = [each.status for each in read_tree_sessions(tree.root, tree.job_id)]
    if not tree.whole:
        filed = [status for status in filed if status.rank in tree.ranks]
    known = {(status.job_id, status.session_id, status.rank) for status in filed}
    older = (
        status
        for status in _sessions_of_manifests(tree.manifests)
        if (status.job_id, status.session_id, status.rank) not in known
    )
    return (*older, *filed)


def _sessions_of_manifests(manifests: tuple[Manifest, ...]) -> tuple[SessionStatus, ...]:
    seen = Counter((m.status.job_id, m.status.session_id, m.status.rank) for m in manifests)
    first = {(m.status.job_id, m.status.session_id, m.status.rank): m for m in manifests}
    return tuple(
        SessionStatus(
            job_id=job,
            session_id=session,
            rank=rank,
            world_size=manifest.world_size,
            device=manifest.device,
            host=manifest.host,
            pid=0,
            state=SessionState.CLOSED,
            iterations_seen=seen[job, session, rank],
        )
        for (job, session, rank), manifest in sorted(first.items())
    )


def _unfinished_iterations(tree: Tree) -> list[IterationStatus]:
    # Iterations that are being removed are not unfinished.
    complete = {(m.status.rank, m.status.iteration) for m in tree.manifests} | tree.gone
    stored: Counter[tuple[int, int]] = Counter()
    size: Counter[tuple[int, int]] = Counter()
    for (rank, dated, iteration), entries in tree.entries.by_place().items():
        if dated and (rank, iteration) not in complete:
            stored[rank, iteration] = len(entries)
            size[rank, iteration] = entries.stored_bytes
    for table in tree.tables:
        if _has_one_iteration(table) and (table.rank, table.iteration) not in complete:
            stored[table.rank, table.iteration] += 0  # listed even without files
    jobs = {m.status.rank: m.status.job_id for m in tree.manifests}
    # The newest session of a rank writes, whatever other jobs have left in the tree.
    newest = (each.status for each in read_tree_sessions(tree.root, tree.job_id))
    jobs |= {status.rank: status.job_id for status in newest}
    # A rank without a complete iteration has no job id; in a tree of one job it is that job's.
    only = next(iter(jobs.values())) if len(set(jobs.values())) == 1 else ""
    return [
        IterationStatus(
            job_id=jobs.get(rank, only),
            session_id="",
            rank=rank,
            iteration=iteration,
            complete=False,
            stored=count,
            bytes_stored=size[rank, iteration],
        )
        for (rank, iteration), count in sorted(stored.items())
    ]


def _unfinished_sentences(tree: Tree) -> list[str]:
    places = ((each.rank, each.iteration) for each in _unfinished_iterations(tree))
    return [
        f"{tree.unit} {ranks}: iteration {iterations} has tensors but no manifest: not complete"
        for iterations, ranks in group_ranks(places).items()
    ]


def _missing_ranks(tree: Tree) -> list[str]:
    world_size = max((m.world_size for m in tree.manifests), default=0)
    missing = missing_ranges(tree.ranks, world_size)
    return [f"rank {missing}: no folder, in a job with world size {world_size}"] if missing else []


def _empty_ranks(tree: Tree) -> list[str]:
    known = {place.rank for place in tree.entries.by_place()}
    known |= {table.rank for table in tree.tables}
    known |= {rank for rank, _ in tree.gone}
    empty = set(tree.ranks) - known - {manifest.status.rank for manifest in tree.manifests}
    return [f"{tree.unit} {ranges(empty)}: the folder has no tensors"] if empty else []


def _missing_iterations(tree: Tree) -> list[str]:
    """Return sentences about iterations that a rank lacks and another rank has."""
    have: dict[int, set[int]] = {}
    for manifest in tree.manifests:
        have.setdefault(manifest.status.rank, set()).add(manifest.status.iteration)
    for place in tree.entries.by_place():
        if place.dated:
            have.setdefault(place.rank, set()).add(place.iteration)
    for table in tree.tables:
        if _has_one_iteration(table):
            have.setdefault(table.rank, set()).add(table.iteration)
    every = set[int]().union(*have.values())
    for rank, iteration in tree.gone:
        have.get(rank, set()).add(iteration)
    return [
        f"{tree.unit} {rank}: iteration {ranges(every - own)} is missing, "
        f"other {tree.unit}s have it"
        for rank, own in sorted(have.items())
        if not own >= every
    ]


def _has_one_iteration(table: Table) -> bool:
    """Return whether a table belongs to one iteration."""
    return table.dated and not table.constant


def _unbalanced_sentences(tree: Tree) -> list[str]:
    return [
        f"rank {s.rank}: iteration {s.iteration}: {s.expected} tensors expected, "
        f"{s.kept_tensors + sum(s.dropped.values())} accounted for"
        for s in (manifest.status for manifest in tree.manifests)
        if not s.is_balanced
    ]


def _disk_load(root: Path) -> AgentLoad:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return AgentLoad()
    return AgentLoad(disk_free_bytes=usage.free, disk_total_bytes=usage.total)

"""Status of a tree without a daemon: sessions as their files state them, sessions that ended with
their agents, balances of iterations, dropped tensors, missing ranks and iterations, and damage.
Reads no more than reading the tree with `balances_only` does, and no tensors.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rankdump._analysis.reader.baseline_files import list_baseline_places
from rankdump._analysis.reader.manifests import retired_sentences
from rankdump._analysis.reader.tree import Entries, Table, Tree
from rankdump._analysis.reader.tree_walk import walk
from rankdump._core.drop_reasons import count_lost, describe_degraded, describe_drops
from rankdump._core.manifest import Manifest
from rankdump._core.number_ranges import group_ranks, missing_ranges, name_ranks, ranges
from rankdump._core.status import (
    AgentLoad,
    IterationStatus,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.tree_session import TreeSession

UNRECORDED_TREE = "the tree has no manifests, so it is not known whether tensors are missing"
"""Of a tree that MindSpore, CANN or another tool wrote."""


def status(root: Path) -> StatusView:
    """Return the status of the job in the manifests of a tree, with findings about the tree."""
    return status_of(walk(root, balances_only=True))


def status_of(tree: Tree) -> StatusView:
    """Return the status of a tree that was already read."""
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
    """Return the iterations; those without files get the size of their tables.

    A table with all iterations of a rank counts for the last one.
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
    # If only a part of a tree was read, missing ranks and iterations cannot be found.
    absences = (_missing_ranks, _empty_ranks, _missing_iterations) if tree.whole else ()
    is_unknown = bool(tree.entries or tree.tables) and not (tree.tool or tree.is_recorded)
    unrecorded = [UNRECORDED_TREE] if is_unknown else []
    return (
        *unrecorded,
        *(sentence for finds in absences for sentence in finds(tree)),
        *retired_sentences(tree.gone),
        *_absent_baselines(tree),
        *tree.problems,
    )


def _absent_baselines(tree: Tree) -> list[str]:
    return [
        f"baseline {root} cannot be found; tensors that are the same in it have digests alone"
        for root in tree.entries.baselines
        if not any(place.is_dir() for place in list_baseline_places(tree.root, root))
    ]


def _session_statuses(tree: Tree) -> tuple[SessionStatus, ...]:
    """Return the sessions that have a file and, as closed sessions, those that only
    manifests know.
    """
    filed = [each.status for each in tree.own_sessions]
    known = {(each.job_id, each.session_id, each.rank) for each in filed}
    older = (
        status
        for status in _sessions_of_manifests(tree.manifests)
        if (status.job_id, status.session_id, status.rank) not in known
    )
    # Sorting is stable, so the sessions of a rank stay in their order.
    return (*older, *sorted(filed, key=lambda each: (each.job_id, each.rank)))


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
            attempt=manifest.status.attempt,
        )
        for (job, session, rank), manifest in sorted(first.items())
    )


_AttemptPlace: TypeAlias = "tuple[int, int, int]"
"""Rank, iteration and attempt."""


def _unfinished_iterations(tree: Tree) -> list[IterationStatus]:
    """Return the iterations without a manifest: as their session has reported them, else as counted
    from files.
    """
    complete = {(m.status.rank, m.status.iteration, m.status.attempt) for m in tree.manifests}
    listed = {
        (status.rank, status.iteration, status.attempt): status
        for session in tree.own_sessions
        for status in session.unfinished
    }
    found = {place: status for place, status in listed.items() if place not in complete}
    stored, size = _count_unfinished_files(tree, complete | found.keys())
    jobs = {m.status.rank: m.status.job_id for m in tree.manifests}
    # The newest session of a rank is the one that writes, whatever other jobs have left in the
    # tree.
    jobs |= {each.status.rank: each.status.job_id for each in tree.own_sessions}
    # A rank without a complete iteration has no job id; in a tree with one job, it belongs to that
    # job.
    only = next(iter(jobs.values())) if len(set(jobs.values())) == 1 else ""
    for (rank, iteration, attempt), count in stored.items():
        found[rank, iteration, attempt] = IterationStatus(
            job_id=jobs.get(rank, only),
            session_id="",
            rank=rank,
            iteration=iteration,
            complete=False,
            stored=count,
            bytes_stored=size[rank, iteration, attempt],
            attempt=attempt,
        )
    return [found[place] for place in sorted(found)]


def _count_unfinished_files(
    tree: Tree, known: Collection[_AttemptPlace]
) -> tuple[Counter[_AttemptPlace], Counter[_AttemptPlace]]:
    """Return the number and the bytes of the files of each iteration that is not in `known`."""
    stored: Counter[_AttemptPlace] = Counter()
    size: Counter[_AttemptPlace] = Counter()
    # Iterations that are being removed do not count as unfinished.
    gone, ended = tree.gone, {(rank, iteration) for rank, iteration, _ in known}
    for (rank, dated, iteration), entries in tree.entries.by_place().items():
        if not dated or (rank, iteration) in gone:
            continue
        for attempt, own in split_attempts(tree, entries):
            if (rank, iteration, attempt) not in known:
                stored[rank, iteration, attempt] += len(own)
                size[rank, iteration, attempt] += own.stored_bytes
    for table in tree.tables:
        place = table.rank, table.iteration
        if _has_one_iteration(table) and place not in ended and place not in gone:
            stored[(*place, tree.attempts[-1])] += 0  # so that it is listed even without files
    return stored, size


def split_attempts(tree: Tree, entries: Entries) -> list[tuple[int, Entries]]:
    """Return the tensors of a place by attempt; they are sorted by time, and therefore
    by attempt.
    """
    if len(tree.attempts) == 1:
        return [(tree.attempts[0], entries)]
    found = [tree.find_attempt(entry.key) for entry in entries]
    starts = [at for at, each in enumerate(found) if not at or found[at - 1] != each]
    ends = (*starts[1:], len(found))
    return [(found[low], entries[low:high]) for low, high in zip(starts, ends, strict=True)]


def _unfinished_sentences(tree: Tree) -> list[str]:
    if tree.tool:  # a dump of another tool has no manifests
        return []
    if not tree.is_recorded:
        return []
    several = any(tree.attempts)
    places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in _unfinished_iterations(tree):
        places[each.attempt].append((each.rank, each.iteration))
    return [
        f"{tree.unit} {ranks}{f', attempt {attempt}' if several else ''}: iteration {iterations} "
        f"has tensors but no manifest: not complete"
        for attempt, own in sorted(places.items())
        for iterations, ranks in group_ranks(own).items()
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
    if len(empty) > 1:
        return [f"{tree.unit}s {ranges(empty)}: the folders have no tensors"]
    return [f"{tree.unit} {ranges(empty)}: the folder has no tensors"] if empty else []


def _missing_iterations(tree: Tree) -> list[str]:
    """Return sentences about iterations that one rank lacks and another rank has."""
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
    attempts = _iterations_by_attempt(tree) if len(tree.attempts) > 1 else {}
    lacking: dict[str, list[int]] = {}
    for rank, own in sorted(have.items()):
        missing = attempts.get(rank, every) - own
        if missing:
            lacking.setdefault(ranges(missing), []).append(rank)
    return [
        f"{tree.unit}{'s' * (len(ranks) > 1)} {ranges(ranks)}: iteration {iterations} is missing, "
        f"other {tree.unit}s have it"
        for iterations, ranks in lacking.items()
    ]


def _iterations_by_attempt(tree: Tree) -> dict[int, set[int]]:
    """Return for each rank the iterations of the attempts that it took part in.

    A job that is restarted with fewer ranks does not lack the others.
    """
    complete: defaultdict[int, set[int]] = defaultdict(set)
    part = {(each.status.rank, each.status.attempt) for each in tree.own_sessions}
    for status in (manifest.status for manifest in tree.manifests):
        complete[status.attempt].add(status.iteration)
        part.add((status.rank, status.attempt))
    found: dict[int, set[int]] = {}
    for rank, attempt in part:
        found.setdefault(rank, set()).update(complete[attempt])
    return found


def _has_one_iteration(table: Table) -> bool:
    """Return whether a table belongs to one iteration."""
    return table.dated and not table.constant


def _unbalanced_sentences(tree: Tree) -> list[str]:
    return [
        f"rank {s.rank}: iteration {s.iteration}: {s.expected} tensors expected, "
        f"{s.accounted_tensors} accounted for"
        for s in (manifest.status for manifest in tree.manifests)
        if not s.is_balanced
    ]


def _disk_load(root: Path) -> AgentLoad:
    try:
        usage = shutil.disk_usage(root)
    except OSError:
        return AgentLoad()
    return AgentLoad(disk_free_bytes=usage.free, disk_total_bytes=usage.total)


def mark_ended_sessions(view: StatusView, files: Sequence[TreeSession], host: str) -> StatusView:
    """Return the view of a tree whose daemons do not answer, with the state of sessions that must
    have ended.

    A session that its file calls open has ended with its agent, if the agent ran on this host; of
    an agent on another host, that is not known.
    """
    filed = {each.status.session_id: each for each in files}
    gone: list[int] = []
    unknown: dict[str, list[int]] = {}
    sessions: list[SessionStatus] = []
    for status in view.sessions:
        file = filed.get(status.session_id)
        if file is not None and status.state is SessionState.OPEN:
            if file.agent_host == host:
                gone.append(status.rank)
                status = replace(status, state=SessionState.LOST)
            else:
                unknown.setdefault(file.agent_host, []).append(status.rank)
        sessions.append(status)
    findings = list(view.findings)
    if gone:
        findings.append(f"{name_ranks(gone)}: the agent ended while the session was open")
    findings += (
        f"{name_ranks(ranks)}: the agent runs on host {name} and cannot be asked from here; the "
        "state shown is the last one that it wrote"
        for name, ranks in unknown.items()
    )
    return replace(view, sessions=tuple(sessions), findings=tuple(findings))


def describe_tree_drops(tree: Tree) -> list[str]:
    """Return one sentence for each reason for which ranks lost tensors or kept less of them."""
    by_rank: defaultdict[int, Counter[str]] = defaultdict(Counter)
    degraded: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for manifest in tree.manifests:
        by_rank[manifest.status.rank].update(manifest.status.dropped)
        degraded[manifest.status.rank].update(manifest.status.degraded_by)
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, dropped in sorted(by_rank.items()):
        for text in (*describe_degraded(degraded[rank]), *describe_drops(dropped)):
            by_text[text].append(rank)
    return [f"{name_ranks(own)}: {text}" for text, own in by_text.items()]


def count_tree_drops(tree: Tree) -> int:
    """Return the number of tensors that the plan selects and that are not in the tree."""
    return sum(lost for losses in count_losses(tree).values() for lost in losses.values())


def count_losses(tree: Tree) -> defaultdict[tuple[int, int], Counter[int]]:
    """Return how many tensors of complete iterations were lost, by rank and attempt."""
    found: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for manifest in tree.manifests:
        status = manifest.status
        found[status.rank, status.attempt][status.iteration] += count_lost(status.dropped)
    return found

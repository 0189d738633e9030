"""What one job dumped of a tree that several dumped into. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.manifest import Manifest
from rankdump.reader.entry import Table, Tree


def alone(root: Path, manifests: Iterable[Manifest], job_id: str) -> str:
    """Return the id of a job that has to be told from others in a tree; nothing where it has not.

    What no manifest names belongs to the job where there is no other one. DamagedError says which
    jobs there are when this is none of them.
    """
    jobs = sorted({manifest.status.job_id for manifest in manifests})
    if not job_id or jobs == [job_id]:
        return ""
    if job_id not in jobs:
        there = f"there is {', '.join(map(repr, jobs))}" if jobs else "no manifest names a job"
        raise DamagedError(f"{root}: nothing of job {job_id!r} is here: {there}")
    return job_id


def of_job(tree: Tree, job_id: str) -> Tree:
    """Return the tree with the ranks, balances and tables of a job; the entries are its own."""
    manifests = tuple(each for each in tree.manifests if each.status.job_id == job_id)
    places = {(each.status.rank, each.status.iteration) for each in manifests}
    ranks = {rank for rank, _ in places}

    def may_hold(table: Table) -> bool:
        anywhen = table.constant or not table.dated
        return table.rank in ranks if anywhen else (table.rank, table.iteration) in places

    return replace(
        tree,
        ranks=tuple(sorted(ranks)),
        manifests=manifests,
        tables=tuple(filter(may_hold, tree.tables)),
        job_id=job_id,
    )

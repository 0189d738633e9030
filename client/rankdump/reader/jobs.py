"""What one job dumped of a tree that several dumped into. Pure."""

from __future__ import annotations

from dataclasses import replace

from rankdump.contract.errors import DamagedError
from rankdump.reader.entry import Table, Tree


def of_job(tree: Tree, job_id: str) -> Tree:
    """Return the part of a tree that the manifests of a job name; all of it without a job.

    What no manifest names belongs to the job where there is no other one. DamagedError says which
    jobs there are when this is none of them.
    """
    jobs = sorted({manifest.status.job_id for manifest in tree.manifests})
    if not job_id or jobs == [job_id]:
        return tree
    if job_id not in jobs:
        there = f"there is {', '.join(map(repr, jobs))}" if jobs else "no manifest names a job"
        raise DamagedError(f"{tree.root}: nothing of job {job_id!r} is here: {there}")
    manifests = tuple(each for each in tree.manifests if each.status.job_id == job_id)
    places = {(each.status.rank, each.status.iteration) for each in manifests}
    ranks = {rank for rank, _ in places}
    own = {record for manifest in manifests for record in manifest.records}

    def may_hold(table: Table) -> bool:
        anywhen = table.constant or not table.dated
        return table.rank in ranks if anywhen else (table.rank, table.iteration) in places

    return replace(
        tree,
        ranks=tuple(sorted(ranks)),
        entries=tuple(entry for entry in tree.entries if entry.record in own),
        manifests=manifests,
        tables=tuple(filter(may_hold, tree.tables)),
        job_id=job_id,
    )

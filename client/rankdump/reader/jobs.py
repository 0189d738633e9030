"""What one job dumped of a tree that several dumped into."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.reader.entry import Table, Tree
from rankdump.reader.manifests import (
    ManifestFile,
    manifest_files,
    ranks_with_manifests,
    read_manifests,
)


def others(root: Path, job_id: str) -> frozenset[tuple[str, str]]:
    """Return the sessions of other jobs than one; nothing for no job, and for the only one.

    A session has one job: the first of its manifests that can be read says which. DamagedError
    says which jobs there are when this is none of them.
    """
    if not job_id:
        return frozenset()
    files: defaultdict[tuple[str, str], list[ManifestFile]] = defaultdict(list)
    for rank in ranks_with_manifests(root):
        for file in manifest_files(root, rank, []):
            files[file.session].append(file)
    jobs = {
        session: manifest.status.job_id
        for session, own in files.items()
        if (manifest := next(read_manifests(own, [], balances_only=True), None)) is not None
    }
    there = sorted(set(jobs.values()))
    if job_id not in there:
        known = f"there is {', '.join(map(repr, there))}" if there else "no manifest names a job"
        raise DamagedError(f"{root}: nothing of job {job_id!r} is here: {known}")
    return frozenset(session for session, job in jobs.items() if job != job_id)


def of_job(tree: Tree, job_id: str) -> Tree:
    """Return the tree with the ranks and tables of a job, to which all that was read belongs.

    What no manifest names is a job's where there is no other one: of several it is left out.
    """
    places = {(each.status.rank, each.status.iteration) for each in tree.manifests}
    ranks = {rank for rank, _ in places}

    def may_hold(table: Table) -> bool:
        anywhen = table.constant or not table.dated
        return table.rank in ranks if anywhen else (table.rank, table.iteration) in places

    return replace(
        tree,
        ranks=tuple(sorted(ranks)),
        tables=tuple(filter(may_hold, tree.tables)),
        job_id=job_id,
    )

"""A check of a tree from beginning to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.folders import FORMS
from rankdump.fsck.manifests import held_manifests, retired_places
from rankdump.fsck.pool import checked
from rankdump.fsck.rows import check_rows
from rankdump.fsck.scan import scan, unfiled
from rankdump.fsck.sort import around, jobs_of
from rankdump.fsck.values import Checked, Damage, Held, Kind, Report
from rankdump.reader import retired_sentences

_NO_MANIFEST = (
    "no manifest: nothing says which files should be here, or what is in them; "
    "rankdump ingest gives such a tree manifests"
)


def check_tree(
    root: Path, *, workers: int, tell: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Return what is wrong with a tree; `tell` hears how many files are done, and of how many.

    DamagedError when the root, or a folder in it, cannot be read, or nothing of a dump is there.
    """
    everything = scan(root)
    if not everything:
        raise DamagedError(f"{root}: nothing of a dump is here: expected {FORMS}")
    damages: list[Damage] = []
    manifests, hidden = held_manifests(root, everything, damages)
    complete = {(each.manifest.status.rank, each.manifest.status.iteration) for each in manifests}
    gone = retired_places(root, everything, damages) - complete
    damages += around(everything, manifests, hidden, gone)
    damages += (_cut(held) for held in hidden)
    if manifests:
        damages += check_rows(root, everything, manifests)
    else:
        damages += unfiled(root, everything)
    jobs = jobs_of(manifests, {seen.path: seen for seen in everything}, damages)
    results: list[Checked] = []
    for result in checked(root, jobs, workers):
        results.append(result)
        tell(len(results), len(jobs))
    for result in results:
        if result.fault:
            damages += (Damage(Kind.TORN, path, result.fault) for path in result.job.paths)
    return Report(
        looked_at=len(everything),
        manifests=len(manifests),
        files=len(results),
        names=sum(len(result.job.paths) for result in results),
        bytes_read=sum(result.job.size_bytes for result in results),
        digests=sum(result.digests * len(result.job.paths) for result in results),
        damages=tuple(sorted(set(damages), key=lambda damage: (damage.path, damage.kind))),
        unchecked=() if gone and not manifests else tuple(_unchecked(manifests, results)),
        retired=tuple(retired_sentences(gone)),
    )


def _cut(held: Held) -> Damage:
    iteration = held.manifest.status.iteration
    text = f"the removal of iteration {iteration} was cut; the agent that began it goes on with it"
    return Damage(Kind.LEFTOVER, held.path, text)


def _unchecked(manifests: list[Held], results: list[Checked]) -> list[str]:
    if not manifests:
        return [_NO_MANIFEST]
    undecided = sum(result.undecided * len(result.job.paths) for result in results)
    if not undecided:
        return []
    return [f"{undecided} tensors: their manifests have no digest that could be compared"]

"""Check of a whole tree: its files are read and checked in several threads within a memory budget.
Reading, unpacking and hashing release the GIL, so the threads run in parallel.

For a table of statistics, every page of its files is checked, remains of killed writers are
searched for, and its rows are compared with the present manifests. pyarrow is imported only for a
tree with a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from rankdump._analysis.fsck.damage import (
    CheckReport,
    DamageKind,
    FileCheck,
    FileCheckResult,
    FileDamage,
    StoredManifest,
)
from rankdump._analysis.fsck.file_check import check_file
from rankdump._analysis.fsck.manifest_check import (
    check_fingerprints,
    check_tables,
    read_retired_places,
    read_stored_manifests,
)
from rankdump._analysis.fsck.tree_scan import (
    check_long_names,
    check_orders,
    check_unlisted_files,
    plan_file_checks,
    read_regular_file,
    scan_tree,
)
from rankdump._analysis.reader.baseline_files import describe_baselines
from rankdump._analysis.reader.manifests import retired_sentences
from rankdump._core.bounded_executor import execute_bounded
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.dump_folders import ROOT_FORMS
from rankdump.errors import CorruptedError

MAX_MEMORY_BYTES = 512 << 20
"""Largest number of bytes in memory at the same time; a file that needs more by itself is checked
alone.
"""

_NO_MANIFEST_SENTENCE = (
    "no manifest: the expected files and their content are not known; "
    "rankdump ingest gives such a tree manifests"
)


def check_files(root: Path, jobs: Iterable[FileCheck], workers: int) -> Iterator[FileCheckResult]:
    """Check files; yield each result as soon as it is known."""
    with ThreadPoolExecutor(workers, thread_name_prefix="rankdump-fsck") as pool:
        check = partial(_check_one_file, root)
        yield from execute_bounded(
            pool, check, jobs, _memory_bytes, MAX_MEMORY_BYTES, max_jobs=2 * workers
        )


def _check_one_file(root: Path, job: FileCheck) -> FileCheckResult:
    try:
        return check_file(job, read_regular_file(root, job.paths[0]))
    except CorruptedError as error:
        return FileCheckResult(job, str(error))


def _memory_bytes(job: FileCheck) -> int:
    # Both are counted twice, because the content is unpacked and packed once more.
    return 2 * job.size_bytes + 2 * job.plain_bytes


def check_tree(
    root: Path,
    *,
    workers: int,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Return the report of a check; `report_progress` is called with the number of files done and
    the total.

    CorruptedError when the root or a folder cannot be read, or the root is not a tree.
    """
    everything = scan_tree(root)
    if not everything:
        raise CorruptedError(f"{root}: not a dump tree: expected {ROOT_FORMS}")
    damages: list[FileDamage] = []
    manifests, hidden = read_stored_manifests(root, everything, damages)
    complete = {(each.manifest.status.rank, each.manifest.status.iteration) for each in manifests}
    gone = read_retired_places(root, everything, damages) - complete
    damages += check_unlisted_files(everything, manifests, hidden, gone)
    damages += (_interrupted_removal(held) for held in hidden)
    by_path = {seen.path: seen for seen in everything}
    damages += check_fingerprints(root, manifests, by_path)
    damages += check_orders(root, everything)
    if manifests:
        damages += check_tables(root, everything, manifests)
    else:
        damages += check_long_names(root, everything)
    jobs = plan_file_checks(manifests, by_path, damages)
    results: list[FileCheckResult] = []
    for result in check_files(root, jobs, workers):
        results.append(result)
        report_progress(len(results), len(jobs))
    for result in results:
        if result.damage_text:
            damages += (
                FileDamage(DamageKind.TORN, path, result.damage_text) for path in result.job.paths
            )
    of_table, table_sentences = check_statistics_table(root)
    damages += of_table
    return CheckReport(
        looked_at=len(everything),
        manifests=len(manifests),
        files=len(results),
        names=sum(len(result.job.paths) for result in results),
        bytes_read=sum(result.job.size_bytes for result in results),
        digests=sum(result.digests * len(result.job.paths) for result in results),
        damages=tuple(sorted(set(damages), key=lambda damage: (damage.path, damage.kind))),
        unchecked=()
        if gone and not manifests
        else tuple(_unchecked_sentences(root, manifests, results)),
        retired=tuple(retired_sentences(gone)),
        table=tuple(table_sentences),
    )


def _interrupted_removal(held: StoredManifest) -> FileDamage:
    iteration = held.manifest.status.iteration
    text = (
        f"the removal of iteration {iteration} was interrupted; the agent that began it "
        "will finish it"
    )
    return FileDamage(DamageKind.LEFTOVER, held.path, text)


def _unchecked_sentences(
    root: Path, manifests: list[StoredManifest], results: list[FileCheckResult]
) -> list[str]:
    if not manifests:
        return [_NO_MANIFEST_SENTENCE]
    sentences = describe_baselines(root, (held.manifest for held in manifests))
    undecided = sum(result.undecided * len(result.job.paths) for result in results)
    if undecided:
        text = f"{undecided} tensors: their manifests have no digest that could be compared"
        sentences.append(text)
    return sentences


_ADVICE = "it can be removed, and `rankdump index` makes it again"


def check_statistics_table(root: Path) -> tuple[list[FileDamage], list[str]]:
    """Return the damage in the files of a table of statistics, and sentences about what the table
    lacks.
    """
    if not (root / STATE_FOLDER / "table").is_dir():
        return [], []
    try:
        from rankdump._analysis.table_index import compare_with_tree
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        cause = "pip install 'rankdump[table]'" if is_missing else str(error)
        return [], [f"the table of statistics was not checked: {cause}"]
    damages = [*_list_remains(root), *_list_damaged(root)]
    lag = str(compare_with_tree(root))
    return damages, [f"the table {lag}: run rankdump index {root}"] if lag else []


def _list_remains(root: Path) -> Iterator[FileDamage]:
    """Yield the files that killed writers left; none while another process writes the table."""
    from rankdump._analysis.table.table_files import list_table, lock_table
    from rankdump._analysis.table.tree_access import LocalTree
    from rankdump.errors import UnavailableError

    access = LocalTree(root)
    with suppress(UnavailableError, OSError), lock_table(access, patience_s=0):
        for path in list_table(access, [], now_s=time.time()).remains:
            text = "a writer of the table of statistics died, and its rows are in other files"
            yield FileDamage(DamageKind.LEFTOVER, path, text, mendable=True)


def _list_damaged(root: Path) -> Iterator[FileDamage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rankdump._analysis.table.table_files import list_table
    from rankdump._analysis.table.tree_access import LocalTree

    listing = list_table(LocalTree(root), problems := [])
    for file, problem in zip(listing.damaged, problems, strict=True):
        text = problem.removeprefix(f"{root / file.paths[0]}: ")
        yield FileDamage(DamageKind.TORN, file.paths[0], f"{text}; {_ADVICE}", mendable=True)
    for path in (path for file in listing.files for path in file.paths):
        try:
            with pq.ParquetFile(root / path, page_checksum_verification=True) as opened:
                for group in range(opened.num_row_groups):
                    opened.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            text = f"a page cannot be read: {reason}; {_ADVICE}"
            yield FileDamage(DamageKind.TORN, path, text, mendable=True)

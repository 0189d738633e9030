"""Manifests of a tree, its lists of retired iterations and its session files: records of files and
table rows, ranks of devices, jobs, and the last written state of each session. Reads nothing else;
an unreadable manifest is reported as a problem and not raised.

A tree may contain the dumps of several jobs. A session belongs to one job, which the first readable
manifest of the session names. A session whose file says that it is open may have ended together
with its agent.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rankdump._analysis.reader.file_errors import named_errors, noted_errors
from rankdump._analysis.reader.tree import Table, Tree
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.manifest import (
    RETIRED_FILE,
    Manifest,
    ManifestRecord,
    RetiredIteration,
    names_no_file,
)
from rankdump._core.number_ranges import group_ranks
from rankdump._core.status import IterationStatus
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._core.tree_session import (
    MAX_FILE_BYTES,
    SESSIONS_FOLDER,
    TreeSession,
    parse_tree_session,
)
from rankdump._layout.dump_folders import RANK_FOLDER_PATTERN, DumpFolder, find_folder
from rankdump._layout.file_name import NUMBER_PATTERN
from rankdump._layout.tree_layouts import parse_folder_owner
from rankdump._layout.tree_paths import MANIFEST_FOLDER, METADATA_FOLDER
from rankdump.errors import CorruptedError

_CLAIM_NAME = re.compile(r"[0-9]{14}\.[0-9]+")
StatusAndRecord: TypeAlias = "tuple[IterationStatus, ManifestRecord]"
"""The status of an iteration, with one of its records."""
_MAX_HEAD_BYTES = 1 << 15
"""Largest number of bytes in which the first line of a manifest is looked for; if it is longer, the
whole file is read.
"""
_MANIFEST_NAME = re.compile(rf"iteration_({NUMBER_PATTERN})\.(.*)\.json", re.S)


class TreeManifests:
    """Records of manifests by file path; keeps track of the paths that were never looked up."""

    def __init__(
        self, manifests: Iterable[Manifest] = (), owners: Mapping[str, int] | None = None
    ) -> None:
        """`owners` contains the ranks of device folders, by time and device."""
        self._owners = owners or {}
        self._files: defaultdict[str, dict[str, StatusAndRecord]] = defaultdict(dict)
        self._bases: defaultdict[str, set[int]] = defaultdict(set)
        self._devices: defaultdict[int, set[int]] = defaultdict(set)
        self._asked: set[str] = set()
        for manifest in manifests:
            self.add(manifest)

    def add(self, manifest: Manifest) -> None:
        """Add the records of a manifest."""
        status = manifest.status
        self._devices[manifest.device].add(status.rank)
        parents: set[str] = set()
        for record in manifest.records:
            path = record.path
            # A record without a path is a row of a table, and has no file that may be missing.
            if path:
                self._files[path][record.member] = status, record
                parents.add(path.rpartition("/")[0])
        for folder in map(find_folder, parents):
            self._bases[folder.base if folder is not None else ""].add(status.rank)

    def records_of(self, path: str) -> dict[str, StatusAndRecord]:
        """Return the records of a file by member; the member of a file with one tensor is an empty
        text.
        """
        self._asked.add(path)
        return self._files.get(path, {})

    def rank_of(self, folder: DumpFolder) -> int:
        """Return the rank of a folder; for a device folder, the rank that used the device."""
        if not folder.device:
            return folder.rank
        ranks = self._bases.get(folder.base)
        if not ranks:
            # If only rows of statistics exist, there is no path, and devices of several hosts have
            # the same number.
            owner = self._owners.get(".".join(folder.base.split("/")[-2:]))
            ranks = self._devices.get(folder.rank) if owner is None else {owner}
        return next(iter(ranks)) if ranks and len(ranks) == 1 else folder.rank

    def has_path(self, path: str) -> bool:
        """Return whether a file has a record."""
        return path in self._files

    def list_baseline_paths(self) -> list[str]:
        """Return the paths that were never looked up and whose tensors are the same in a baseline.

        These paths have no files, unless other tensors of their operators have.
        """
        return [
            path
            for path in self.unclaimed_paths
            if any(record.same_as for _, record in self._files[path].values())
        ]

    def add_constants_of(self, other: TreeManifests) -> None:
        """Add the unclaimed records of constants, because the manifest of any iteration may have
        them.
        """
        for path in other.unclaimed_paths:
            folder = find_folder(path.rpartition("/")[0])
            if folder is not None and folder.constant:
                other._asked.add(path)
                self._files[path] |= other._files[path]

    @property
    def unclaimed_paths(self) -> list[str]:
        """Paths that were never looked up, because no file with the path was found."""
        return [path for path in self._files if path not in self._asked]


def read_folder_owners(root: Path) -> dict[str, int]:
    """Return the ranks that agents have assigned to device folders, by `{time}.{device}`."""
    access, found = LocalTree(root), dict[str, int]()
    with suppress(OSError):
        for name in filter(_CLAIM_NAME.fullmatch, access.listing(STATE_FOLDER)):
            rank = parse_folder_owner(access.read_link(STATE_FOLDER, name))
            found |= {} if rank is None else {name: rank}
    return found


def list_rank_folders(root: Path) -> list[str]:
    """Return the names of rank folders that have a manifest folder."""
    return sorted(path.parents[1].name for path in root.glob(f"rank*/{MANIFEST_FOLDER}"))


class ManifestFileName(NamedTuple):
    """Path of a manifest and the parts of its name."""

    path: Path
    iteration: int | None
    """Iteration; None if the name has no number."""
    session: tuple[str, str]
    """Folder of the rank, and the session in the name; if the name has no session, the
    whole name.
    """
    rank: int | None = None
    """Rank according to the folder; None if the folder is not named as a rank's."""


def list_tree_manifests(root: Path) -> Iterator[ManifestFileName]:
    """Yield the manifests of all ranks whose folders can be listed; those of each rank are sorted
    by iteration.
    """
    for folder in list_rank_folders(root):
        yield from list_manifest_files(root, folder, [])


def list_rank_manifests(root: Path, rank: int) -> list[ManifestFileName]:
    """Return the manifests of the rank with this number, whatever its folder is called."""
    named = ((name, RANK_FOLDER_PATTERN.fullmatch(name)) for name in list_rank_folders(root))
    folders = [name for name, parts in named if parts is not None and int(parts[2]) == rank]
    return [file for name in folders for file in list_manifest_files(root, name, [])]


def list_manifest_files(root: Path, rank: str, problems: list[str]) -> list[ManifestFileName]:
    """Return the manifests in the folder of a rank, sorted by iteration."""
    folder, names = root / rank / MANIFEST_FOLDER, list[str]()
    with (
        noted_errors(problems),
        named_errors(folder),
        suppress(FileNotFoundError),
        os.scandir(folder) as items,
    ):
        names = [item.name for item in items]
    of_rank = RANK_FOLDER_PATTERN.fullmatch(rank)
    number = int(of_rank[2]) if of_rank else None
    found = [
        ManifestFileName(folder / name, int(parts[1]), (rank, parts[2]), number)
        if (parts := _MANIFEST_NAME.fullmatch(name))
        else ManifestFileName(folder / name, None, (rank, name), number)
        for name in names
        if name.endswith(".json") and not name.startswith(".")
    ]
    return sorted(found, key=lambda file: (file.iteration is not None, file.iteration, file.path))


def read_manifest(path: Path) -> Manifest:
    """Return a manifest; CorruptedError if the file is no manifest, OSError if it
    cannot be read.
    """
    return Manifest.from_json(path.read_bytes())


def read_balance(path: Path) -> Manifest:
    """Return a manifest, without its records if that is possible."""
    return _read_head(path) or read_manifest(path)


def read_file_records(path: Path, indexed: Container[str]) -> Manifest:
    """Return a manifest; if none of its records names a file, without them.

    In a dump of statistics, most records are rows of tables, and making objects of them would take
    most of the time for opening its tree. The bytes of the file show whether any record names a
    file; `indexed` manifests are known to be intact, so their first line is sufficient.
    """
    head = _read_head(path)
    if head is None or head.status.bytes_stored or head.status.linked:
        return read_manifest(path)
    if str(path) in indexed:
        return head
    data = path.read_bytes()
    return head if names_no_file(data) else Manifest.from_json(data)


def read_manifests(
    files: Iterable[ManifestFileName],
    problems: list[str],
    read: Callable[[Path], Manifest] = read_manifest,
) -> Iterator[Manifest]:
    """Yield manifests one after the other; add a problem for each manifest that `read`
    cannot read.
    """
    for path, *_ in files:
        try:
            yield read(path)
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
        except CorruptedError as error:
            problems.append(f"{path}: {error}")


def _read_head(path: Path) -> Manifest | None:
    """Return a manifest without its records; None if the end of its first line is not within the
    limit.
    """
    # A file object would take as long as parsing the line, and status reads one line of each
    # iteration.
    descriptor = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = os.read(descriptor, _MAX_HEAD_BYTES)
    finally:
        os.close(descriptor)
    return Manifest.parse_head(start[: start.find(b"\n") + 1])


def read_retired_iterations(
    root: Path, ranks: Iterable[str], problems: list[str]
) -> frozenset[RetiredIteration]:
    """Return the retired iterations of ranks; add a problem for each unreadable list or line."""
    found: set[RetiredIteration] = set()
    for path in (root / rank / METADATA_FOLDER / RETIRED_FILE for rank in ranks):
        with noted_errors(problems), named_errors(path), suppress(FileNotFoundError):
            lines = path.read_bytes().decode(errors="replace").split("\n")
            # The text after the last line end is empty, or a line that is still being written.
            for line in lines[:-1]:
                try:
                    found.add(RetiredIteration.from_line(line))
                except CorruptedError as error:
                    problems.append(f"{path}: {error}")
    return frozenset(found)


def retired_sentences(gone: Iterable[tuple[int, int]]) -> list[str]:
    """Return sentences about retired iterations; ranks with the same iterations share a
    sentence.
    """
    return [
        f"rank {ranks}: iteration {iterations} is retired: removed by age or to free disk space"
        for iterations, ranks in sorted(group_ranks(gone).items())
    ]


def find_other_sessions(
    root: Path, job_id: str, attempt: int | None = None
) -> frozenset[tuple[str, str]]:
    """Return the sessions with manifests that belong to another job or attempt.

    Empty if neither a job nor an attempt is given. The first readable manifest of a session names
    both. CorruptedError lists the jobs if `job_id` is not one of them.
    """
    if not job_id and attempt is None:
        return frozenset()
    first = read_first_statuses(root)
    there = sorted({status.job_id for status in first.values()})
    if job_id and job_id not in there:
        known = f"known: {', '.join(map(repr, there))}" if there else "no manifest names a job"
        raise CorruptedError(f"{root}: the tree has no dump of job {job_id!r}; {known}")
    return frozenset(
        session
        for session, status in first.items()
        if job_id not in ("", status.job_id) or attempt not in (None, status.attempt)
    )


def read_first_statuses(root: Path) -> dict[tuple[str, str], IterationStatus]:
    """Return for each session the status in its first readable manifest, which names job and
    attempt.
    """
    files: defaultdict[tuple[str, str], list[ManifestFileName]] = defaultdict(list)
    for file in list_tree_manifests(root):
        files[file.session].append(file)
    return {
        session: manifest.status
        for session, own in files.items()
        if (manifest := next(read_manifests(own, [], read_balance), None)) is not None
    }


def list_jobs_by_time(root: Path) -> tuple[str, ...]:
    """Return the jobs that have manifests, the one that began last at the end.

    A job whose session files do not say when it began comes before jobs whose files do.
    """
    began = {status.job_id: 0 for status in read_first_statuses(root).values()}
    for each in read_tree_sessions(root):
        job_id = each.status.job_id
        if job_id in began:
            began[job_id] = max(began[job_id], each.status.started_us or each.changed_us)
    return tuple(sorted(began, key=lambda job_id: (began[job_id], job_id)))


def restrict_to_job(tree: Tree, job_id: str) -> Tree:
    """Return a tree with only the ranks and tables of a job; its entries are already restricted to
    the job.

    Tables are left out if no manifest of the job has their rank and iteration.
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


def restrict_to_attempt(tree: Tree, attempt: int) -> Tree:
    """Return a tree with only the sessions and ranks of an attempt; its entries are already
    restricted to the attempt.

    Tables are kept, because attempts share them. CorruptedError lists the attempts if the tree does
    not have this one.
    """
    if attempt not in tree.attempts:
        known = ", ".join(map(str, tree.attempts))
        raise CorruptedError(f"{tree.root}: the tree has no attempt {attempt}; known: {known}")
    tree = replace(tree, attempt=attempt)
    ranks = {each.status.rank for each in tree.own_sessions}
    ranks.update(manifest.status.rank for manifest in tree.manifests)
    kept = tuple(rank for rank in tree.ranks if rank in ranks or not tree.sessions)
    return replace(tree, ranks=kept)


def read_tree_sessions(root: Path, job_id: str = "") -> tuple[TreeSession, ...]:
    """Return the session files of a tree, the one that was changed last at the end.

    With an id, only those of that job. A file that cannot be read or is damaged is left out: it is
    replaced when the session changes, and the manifests of its iterations remain.
    """
    found: list[TreeSession] = []
    for path in (root / SESSIONS_FOLDER).glob("rank_*.json"):
        try:
            if path.is_symlink() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            session = parse_tree_session(path.read_bytes())
        except (OSError, CorruptedError):
            continue
        if job_id in ("", session.status.job_id):
            found.append(session)
    return tuple(sorted(found, key=lambda each: (each.changed_us, each.status.rank)))

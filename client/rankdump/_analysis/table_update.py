"""Update of the tensor table for manifests that were written, changed or removed, as the agent does
it while its ranks are running. Needs pyarrow.

Every step either writes one file, which has the rows of the manifests and those of the files that
it replaces, or only removes files. So a reader finds every row once, at whatever moment the process
is killed, and a step that is repeated finds its manifests in the table and does nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rankdump._analysis.reader.manifest_columns import make_iteration_table, read_manifest_columns
from rankdump._analysis.reader.tensor_columns import make_columns_of_manifests
from rankdump._analysis.table.table_files import (
    TABLE_FOLDER,
    NumberRange,
    TableExtent,
    TableFile,
    TableSource,
    list_table,
    lock_table,
    read_table_file,
    remove_table_files,
    select_names,
    write_table_file,
)
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._analysis.table_index import MAX_SMALL_FILES, SMALL_FILE_BYTES, split_windows
from rankdump._layout.api_tree import make_api_rank_folder
from rankdump.errors import CorruptedError, UnavailableError

_ANY_ITERATION = NumberRange(0, 1 << 63)
_MAX_TRIES = 8
_LOCK_PATIENCE_S = 2.0


class ChangedManifest(NamedTuple):
    """A manifest that was written, changed or removed."""

    path: str
    rank: int
    iteration: int

    @property
    def extent(self) -> TableExtent:
        """Extent that may have rows of the manifest, or of manifests that were removed because of
        it.
        """
        ranks = NumberRange(self.rank, self.rank)
        # The first attempt of an API dump removes all iterations of an earlier dump.
        if self.path.startswith(f"{make_api_rank_folder(self.rank)}/"):
            return TableExtent(_ANY_ITERATION, ranks)
        return TableExtent(NumberRange(self.iteration, self.iteration), ranks)


class TableStep(NamedTuple):
    """One change of the table."""

    sources: tuple[TableSource, ...]
    """Manifests whose rows are written; none if files are only removed."""
    replaces: tuple[TableFile, ...] = ()


@dataclass(slots=True)
class UpdateReport:
    """Result of an update."""

    rows: int = 0
    """Number of rows that were written, including those of replaced files."""
    files: int = 0
    problems: list[str] = field(default_factory=list[str])
    """Texts about damaged manifests, and about damaged files of the table."""


class _TableChangedError(Exception):
    """Another process has changed the table since the step was planned."""


def update_table(
    access: TreeAccess, manifests: Sequence[ChangedManifest], *, now_s: float
) -> UpdateReport:
    """Bring the rows of manifests up to date; `now_s` is the time in seconds since the epoch.

    UnavailableError while another process changes the table, OSError if the disk cannot store the
    files or a manifest cannot be read.
    """
    report = UpdateReport()
    for _ in range(_MAX_TRIES):
        report.problems.clear()
        run = _UpdateRun(access, manifests, report, now_s)
        try:
            run.finish()
            return report
        except _TableChangedError:
            continue
    raise UnavailableError(f"{access.root}: other processes keep changing the table of this tree")


def plan_steps(
    manifests: Mapping[str, TableSource | None],
    files: Sequence[TableFile],
    small: Sequence[TableFile],
) -> list[TableStep]:
    """Return the steps for manifests by path, each with its present state, or None if it was
    removed.

    `files` are the table files that may have rows of the manifests. The files in `small` are
    rewritten as one file if there are too many.
    """
    added: list[TableSource] = []
    changed: set[str] = set()
    held: defaultdict[str, list[TableSource]] = defaultdict(list)
    for source in (source for file in files for source in file.sources):
        held[source.path].append(source)
    for path, source in manifests.items():
        if path not in held and source is not None:
            added.append(source)
        elif path in held and held[path] != [source]:
            changed.add(path)
    steps = [_plan_rewrite(group, manifests) for group in _group_files(files, changed)]
    gone = {file.name for step in steps for file in step.replaces}
    merged = tuple(file for file in small if file.name not in gone)
    if len(merged) + bool(added) <= MAX_SMALL_FILES:
        merged = ()
    for number, window in enumerate(split_windows(added)):
        steps.append(_plan_rewrite(merged if not number else (), manifests, window))
    return steps


def _group_files(
    files: Sequence[TableFile], changed: Collection[str]
) -> list[tuple[TableFile, ...]]:
    """Return the files with changed manifests in groups; files that have a manifest in common are
    in one group.
    """
    groups: list[tuple[set[str], list[TableFile]]] = []
    for file in files:
        paths = {each.path for each in file.sources if each.path in changed}
        members = [file]
        for group in [each for each in groups if each[0] & paths]:
            groups.remove(group)
            paths |= group[0]
            members += group[1]
        if paths:
            groups.append((paths, members))
    return [tuple(members) for _, members in groups]


def _plan_rewrite(
    replaced: tuple[TableFile, ...],
    manifests: Mapping[str, TableSource | None],
    added: Iterable[TableSource] = (),
) -> TableStep:
    """Return the step that rewrites files, with the present state of their manifests."""
    # Earlier versions of `rankdump index` read the folders of some trees although these had
    # manifests.
    kept = {each.path: each for f in replaced for each in f.sources if each.is_manifest}
    kept |= {path: source for path, source in manifests.items() if path in kept and source}
    removed = {path for path, source in manifests.items() if source is None}
    sources = [source for path, source in kept.items() if path not in removed]
    return TableStep((*sources, *added), replaced)


def _find_source(access: TreeAccess, path: str) -> TableSource | None:
    """Return the present state of a manifest; None if it was removed."""
    try:
        found = access.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return TableSource(path, found.st_size, found.st_mtime_ns)


class _UpdateRun:
    """One attempt of an update; it ends if another process has changed the same part of
    the table.
    """

    def __init__(
        self,
        access: TreeAccess,
        manifests: Sequence[ChangedManifest],
        report: UpdateReport,
        now_s: float,
    ) -> None:
        self._access, self._manifests, self._report = access, manifests, report
        self._extents = [each.extent for each in manifests]
        self._seen = self._list_names(self._extents)
        self._listing = list_table(access, report.problems, extents=self._extents, now_s=now_s)

    def finish(self) -> None:
        """Run all steps; _TableChangedError if the table's files have changed since the attempt
        began.
        """
        current = {each.path: _find_source(self._access, each.path) for each in self._manifests}
        current |= dict.fromkeys(self._list_removed(current))
        for step in plan_steps(current, self._listing.files, self._list_small()):
            self._run(step)

    def _list_removed(self, known: Container[str]) -> list[str]:
        """Return the other manifests of the files that do not exist any more."""
        paths = {each.path for f in self._listing.files for each in f.sources if each.is_manifest}
        others = (path for path in paths if path not in known)
        return [path for path in others if _find_source(self._access, path) is None]

    def _list_names(self, extents: Sequence[TableExtent]) -> frozenset[str]:
        try:
            return frozenset(select_names(self._access.listing(TABLE_FOLDER), extents))
        except FileNotFoundError:
            return frozenset()

    def _list_small(self) -> list[TableFile]:
        """Return the small files of the ranks of these manifests, if there are too many."""
        ranks = [each.rank for each in self._manifests]
        own = NumberRange(min(ranks), max(ranks))
        names = [
            name
            for name in self._list_names([TableExtent(_ANY_ITERATION, own)])
            if (extent := TableExtent.parse(name)) is not None and own.contains(extent.ranks)
        ]
        found: list[TableFile] = []
        for name in names if len(names) >= MAX_SMALL_FILES else ():
            with suppress(FileNotFoundError, CorruptedError):
                if self._access.stat(f"{TABLE_FOLDER}/{name}").st_size < SMALL_FILE_BYTES:
                    found.append(read_table_file(self._access, name))
        replaced = {name for file in found for name in file.replaces}
        return [f for f in found if f.is_of_manifests and f.name not in replaced]

    def _run(self, step: TableStep) -> None:
        """Write and remove the files of a step."""
        replaced = {file.name for file in step.replaces}
        written = self._write_rows(step)
        if not written and step.replaces:
            self._change_files(step, lambda: None)
        remains = {path.rpartition("/")[2] for path in self._listing.remains}
        self._seen = self._seen.difference(replaced, remains).union(
            select_names([file.name for file in written], self._extents)
        )

    def _write_rows(self, step: TableStep) -> list[TableFile]:
        """Write the rows of a step; return the file, none if no manifest can be read."""
        # A source of a replaced file may have been changed or removed since.
        current = (_find_source(self._access, each.path) for each in step.sources)
        sources = [each for each in current if each is not None]
        problems = self._report.problems
        read = read_manifest_columns(self._access, [each.path for each in sources], problems)
        if read.disk_errors:
            raise read.disk_errors[0]
        sources = [each for each in sources if each.path not in read.unread_paths]
        if not sources:
            return []
        rows = make_columns_of_manifests(self._access, read, problems)
        file = write_table_file(
            self._access,
            rows,
            make_iteration_table(read.manifests),
            sources,
            replaces=[file.name for file in step.replaces],
            guard=partial(self._change_files, step),
        )
        self._report.rows += len(rows)
        self._report.files += 1
        return [file]

    def _change_files(self, step: TableStep, rename: Callable[[], None]) -> None:
        """Rename what was written and remove what it replaces, while no other process changes the
        table.
        """
        with lock_table(self._access, patience_s=_LOCK_PATIENCE_S):
            if self._list_names(self._extents) != self._seen:
                raise _TableChangedError
            # Removed first, because a file becomes valid again if the file that replaces it is
            # replaced itself.
            self._access.remove(self._listing.remains)
            rename()
            remove_table_files(self._access, step.replaces)

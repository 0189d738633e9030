"""Retention: a thread removes whole iterations by age and size, in the order in which they ended,
unless they are open or pinned.

One rank's part of an iteration is removed in steps that may be repeated. The line about the removal
is written before the manifest is hidden. The hidden manifest, which lists the files, is removed
after the files. So the next process can finish a removal that was interrupted after any step.
Folders are accessed through descriptors only, so that targets of links, which are outside the tree,
stay.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from rankdump._core.manifest import (
    RETIRED_FILE,
    Manifest,
    RetiredIteration,
    make_fingerprint_name,
    make_manifest_name,
)
from rankdump._core.number_ranges import ranges
from rankdump._core.units import format_bytes
from rankdump._layout import statistic_tables
from rankdump._layout.dump_folders import find_folder, parse_name_in_folder
from rankdump._layout.file_name import FileKind
from rankdump._layout.tree_layouts import GraphPlace
from rankdump._layout.tree_paths import (
    FINGERPRINT_FOLDER,
    MANIFEST_FOLDER,
    MAPPING_FILE,
    METADATA_FOLDER,
)
from rankdump.errors import RankdumpError
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.ledger.rows import EndedIteration, IterationRemoval
from rankdumpd.agent.limits.admission import ResourcePolicy, find_retirement_cause
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.records import read_wall_clock_us
from rankdumpd.agent.session.registry import SessionRegistry, read_stored_session
from rankdumpd.agent.storage.folders import ABSENT_ERRORS
from rankdumpd.agent.storage.session_storage import SessionStorage, make_session_storage
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.server.audit_log import AuditCallback, ignore_action
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import log_about
from rankdumpd.server.metrics import MetricCounters

_logger = logging.getLogger(__name__)

MAX_BATCH_FILES = 512


@dataclass(frozen=True, slots=True)
class IterationPart:
    """One rank's part of an iteration, with its place in a tree."""

    storage: SessionStorage
    retired: RetiredIteration

    @property
    def tree(self) -> DumpTree:
        """The tree that has this part."""
        return self.storage.tree

    @property
    def rank_folder(self) -> str:
        """Folder with the metadata of the rank."""
        return self.storage.layout.rank_folder(self.retired.rank)

    @property
    def manifest(self) -> str:
        """Path of the manifest of this part."""
        return make_manifest_name(self.retired.iteration, self.retired.session_id)

    @property
    def hidden(self) -> str:
        """Path of the manifest while files are being removed; readers ignore it."""
        return f".{self.manifest}"


def list_tensor_files(part: IterationPart) -> list[str]:
    """Return the paths of the part's tensor files; none when its manifest has been removed.

    OSError and CorruptedError when the manifest cannot be read.
    """
    for name in (part.manifest, part.hidden):
        with suppress(FileNotFoundError):
            data = part.tree.read(f"{part.rank_folder}/{MANIFEST_FOLDER}", name)
            records = Manifest.from_json(data).records
            named = (record.path for record in records if not record.same_as)
            return list(dict.fromkeys(filter(None, named)))
    return []


def compute_freed_bytes(parts: Iterable[tuple[DumpTree, Sequence[str]]]) -> list[int]:
    """Return for each part how many bytes its files free when all parts are removed.

    A file with hard links outside of these parts frees nothing.
    """
    left: Counter[tuple[int, int]] = Counter()
    freed: list[int] = []
    for tree, paths in parts:
        freed.append(0)
        for path in paths:
            with suppress(OSError):
                status = tree.stat(path)
                which = (status.st_dev, status.st_ino)
                left[which] += 1
                if left[which] == status.st_nlink:
                    freed[-1] += status.st_size
    return freed


def remove_part(part: IterationPart, *, shared: bool) -> Iterator[None]:
    """Remove a part step by step; `shared` says that another job may write to the same folders.

    After an OSError the remaining steps can be repeated later.
    """
    paths = list_tensor_files(part)
    tree, manifests = part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}"
    line = part.retired.to_line()
    tree.append_lines(f"{part.rank_folder}/{METADATA_FOLDER}", RETIRED_FILE, (line,))
    yield
    if tree.has(manifests, part.manifest):
        tree.move(f"{manifests}/{part.manifest}", part.hidden)
    yield
    for start in range(0, len(paths), MAX_BATCH_FILES):
        _remove_files(tree, paths[start : start + MAX_BATCH_FILES])
        yield
    if not shared and not _has_other_sessions(part):
        for folder in list_own_folders(part):
            _remove_tables(part, folder)
            yield
    fingerprints = f"{part.rank_folder}/{FINGERPRINT_FOLDER}"
    _remove_files(tree, [f"{fingerprints}/{make_fingerprint_name(part.manifest)}"])
    tree.remove((f"{manifests}/{part.hidden}",))
    yield


def list_own_folders(part: IterationPart) -> list[str]:
    """Return the folders that contain this iteration of the rank and nothing else."""
    pattern, _ = _make_pattern(part)
    found = [""] if pattern else []
    for name in pattern:
        found = [below for folder in found for below in _list_below(part.tree, folder, name)]
    return found


def _make_pattern(part: IterationPart) -> tuple[list[str | None], int]:
    """Return the path components of the iteration's folders, None for a component with any name,
    and how many leading components all iterations share.

    No components where tensors of several iterations are in one folder.
    """
    rank, iteration = part.retired.rank, part.retired.iteration

    def split_path(net_name: str, graph: int, iteration: int) -> list[str]:
        place = GraphPlace(rank, net_name, graph, iteration)
        return part.storage.layout.make_folder(part.storage.context, place).split("/")

    own, other, next_one = (
        split_path("a", 1, iteration),
        split_path("b", 2, iteration),
        split_path("a", 1, iteration + 1),
    )
    if own == next_one:
        return [], 0
    stay = next(at for at, names in enumerate(zip(own, next_one, strict=True)) if len({*names}) > 1)
    return [a if a == b else None for a, b in zip(own, other, strict=True)], stay


def _list_below(tree: DumpTree, folder: str, name: str | None) -> list[str]:
    where = f"{folder}/" if folder else ""
    return [
        f"{where}{each}"
        for each, is_folder in _list_folder(tree, folder).items()
        if is_folder and name in (None, each) and not each.startswith(".")
    ]


def _list_folder(tree: DumpTree, folder: str) -> dict[str, bool]:
    """Return the entries of a folder of the tree; none when the folder does not exist
    or is a link.
    """
    with suppress(*ABSENT_ERRORS):
        return tree.listing(folder)
    return {}


def _remove_files(tree: DumpTree, paths: Sequence[str]) -> None:
    """Remove files, except for those whose folder was replaced by a link out of the tree."""
    for _, some in groupby(paths, key=lambda path: path.rpartition("/")[0]):
        with suppress(*ABSENT_ERRORS):
            tree.remove(some)


def _has_other_sessions(part: IterationPart) -> bool:
    """Return whether another session has this iteration of the rank, too."""
    begins = f"iteration_{part.retired.iteration}."
    names = _list_folder(part.tree, f"{part.rank_folder}/{MANIFEST_FOLDER}")
    return any(name.startswith(begins) and name.endswith(".json") for name in names)


def _remove_tables(part: IterationPart, folder: str) -> None:
    """Remove a folder with its tables, unless it contains anything else."""
    names = _list_folder(part.tree, folder)
    if not all(_is_table(folder, name) for name in names):
        return
    # The mapping of long names is removed last, when there are no files with short names any more.
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name != MAPPING_FILE])
    _remove_files(part.tree, [f"{folder}/{name}" for name in names if name == MAPPING_FILE])
    _, stay = _make_pattern(part)
    while folder.count("/") >= stay:
        try:
            part.tree.remove_folder(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]


def _is_table(path: str, name: str) -> bool:
    if name == MAPPING_FILE or statistic_tables.STATISTIC_TABLE_NAME.fullmatch(name):
        return True
    folder = find_folder(path)
    parsed = parse_name_in_folder(folder, name) if folder is not None else None
    return parsed is not None and parsed.kind is FileKind.TABLE


CHECK_INTERVAL_S = 30.0

_SETTINGS = {"age": "retain_days", "size": "retain_bytes"}
"""The setting that causes a removal, by cause."""


class _RemovedPart(NamedTuple):
    """The removed part of one rank in an iteration, with the bytes that its removal freed."""

    retired: RetiredIteration
    byte_count: int


def describe_removed(parts: Iterable[_RemovedPart]) -> Iterator[tuple[str, str]]:
    """Yield a job and a sentence for each cause because of which parts of the job were removed."""
    groups: dict[tuple[str, str], list[_RemovedPart]] = {}
    for part in parts:
        groups.setdefault((part.retired.job_id, part.retired.why), []).append(part)
    for (job_id, why), some in groups.items():
        iterations = {part.retired.iteration for part in some}
        ranks = len({part.retired.rank for part in some})
        size = format_bytes(sum(part.byte_count for part in some))
        what = f"iteration{'s' * (len(iterations) > 1)} {ranges(iterations)}"
        whose = f"{ranks} rank{'s' * (ranks > 1)}"
        setting = _SETTINGS.get(why, why)
        yield job_id, f"job {job_id}: {what} of {whose} removed, {size}: {setting}"


class RetentionManager:
    """Removes due iterations in a thread of its own, after finishing interrupted removals.

    When the thread is stopped, the next process finishes what is left.
    """

    def __init__(
        self,
        ledger: AgentLedger,
        registry: SessionRegistry,
        usage: DumpUsage,
        policy: Callable[[], ResourcePolicy],
        *,
        audit: AuditCallback = ignore_action,
        counters: MetricCounters | None = None,
        now_us: Callable[[], int] = read_wall_clock_us,
    ) -> None:
        """`audit` is called for each removed part; `now_us` returns microseconds since
        the epoch.
        """
        self._ledger, self._registry, self._usage = ledger, registry, usage
        self._policy, self._audit, self._now_us = policy, audit, now_us
        self._counters = counters or MetricCounters()
        self.thread = BackgroundThread(self._run, "rankdumpd-retention")
        self._problem = ""
        self._removed: list[_RemovedPart] = []
        """Parts that were removed in the present pass."""

    def findings(self) -> list[str]:
        """Return why old iterations cannot be removed: one sentence, or none."""
        return [f"old iterations are not removed: {self._problem}"] if self._problem else []

    def remove_due(self) -> int:
        """Finish interrupted removals, then remove due iterations; return how many."""
        try:
            return self._remove_due()
        finally:
            for job_id, text in describe_removed(self._removed):
                _logger.info("%s", text, extra={"job": job_id})
            self._removed.clear()

    def _remove_due(self) -> int:
        problems: list[str] = []
        for left in self._ledger.retention.unfinished():
            self._try_step(partial(self._finish, left), problems)
        removed = 0
        policy = self._policy()
        for ended in self._ledger.retention.oldest() if not policy.retains_all else ():
            age_s = (self._now_us() - ended.ended_us) / 1e6
            _, waiting_bytes = self._ledger.unpacked.sums
            why = find_retirement_cause(policy, age_s, self._usage.total - waiting_bytes)
            if not why or self.thread.is_stopping or self._has_unpacked(ended):
                break
            retire = partial(self._retire, ended, why)
            removed += bool(self._try_step(retire, problems))
        self._note_problem("; ".join(dict.fromkeys(problems)))
        return removed

    def _has_unpacked(self, ended: EndedIteration) -> bool:
        """Return whether a file of an iteration is still to be packed. Such an iteration is not
        removed yet, so that no size changes during the removal.
        """
        return any(
            self._ledger.unpacked.count(session_id, ended.iteration)
            for session_id in self._ledger.retention.parts(ended)
        )

    def _try_step(self, step: Callable[[], bool], problems: list[str]) -> bool:
        """Run a step; a step that fails is retried later and does not prevent other steps."""
        try:
            return step()
        except (OSError, RankdumpError) as error:
            problems.append(str(error))
            return False

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            _logger.error("old iterations are not removed: %s", problem)
        self._problem = problem

    def _run(self) -> None:
        while not self.thread.is_stopping:
            try:
                while self.remove_due() and not self.thread.is_stopping:
                    pass
            except (sqlite3.Error, RankdumpError) as error:
                self._note_problem(str(error))
            self.thread.wait(CHECK_INTERVAL_S)

    def _retire(self, ended: EndedIteration, why: str) -> bool:
        """Remove all parts of an iteration; return whether there were any."""
        now_us = self._now_us()
        parts = [
            self._make_part(session_id, ended.iteration, now_us, why)
            for session_id in self._ledger.retention.parts(ended)
        ]
        sizes = compute_freed_bytes((part.tree, list_tensor_files(part)) for part in parts)
        begun = [_make_removal(part, size) for part, size in zip(parts, sizes, strict=True)]
        if not begun or not self._ledger.retention.begin_removals(begun):
            return False
        for part, size in zip(parts, sizes, strict=True):
            self._usage.add(ended.job_id, str(part.tree.root), -size)
        return all(self._finish(each) for each in begun)

    def _finish(self, begun: IterationRemoval) -> bool:
        why = str(begun.about.get("why", ""))
        part = self._make_part(begun.session_id, begun.iteration, begun.began_us, why)
        part.storage.lock.acquire(make=False)
        try:
            for _ in remove_part(part, shared=self._is_shared(part)):
                if self.thread.is_stopping:
                    return False
        finally:
            part.storage.lock.release()
        self._ledger.forget(begun.session_id, begun.iteration)
        self._ledger.retention.finish_removal(begun)
        self._usage.count_retired(part.retired.job_id)
        self._counters.add("rankdump_agent_retired_iterations_total")
        root = str(part.tree.root)
        self._audit("retired", {**begun.about, "session": begun.session_id, "root": root})
        self._removed.append(_RemovedPart(part.retired, begun.byte_count))
        log_about(_logger, part.retired, iteration=begun.iteration).debug(
            "job %s, rank %d: iteration %d was removed",
            *(part.retired.job_id, part.retired.rank, begun.iteration),
        )
        return True

    def _make_part(self, session_id: str, iteration: int, at_us: int, why: str) -> IterationPart:
        request, plan = read_stored_session(self._ledger, session_id)
        retired = RetiredIteration(request.job_id, session_id, request.rank, iteration, at_us, why)
        return IterationPart(make_session_storage(request, plan), retired)

    def _is_shared(self, part: IterationPart) -> bool:
        """Return whether a rank of another job may write to the folders of this part."""
        return any(
            session.storage.tree.root == part.tree.root
            and session.request.rank == part.retired.rank
            and session.request.job_id != part.retired.job_id
            and not session.over
            for session in self._registry.list_sessions()
        )


def _make_removal(part: IterationPart, size: int) -> IterationRemoval:
    retired = part.retired
    about = {
        "job": retired.job_id,
        "rank": retired.rank,
        "iteration": retired.iteration,
        "bytes": size,
        "why": retired.why,
    }
    return IterationRemoval(retired.session_id, retired.iteration, size, retired.at_us, about)

"""Writer of frozen trees. The raw file of a freeze becomes an ordinary tree: one table and one
manifest for each iteration of each rank, fingerprints of some tensors, files of others, and the
record of the freeze, which is written last.

A tree is at `blackbox/{iteration}` below the root of the dump, or at `blackbox/{iteration}.{n}` if
that folder belongs to another job, attempt or freeze. The ledger has no rows of a frozen tree, so
retention never removes it. Writing may be repeated from the beginning at any time. Raw files wait
until their tree is written, including those that an earlier process left; a damaged one is set
aside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from rankdump._core.black_box import PULSE_ROW, StepState, StepTensor
from rankdump._core.drop_reasons import STEP_OVERHEAD
from rankdump._core.freeze_record import (
    BLACK_BOX_FOLDER,
    FreezeRecord,
    FrozenRank,
    FrozenStep,
    format_freeze_record,
    make_record_name,
    parse_freeze_record,
)
from rankdump._core.manifest import Manifest, ManifestRecord, make_manifest_name
from rankdump._core.plan import (
    UNNAMED_MODEL,
    ContentSettings,
    DumpPlan,
    OutputSettings,
    plan_to_json,
)
from rankdump._core.record import TensorKind
from rankdump._core.session_protocol import RecordHead, SessionEnd
from rankdump._core.status import IterationStatus, SessionState
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.tree_paths import MANIFEST_FOLDER
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.agent.blackbox.freeze_decision import compute_tree_bytes
from rankdumpd.agent.blackbox.freeze_state import FreezeOrder
from rankdumpd.agent.blackbox.pulse_rows import (
    FROZEN_STATISTICS,
    iter_table_rows,
    list_timestamps,
    read_details,
    read_pulses,
    summarize_step,
)
from rankdumpd.agent.blackbox.raw_freeze import (
    RawFreezeFolder,
    RawRing,
    read_raw_record,
    read_raw_ring,
)
from rankdumpd.agent.records import FrameId, ReceivedRecord, RecordOutcome, RecordStatus
from rankdumpd.agent.session.rank_session import RankSession, prepare_tree
from rankdumpd.agent.session.registry import read_checked_plan
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.record_formats import examine_record
from rankdumpd.agent.storage.statistic_tables import make_row_record
from rankdumpd.agent.storage.tree import DumpTree

CLAIM_NAME = "black_box_owner"
MAX_NUMBERED_TREES = 1024
_ITEM_BYTES = 4096
"""Bytes that each file or folder occupies at least on most disks."""


def make_frozen_plan(plan: DumpPlan, root: str) -> DumpPlan:
    """Return the plan of a frozen tree beside the dump of a plan: statistics of every tensor."""
    output = plan.output
    return DumpPlan(
        OutputSettings(
            root=root,
            net_name=output.net_name,
            codec="none",
            file_mode=output.file_mode,
            folder_mode=output.folder_mode,
        ),
        content=ContentSettings(saved="statistic", statistics=FROZEN_STATISTICS, fingerprints=True),
        delivery=plan.delivery,
        black_box=plan.black_box,
    )


def measure_frozen_trees(root: Path) -> int:
    """Return the approximate number of bytes that the frozen trees beside a dump occupy."""
    total = 0
    for folder, folders, files in os.walk(root / BLACK_BOX_FOLDER):
        total += _ITEM_BYTES * len(folders)
        for name in files:
            try:
                size = os.lstat(f"{folder}/{name}").st_size
            except OSError:
                continue
            total += -(-size // _ITEM_BYTES) * _ITEM_BYTES
    return total


class FrozenTreeWriter:
    """Writes the frozen trees of one agent; for one thread."""

    def __init__(
        self,
        host: str,
        agent: str,
        *,
        find_shortage: Callable[[Path, str, int], str],
        is_stopping: Callable[[], bool],
        now_us: Callable[[], int],
    ) -> None:
        """`agent` tells agents of the same host apart; writing ends early when `is_stopping`
        returns true.

        `find_shortage` returns why the disk has no room for a number of bytes of a job.
        """
        self._name = make_record_name(host, agent)
        self._find_shortage, self._is_stopping = find_shortage, is_stopping
        self._now_us = now_us

    def write(self, path: Path) -> tuple[FreezeRecord, str] | None:
        """Write the tree of a raw file; return its record and root, or None when the agent stops.

        CorruptedError when the file is damaged, OSError when the disk fails or has no room.
        """
        with path.open("rb") as file:
            record = read_raw_record(file)
            tree: DumpTree | None = None
            ranks: list[FrozenRank] = []
            for rank in record.ranks:
                ring = read_raw_ring(file, rank.held_steps)
                plan = read_checked_plan(ring.request)
                if tree is None:
                    self._check_room(record, plan, path.stat().st_size)
                    tree = self._find_tree(record, plan)
                steps = self._write_rank(record, rank, ring, make_frozen_plan(plan, str(tree.root)))
                if steps is None:
                    return None
                ranks.append(dataclasses.replace(rank, steps=steps))
        if tree is None:
            raise CorruptedError("a raw file of a freeze has no rank")
        done = dataclasses.replace(record, ranks=tuple(ranks))
        tree.put(STATE_FOLDER, self._name, (format_freeze_record(done),), mark=self._name)
        return done, str(tree.root)

    def is_written(self, job_id: str, attempt: int, iteration: int, plan: DumpPlan) -> bool:
        """Return whether this agent has written the complete tree of that freeze for a job with
        this plan.
        """
        for root in _list_roots(plan, iteration):
            tree = _open_tree(make_frozen_plan(plan, root))
            if not tree.has(STATE_FOLDER, CLAIM_NAME):
                return False
            if tree.has(STATE_FOLDER, self._name):
                try:
                    known = parse_freeze_record(tree.read(STATE_FOLDER, self._name))
                except CorruptedError:
                    continue
                if (known.job_id, known.attempt) == (job_id, attempt):
                    return True
        return False

    def _check_room(self, record: FreezeRecord, plan: DumpPlan, raw_bytes: int) -> None:
        """Raise an OSError where the disk of the tree has no room for the rows and tensors of a raw
        file.
        """
        tensor_bytes = min(sum(rank.tensor_bytes for rank in record.ranks), raw_bytes)
        rows = (raw_bytes - tensor_bytes) // PULSE_ROW.itemsize
        tensors = sum(rank.held_tensors for rank in record.ranks)
        size = compute_tree_bytes(rows, tensors, tensor_bytes)
        shortage = self._find_shortage(Path(plan.output.root), record.job_id, size)
        if shortage:
            raise OSError(errno.ENOSPC, f"the disk has no room ({shortage})", plan.output.root)

    def _find_tree(self, record: FreezeRecord, plan: DumpPlan) -> DumpTree:
        """Return the tree of a freeze, which other agents of the job may have begun."""
        owner = f"attempt {record.attempt} of {record.job_id!r}"
        for root in _list_roots(plan, record.iteration):
            tree = _open_tree(make_frozen_plan(plan, root))
            if tree.claim(STATE_FOLDER, CLAIM_NAME, owner) and self._is_own(tree, record):
                return tree
        raise CorruptedError(f"{MAX_NUMBERED_TREES} frozen trees of one iteration exist already")

    def _is_own(self, tree: DumpTree, record: FreezeRecord) -> bool:
        """Return whether a tree has no record of this agent, or the record of the same freeze."""
        if not tree.has(STATE_FOLDER, self._name):
            return True
        try:
            known = parse_freeze_record(tree.read(STATE_FOLDER, self._name))
        except CorruptedError:
            return False
        # Another worker, which was removed since, may have frozen other ranks in the same
        # microsecond.
        sessions = ([each.session_id for each in ranks] for ranks in (known.ranks, record.ranks))
        return known.frozen_us == record.frozen_us and next(sessions) == next(sessions)

    def _write_rank(
        self, record: FreezeRecord, rank: FrozenRank, ring: RawRing, plan: DumpPlan
    ) -> tuple[FrozenStep, ...] | None:
        """Write the iterations of a rank and return their summaries; None when the agent stops."""
        request = dataclasses.replace(ring.request, plan_json=plan_to_json(plan))
        session = RankSession(request, plan)
        tables = session.storage.tables
        assert tables is not None
        # An agent that was killed may have written some of these rows already.
        tables.expect_existing_rows()
        prepare_tree(session, request, self._now_us())
        try:
            steps: list[FrozenStep] = []
            last_us = 0
            for state, tensors in ring.steps:
                if self._is_stopping():
                    return None
                placed = place_tensors(state, ring.kinds, tensors)
                stamps = list_timestamps(state, last_us, len(placed.others))
                last_us = stamps[-1] if stamps else last_us
                _write_step(session, state, placed, ring.kinds, stamps)
                steps.append(summarize_step(state, ring.kinds, stamps, len(placed)))
            _close_session(session, record, rank, self._now_us())
        finally:
            session.storage.lock.release()
        return tuple(steps)


def _list_roots(plan: DumpPlan, iteration: int) -> Iterator[str]:
    """Yield the folders that may have the tree of an iteration, the usual one first."""
    first = f"{plan.output.root}/{BLACK_BOX_FOLDER}/{iteration}"
    yield first
    yield from (f"{first}.{number}" for number in range(1, MAX_NUMBERED_TREES))


def _open_tree(plan: DumpPlan) -> DumpTree:
    output = plan.output
    return DumpTree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        synced=plan.delivery.durability == "synced",
    )


def _write_step(
    session: RankSession,
    state: StepState,
    placed: PlacedTensors,
    kinds: Sequence[TensorKind],
    stamps: Sequence[int],
) -> None:
    """Write the table, the tensors and the manifest of an iteration, unless its manifest exists."""
    request, storage = session.request, session.storage
    tree, layout = storage.tree, storage.layout
    folder = layout.rank_folder(request.rank)
    name = make_manifest_name(state.iteration, request.session_id)
    if tree.has(f"{folder}/{MANIFEST_FOLDER}", name):
        return
    details = read_details(state)
    measured = len(stamps) - len(placed.others)
    rows = list(iter_table_rows(state, details, kinds, stamps[:measured]))
    if rows and storage.tables is not None:
        # Sorted by folder, because rows of several graphs or models alternate.
        texts = storage.table_format.format_statistics(rows, state.iteration)
        storage.tables.add(sorted(texts, key=lambda row: row.table.path))
    records = [make_row_record(kind, at_us, has_member=False) for kind, at_us, _ in rows]
    times = [*(stamps[row] for row in placed.measured), *stamps[measured:]]
    files = write_tensors(session, [*placed.measured.values(), *placed.others], times)
    for row, record in zip(placed.measured, files, strict=False):
        records[row] = record
    records += files[len(placed.measured) :]
    graphs = {kind.graph for kind, _, _ in rows}
    rank_files.append_iteration(tree, request.rank, graphs, state.iteration, repeated=True)
    status, seal = _make_status(session, state, records), None
    if details:
        fingerprints = [(row, each.fingerprint) for row, each in details.items()]
        seal = rank_files.write_fingerprints(tree, folder, status, fingerprints)
    manifest = Manifest(
        status=status,
        world_size=request.world_size,
        device=request.device,
        host=request.host,
        records=tuple(records),
        fingerprints=seal,
    )
    rank_files.write_manifest(tree, folder, manifest)


def _make_status(
    session: RankSession, state: StepState, records: Sequence[ManifestRecord]
) -> IterationStatus:
    request, count = session.request, len(records)
    skipped = Counter({STEP_OVERHEAD: state.skipped})
    return IterationStatus(
        job_id=request.job_id,
        session_id=request.session_id,
        rank=request.rank,
        iteration=state.iteration,
        complete=True,
        expected=count + state.skipped,
        stored=count,
        dropped=dict(+skipped),
        bytes_in=sum(record.bytes_in for record in records),
        bytes_stored=sum(record.bytes_stored for record in records),
        attempt=request.attempt,
    )


def _close_session(
    session: RankSession, record: FreezeRecord, rank: FrozenRank, now_us: int
) -> None:
    """Write how the session ended, as far as its frozen tree covers it."""
    note = f"frozen at iteration {record.iteration}: {record.causes[0].text}"
    session.close_by_rank(SessionEnd(rank.held_steps, (note,)))
    closed = session.make_tree_session(now_us)
    if rank.state is SessionState.LOST:
        lost = dataclasses.replace(
            closed.status, state=SessionState.LOST, ended_by=rank.ended_by, last_events_known=True
        )
        closed = dataclasses.replace(closed, status=lost)
    rank_files.replace_session_file(session.storage.tree, closed)


class PlacedTensors(NamedTuple):
    """The full tensors of a step."""

    measured: dict[int, StepTensor]
    """Tensors that have a row in the step, by the number of that row."""
    others: list[StepTensor]

    def __len__(self) -> int:
        return len(self.measured) + len(self.others)


def place_tensors(
    state: StepState, kinds: Sequence[TensorKind], tensors: Sequence[StepTensor]
) -> PlacedTensors:
    """Assign full tensors to the rows of their step; a tensor whose row has another
    kind gets none.
    """
    numbers = cast("list[int]", read_pulses(state)["kind"].tolist())
    placed = PlacedTensors({}, [])
    for tensor in tensors:
        row = tensor.row
        has_row = row is not None and row < len(numbers) and kinds[numbers[row]] == tensor.kind
        if row is not None and has_row and row not in placed.measured:
            placed.measured[row] = tensor
        else:
            placed.others.append(tensor)
    return placed


def write_tensors(
    session: RankSession, tensors: Sequence[StepTensor], timestamps_us: Sequence[int]
) -> list[ManifestRecord]:
    """Write the files of a step's tensors, unless they exist; return their records.

    OSError when a file cannot be written.
    """
    storage = session.storage
    received = [
        examine_record(_make_received(session, tensor, at_us), None)
        for tensor, at_us in zip(tensors, timestamps_us, strict=True)
    ]
    # Found by time stamp, because the writer returns outcomes in any order.
    outcomes = {each.head.timestamp_us: each for each in storage.writer.write(received)}
    for outcome in outcomes.values():
        if outcome.status is RecordStatus.DROPPED:
            text = f"a tensor of the black box cannot be written ({outcome.reason})"
            raise OSError(errno.EIO, text, str(storage.tree.root))
    return [
        _make_record(tensor.kind, outcomes[at_us])
        for tensor, at_us in zip(tensors, timestamps_us, strict=True)
    ]


def _make_received(session: RankSession, tensor: StepTensor, timestamp_us: int) -> ReceivedRecord:
    request, kind = session.request, tensor.kind
    model = session.plan.output.net_name or kind.model or UNNAMED_MODEL
    named = kind._replace(model=model)
    head = RecordHead(named, tensor.iteration, timestamp_us, request.rank)
    # The time stamp serves as frame number, because both differ between all tensors of a rank.
    frame_id = FrameId(request.session_id, timestamp_us)
    return ReceivedRecord(frame_id, head, memoryview(tensor.data))


def _make_record(kind: TensorKind, outcome: RecordOutcome) -> ManifestRecord:
    record = make_row_record(kind, outcome.head.timestamp_us, has_member=False)
    return record._replace(
        path=outcome.path,
        bytes_in=kind.byte_count,
        bytes_stored=outcome.bytes_stored,
        digest=outcome.digest,
    )


RETRY_INTERVAL_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFreeze:
    """A freeze whose tree is written, with the requests that wait for it."""

    record: FreezeRecord
    root: str
    orders: tuple[FreezeOrder, ...]


@dataclass(slots=True)
class _WaitingFile:
    """A raw file, with the reason why the last attempt to write its tree failed."""

    orders: list[FreezeOrder] = field(default_factory=list[FreezeOrder])
    due_s: float = 0.0
    problem: str = ""


class RawBacklog:
    """The raw files whose trees are not written yet; `findings` may be called from
    other threads.
    """

    def __init__(
        self, raw: RawFreezeFolder, writer: FrozenTreeWriter, clock: Callable[[], float]
    ) -> None:
        self._raw, self._writer, self._clock = raw, writer, clock
        self._waiting: dict[Path, _WaitingFile] = {}
        self._damaged: list[str] = []

    def find_left(self) -> list[FreezeRecord]:
        """Find the raw files that an earlier process left; return the records that can be read."""
        records: list[FreezeRecord] = []
        # A draft that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            self._raw.remove_drafts()
        for path in self._raw.list_files():
            self._waiting.setdefault(path, _WaitingFile())
            # A damaged file is reported when its tree is written.
            with contextlib.suppress(OSError, CorruptedError), path.open("rb") as file:
                records.append(read_raw_record(file))
        return records

    def add(self, path: Path, orders: Sequence[FreezeOrder]) -> None:
        """Add a raw file of this process."""
        self._waiting[path] = _WaitingFile(list(orders))

    def findings(self) -> list[str]:
        """Return a sentence for each frozen tree that is not written."""
        late = [each.problem for each in list(self._waiting.values()) if each.problem]
        return [*self._damaged, *late]

    def write_due(self) -> Iterator[WrittenFreeze]:
        """Write the trees that can be written now, and yield each of them."""
        for path, waiting in list(self._waiting.items()):
            if waiting.due_s > self._clock():
                continue
            try:
                found = self._writer.write(path)
                if found is None:
                    return
                self._raw.remove(path)
            except OSError as error:
                self._postpone(path, waiting, error)
                continue
            except Exception as error:
                self._set_aside(path, waiting, error)
                continue
            del self._waiting[path]
            yield WrittenFreeze(*found, tuple(waiting.orders))

    def _postpone(self, path: Path, waiting: _WaitingFile, error: OSError) -> None:
        problem = f"a frozen tree is not written yet, its steps are in {path}: {error}"
        if problem != waiting.problem:
            _logger.error("%s", problem)
        waiting.problem, waiting.due_s = problem, self._clock() + RETRY_INTERVAL_S
        _refuse(waiting, UnavailableError(problem))

    def _set_aside(self, path: Path, waiting: _WaitingFile, error: Exception) -> None:
        del self._waiting[path]
        try:
            path = self._raw.set_aside(path)
        except OSError as failure:
            _logger.error("%s cannot be renamed: %s", path, failure)
        problem = f"a frozen tree cannot be written, its steps are in {path}: {error}"
        _logger.error("%s", problem, exc_info=None if isinstance(error, RankdumpError) else error)
        self._damaged.append(problem)
        _refuse(waiting, UnavailableError(problem))


def _refuse(waiting: _WaitingFile, error: Exception) -> None:
    for order in waiting.orders:
        order.answer.set_exception(error)
    waiting.orders.clear()

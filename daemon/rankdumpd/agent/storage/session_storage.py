"""Storage of one session: tree, lock, writer, tables and stack file, constructed from its plan; the
function that stores a received record; and the plans of the session with their storages.

Each plan applies to the frames between two changed plans, so that a resent frame is judged by the
plan that it was made for.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankdump._codec.file_codec import FileCodec, get_codec
from rankdump._core.drop_reasons import STEP_OVERHEAD
from rankdump._core.job_control import is_changeable_to
from rankdump._core.plan import DumpPlan
from rankdump._core.record import TensorKind
from rankdump._core.session_protocol import SessionRequest
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_layouts import LAYOUTS, Layout, find_contradiction
from rankdump._layout.tree_paths import FilePlace, TreeContext
from rankdump.errors import CorruptedError, ProtocolError
from rankdumpd.agent.records import (
    CORRUPTED,
    BaselineMatch,
    FrameId,
    ReceivedRecord,
    RecordOutcome,
    make_drop_outcome,
)
from rankdumpd.agent.storage.baseline import BaselineIndex
from rankdumpd.agent.storage.rank_files import CallStackFile
from rankdumpd.agent.storage.record_formats import (
    MAX_SLOTS,
    BinFileJoiner,
    examine_record,
)
from rankdumpd.agent.storage.record_writer import (
    DuplicateIndex,
    PressureCheck,
    RecordWriter,
    is_linkable,
)
from rankdumpd.agent.storage.statistic_tables import StatisticTables, TableFormat, make_table_format
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles
from rankdumpd.agent.storage.tree_lock import TreeLock, claim_tree_context


@dataclass(frozen=True, slots=True)
class SessionStorage:
    """The parts that write the records of one session to files, according to one of its plans."""

    layout: Layout
    context: TreeContext
    codec: FileCodec
    tree: DumpTree
    names: MappingFiles
    lock: TreeLock
    writer: RecordWriter
    joiner: BinFileJoiner | None
    """None in layouts where every tensor keeps a file of its own."""
    tables: StatisticTables | None
    """None when statistics are neither sent by the rank nor computed here."""
    table_format: TableFormat
    stacks: CallStackFile | None
    """None for a layout without a stack file."""
    statistic_count: int
    """Number of statistics of a tensor that is sent without its elements."""
    has_elements: bool
    """Whether tensors are sent with their elements."""
    degrades_records: bool
    """Whether the rank may send statistics in place of a tensor, if it lacks memory or time."""
    statistic_names: tuple[str, ...] | None
    """Statistics that the agent computes; None when it computes none."""
    has_fingerprints: bool
    """Whether the agent computes the fingerprint of each tensor that arrives with its elements."""
    is_synced: bool
    """Whether a record is acknowledged only once it would survive a power loss."""
    file_kind: str
    """Key for files that may be links to each other."""
    baseline: str
    """Root of the baseline, whose tensors are not stored again; empty without a baseline."""


def make_session_storage(request: SessionRequest, plan: DumpPlan) -> SessionStorage:
    """Return the storage of a session whose plan has been checked."""
    output, content, delivery = plan.output, plan.content, plan.delivery
    layout = LAYOUTS[output.layout]
    codec, is_synced = get_codec(output.codec), delivery.durability == "synced"
    degrades_records = delivery.on_full == "statistic" or delivery.max_step_overhead > 0
    tree = DumpTree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        # As troubleshooter sets the modes: only tensors are read-only, growing files are not.
        growing_mode=output.file_mode | stat.S_IWUSR if layout.api_files is not None else None,
        synced=is_synced,
    )
    context = TreeContext(output.root, request.device, output.started, PROFILES[output.profile])
    if layout.has_time_folder:
        context = claim_tree_context(tree, context, job_id=request.job_id, rank=request.rank)
    table_format = make_table_format(plan, layout, context, request.rank)
    names = MappingFiles(tree)
    tables = StatisticTables(tree, names, table_format.header, looks_back=False)
    return SessionStorage(
        layout=layout,
        context=context,
        codec=codec,
        tree=tree,
        names=names,
        lock=TreeLock(tree),
        writer=RecordWriter(
            tree,
            names,
            codec=codec,
            layout=layout,
            context=context,
            table_format=table_format,
            device_target=request.device_target,
            writes_npy=output.file_format != "bin",
        ),
        joiner=BinFileJoiner(tree, names, codec, layout) if output.file_format == "bin" else None,
        tables=tables if content.has_tables or degrades_records else None,
        table_format=table_format,
        stacks=_make_stack_file(tree, layout, request.rank),
        statistic_count=len(table_format.items),
        has_elements=content.saved != "statistic",
        degrades_records=degrades_records,
        statistic_names=_select_statistics(plan, table_format),
        has_fingerprints=content.fingerprints,
        is_synced=is_synced,
        file_kind=f"{codec.name} {tree.kind}",
        baseline=content.baseline,
    )


def change_session_storage(storage: SessionStorage, plan: DumpPlan) -> SessionStorage:
    """Return the storage of a session after a change of its plan; files and tables are
    continued.
    """
    tables = storage.tables
    if tables is None and plan.content.has_tables:
        tables = StatisticTables(storage.tree, storage.names, storage.table_format.header)
    return replace(
        storage,
        tables=tables,
        has_elements=plan.content.saved != "statistic",
        statistic_names=_select_statistics(plan, storage.table_format),
    )


def _select_statistics(plan: DumpPlan, table_format: TableFormat) -> tuple[str, ...] | None:
    return table_format.items if plan.content.saved == "full" else None


def _make_stack_file(tree: DumpTree, layout: Layout, rank: int) -> CallStackFile | None:
    if layout.api_files is None:
        return None
    place = FilePlace(layout.rank_folder(rank), layout.api_files.stack_file)
    return CallStackFile(tree, place, layout.api_files.framework)


def store_records(
    records: Sequence[ReceivedRecord],
    storage: SessionStorage,
    *,
    originals: DuplicateIndex,
    baselines: BaselineIndex,
    find_pressure: PressureCheck,
) -> list[RecordOutcome]:
    """Store received records of a session; return their outcomes.

    Records that are the same as in the baseline of the session's plan get no file. `find_pressure`
    returns why a large file should be packed later; empty to pack it now.
    """
    writer, matches = storage.writer, dict[FrameId, BaselineMatch]()
    together: dict[str, list[ReceivedRecord]] = {}
    """Records whose files are written together, by the reason why they are degraded."""
    outcomes: list[RecordOutcome] = []
    for received in records:
        record = _examine(received, storage)
        if storage.baseline and isinstance(record, ReceivedRecord):
            record = _compare_with_baseline(record, storage, baselines, matches)
        if isinstance(record, RecordOutcome):
            outcomes.append(record)
            continue
        kind = record.head.kind
        degraded = _find_degrade_reason(kind)
        if storage.joiner or degraded or not is_linkable(kind):
            together.setdefault(degraded, []).append(record)
        else:
            outcomes.append(_link_or_write(record, storage, originals, find_pressure))
    for degraded, some in together.items():
        if storage.joiner:
            outcomes += writer.write_members(some)
        else:
            outcomes += writer.write(some, degraded, pressure=find_pressure)
    if matches:
        return [each._replace(baseline=matches.get(each.frame_id)) for each in outcomes]
    return outcomes


def _find_degrade_reason(kind: TensorKind) -> str:
    """Return why a record of this kind is less than its whole tensor; empty for a whole one."""
    return STEP_OVERHEAD if kind.layout is not None and kind.layout.is_sample else ""


def _compare_with_baseline(
    record: ReceivedRecord,
    storage: SessionStorage,
    baselines: BaselineIndex,
    matches: dict[FrameId, BaselineMatch],
) -> ReceivedRecord | RecordOutcome:
    """Return the outcome of a record that is the same as in the baseline; any other record
    unchanged.

    The result of the comparison is added to `matches`. A sample of a tensor is always stored.
    """
    if _find_degrade_reason(record.head.kind):
        return record
    match = storage.writer.compare(record, storage.baseline, baselines)
    matches[record.frame_id] = match
    return storage.writer.refer(record, match) or record


def _examine(received: ReceivedRecord, storage: SessionStorage) -> ReceivedRecord | RecordOutcome:
    """Return a record with digest and statistics; if it is damaged or not storable, its drop."""
    exact = storage.layout.api_files is not None
    try:
        record = examine_record(
            received, storage.statistic_names, exact=exact, fingerprints=storage.has_fingerprints
        )
    except CorruptedError:
        return make_drop_outcome(received.frame_id, received.head, CORRUPTED)
    if storage.joiner and record.head.kind.slot >= MAX_SLOTS:
        return make_drop_outcome(record.frame_id, record.head, "slot_too_high")
    return record


def _link_or_write(
    record: ReceivedRecord,
    storage: SessionStorage,
    originals: DuplicateIndex,
    find_pressure: PressureCheck,
) -> RecordOutcome:
    writer = storage.writer
    return originals.link_or_write(
        record,
        storage.file_kind,
        link=lambda original: writer.link(record, original),
        write=lambda: writer.write([record], pressure=find_pressure)[0],
    )


@dataclass(frozen=True, slots=True)
class PlanPeriod:
    """Frames after one changed plan, up to the next one."""

    plan_sequence: int
    """Sequence number of the frame with the plan; 0 for the plan that opened the session."""
    plan: DumpPlan
    storage: SessionStorage
    iteration: int | None = None
    """First iteration with the plan; None for the plan that opened the session, even when it
    applies again, as after the iterations that a watch rule dumps.
    """


class PlanHistory:
    """Plans of one session, in the order of their frames; safe to use from several threads."""

    def __init__(self, plan: DumpPlan, storage: SessionStorage) -> None:
        self._lock = threading.Lock()
        self._periods = [PlanPeriod(0, plan, storage)]

    @property
    def latest(self) -> PlanPeriod:
        """The period of the newest plan."""
        return self._periods[-1]

    def find(self, sequence: int) -> tuple[PlanPeriod, int | None]:
        """Return the period that a frame belongs to, and the number of the change that ends the
        period; None if it has not ended.
        """
        with self._lock:
            end: int | None = None
            for period in reversed(self._periods):
                if period.plan_sequence < sequence or not period.plan_sequence:
                    return period, end
                end = period.plan_sequence
        raise AssertionError("the first period has all frames that no other has")

    def add(self, sequence: int, plan: DumpPlan, iteration: int) -> None:
        """Begin a period with the plan that a frame brought and that applies from an iteration on.

        A sequence number that is known changes nothing.

        ProtocolError when a running job cannot change to this plan.
        """
        with self._lock:
            latest = self._periods[-1]
            if sequence <= latest.plan_sequence:
                return
            if not is_changeable_to(latest.plan, plan):
                raise ProtocolError(f"frame {sequence} changes what a plan has for good")
            fault = find_contradiction(plan)
            if fault:
                raise ProtocolError(f"frame {sequence} brings a plan that is impossible: {fault}")
            storage = change_session_storage(latest.storage, plan)
            begin = None if plan == self._periods[0].plan else iteration
            self._periods.append(PlanPeriod(sequence, plan, storage, begin))

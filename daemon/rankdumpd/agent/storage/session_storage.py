"""Storage of one session: tree, lock, writer, tables and stack file, set up as its plan says, and
the function that stores a received record.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

from rankdump._codec.file_codec import FileCodec, get_codec
from rankdump._core.plan import DumpPlan
from rankdump._core.session_protocol import SessionRequest
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_layouts import LAYOUTS, Layout
from rankdump._layout.tree_paths import FilePlace, TreeContext
from rankdump.errors import CorruptedError
from rankdumpd.agent.records import (
    CORRUPTED,
    ReceivedRecord,
    RecordOutcome,
    load_elements,
    make_drop_outcome,
)
from rankdumpd.agent.storage.rank_files import CallStackFile
from rankdumpd.agent.storage.record_formats import (
    MAX_SLOTS,
    BinFileJoiner,
    encode_bin,
    encode_npy,
    examine_record,
    is_corrupted,
)
from rankdumpd.agent.storage.record_writer import DuplicateIndex, RecordWriter
from rankdumpd.agent.storage.statistic_tables import StatisticTables, TableFormat, make_table_format
from rankdumpd.agent.storage.tree import DumpTree, MappingFiles
from rankdumpd.agent.storage.tree_lock import TreeLock, claim_tree_context


@dataclass(frozen=True, slots=True)
class SessionStorage:
    """What turns records of one session into files."""

    layout: Layout
    context: TreeContext
    codec: FileCodec
    tree: DumpTree
    lock: TreeLock
    writer: RecordWriter
    joiner: BinFileJoiner | None
    """None where a tensor has a file of its own for ever."""
    tables: StatisticTables | None
    """None when figures neither come nor are computed."""
    lines: TableFormat
    stacks: CallStackFile | None
    """None where no file says where calls came from."""
    statistic_count: int
    """How many there are of a tensor that comes without its elements."""
    elements: bool
    """Tensors come with their elements."""
    degrades: bool
    """A tensor for which the rank had no room comes as figures all the same."""
    statistic_names: tuple[str, ...] | None
    """Figures that are computed here; None when none are."""
    synced: bool
    """A record counts as safe once it would survive a power loss."""


def make_session_storage(request: SessionRequest, plan: DumpPlan) -> SessionStorage:
    """Return the rooms of a session whose plan has been vetted."""
    output, content, delivery = plan.output, plan.content, plan.delivery
    layout = LAYOUTS[output.layout]
    codec, synced = get_codec(output.codec), delivery.durability == "synced"
    degrades = delivery.on_full == "statistic"
    tree = DumpTree(
        output.root,
        file_mode=output.file_mode,
        folder_mode=output.folder_mode,
        # As the real tool has it: only tensors are read-only.
        growing_mode=output.file_mode | stat.S_IWUSR if layout.api_files is not None else None,
        synced=synced,
    )
    context = TreeContext(output.root, request.device, output.started, PROFILES[output.profile])
    if layout.has_time_folder:
        context = claim_tree_context(tree, context, job_id=request.job_id, rank=request.rank)
    lines = make_table_format(plan, layout, context, request.rank)
    names = MappingFiles(tree)
    target = request.device_target
    return SessionStorage(
        layout=layout,
        context=context,
        codec=codec,
        tree=tree,
        lock=TreeLock(tree),
        writer=RecordWriter(
            tree, names, layout=layout, context=context, lines=lines, device_target=target
        ),
        joiner=BinFileJoiner(tree, names, codec, layout) if output.file_format == "bin" else None,
        tables=_make_tables(tree, names, lines) if content.has_tables or degrades else None,
        lines=lines,
        stacks=_make_stack_file(tree, layout, request.rank),
        statistic_count=len(lines.items),
        elements=content.saved != "statistic",
        degrades=degrades,
        statistic_names=lines.items if content.saved == "full" else None,
        synced=synced,
    )


def _make_tables(tree: DumpTree, names: MappingFiles, lines: TableFormat) -> StatisticTables:
    return StatisticTables(tree, names, lines.header, looks_back=False)


def _make_stack_file(tree: DumpTree, layout: Layout, rank: int) -> CallStackFile | None:
    if layout.api_files is None:
        return None
    place = FilePlace(layout.rank_folder(rank), layout.api_files.stack_file)
    return CallStackFile(tree, place, layout.api_files.framework)


def store_record(
    received: ReceivedRecord, storage: SessionStorage, originals: DuplicateIndex
) -> RecordOutcome:
    """Return what became of a tensor of the session that has this outlet."""
    try:
        data = load_elements(received.data)
    except CorruptedError:
        return make_drop_outcome(received.frame_id, received.head, CORRUPTED)
    record = examine_record(
        received, data, storage.statistic_names, exact=storage.layout.api_files is not None
    )
    if is_corrupted(received, record):
        return make_drop_outcome(received.frame_id, received.head, CORRUPTED)
    if storage.joiner:
        if received.head.kind.slot >= MAX_SLOTS:
            return make_drop_outcome(received.frame_id, received.head, "slot_too_high")
        return storage.writer.write(encode_bin(record, data, storage.codec, storage.layout))
    return originals.link_or_write(
        record,
        f"{storage.codec.name} {storage.tree.kind}",
        link=lambda original: storage.writer.link(record, original),
        write=lambda: storage.writer.write(encode_npy(record, data, storage.codec)),
    )

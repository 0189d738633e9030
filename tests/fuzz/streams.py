"""Targets for messages of ranks: openings, and streams of frames in any order."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fuzz.input_pieces import chosen, pieces
from google.protobuf.message import DecodeError

from rankdump._core.events import EventColumns
from rankdump._core.graph import GraphPart
from rankdump._core.plan import (
    BlackBoxSettings,
    ContentSettings,
    DumpPlan,
    OutputSettings,
    WatchRule,
)
from rankdump._core.record import StatisticRows
from rankdump._core.selection import ACCEPTED_VERDICT, SelectionVerdict
from rankdump._core.session_protocol import (
    ChangedPlan,
    IterationEnd,
    RecordHead,
    SessionEnd,
    SessionRequest,
)
from rankdump._core.status import StatusView
from rankdump._shm.slab_format import (
    RELEASED_OFFSET,
    RING_OFFSET,
    SLAB_VERSION,
    WRITTEN_OFFSET,
    SlabMemory,
    compute_slab_bytes,
    format_slab,
)
from rankdump._shm.slab_ring import SlabEntry, SlabReader
from rankdump._wire import session_messages
from rankdump._wire.status_messages import view_from_wire, view_to_wire
from rankdump.errors import RankdumpError, RetryableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.declarations import reread_metadata_frame, reread_statistic_rows
from rankdumpd.agent.ingress.frame_assembler import CompletedFrame, FrameAssembler
from rankdumpd.agent.records import (
    MetadataFrame,
    ReceivedRecord,
    RecordOutcome,
    StatisticRowsResult,
    make_drop_outcome,
)
from rankdumpd.agent.session import registry
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.storage.graph_files import render_graph

SESSION = "session-1"
_VERSION_AT = 8
"""Where in a slab its version stands."""
RING_BYTES = 1 << 16
MOST_RECORD_BYTES = 16 << 20
PLANS = (
    DumpPlan(OutputSettings("/trees/a", "Net")),
    DumpPlan(
        OutputSettings("/trees/a"),
        content=ContentSettings(saved="statistic", statistics=("max", "min")),
    ),
    DumpPlan(
        OutputSettings("/trees/a"),
        content=ContentSettings(saved="full", statistics=("max",)),
        black_box=BlackBoxSettings(4, watch=(WatchRule("too_large", ("*.fc",), 9.0, 2),)),
    ),
)
REQUEST = SessionRequest(
    session_id=SESSION,
    job_id="job",
    rank=0,
    world_size=2,
    device=0,
    host="host",
    pid=1,
    framework="torch",
    device_target="CPU",
    plan_json=b"",
    config_source=b"",
)


class _StreamSession:
    """A session that commits completed frames at once, in place of workers and committer."""

    def __init__(self, plan: DumpPlan) -> None:
        self.session = RankSession(REQUEST, plan)
        self._settled: set[int] = set()
        self._assembler = self._connected()

    def take(self, raw: bytes, data: memoryview | None = None, lost: str = "") -> None:
        """Take a frame. One that cannot be read is given up; another fault ends the stream."""
        try:
            frame = agent_pb2.Frame.FromString(raw)
        except DecodeError:
            self._assembler = self._connected()
            return
        try:
            received = self._assembler.feed(frame, data, lost=lost)
            if isinstance(received, MetadataFrame):
                self._change_plan(received)
        except RankdumpError as error:
            received = self._given_up(frame, error)
        if received is not None:
            self._settle(received)

    def _change_plan(self, received: MetadataFrame) -> None:
        if isinstance(received.declaration, ChangedPlan):
            changed = received.declaration
            self.session.plans.add(received.frame_id.sequence, changed.plan, changed.iteration)
            self._assembler.keeps_elements = self.session.storage.has_elements

    def _given_up(self, frame: agent_pb2.Frame, error: RankdumpError) -> CompletedFrame | None:
        unread = frame.sequence and frame.sequence == self._assembler.last_sequence
        if unread and not isinstance(error, RetryableError):
            return self._assembler.settle_unreadable(frame)
        self._assembler = self._connected()
        return None

    def end(self) -> None:
        """End the stream within whatever it is; then tell of the session."""
        cut = self._assembler.cut_off("torn")
        if cut is not None:
            self._settle(cut)
        told(self.session)

    def _connected(self) -> FrameAssembler:
        outlet = self.session.storage
        assembler = FrameAssembler(
            SESSION,
            rank=0,
            net_name=self.session.plan.output.net_name,
            highest_first=self.session.watermark + 1,
            statistic_count=outlet.statistic_count,
            degrades_records=outlet.degrades_records,
            known=self.session.is_known,
            admit=_admit,
        )
        assembler.keeps_elements = outlet.has_elements
        return assembler

    def _settle(self, item: CompletedFrame) -> None:
        assert item.frame_id.sequence not in self._settled
        self._settled.add(item.frame_id.sequence)
        assert self.session.claim_frames({item.frame_id.sequence})
        settle(self.session, [item])


def settle(session: RankSession, items: Iterable[CompletedFrame | StatisticRowsResult]) -> None:
    """Commit frames as the rooms behind a session would; what is due then takes effect."""
    outcomes, judged, declared = (
        list[RecordOutcome](),
        list[StatisticRowsResult](),
        list[MetadataFrame](),
    )
    for item in items:
        if isinstance(item, ReceivedRecord):
            assert len(item.data) == item.head.byte_count
            outcomes.append(make_drop_outcome(item.frame_id, item.head, "write_error"))
        elif isinstance(item, RecordOutcome):
            outcomes.append(item)
        elif isinstance(item, StatisticRowsResult):
            judged.append(item)
        elif isinstance(item.declaration, StatisticRows):
            judged.append(StatisticRowsResult(item.frame_id, item.declaration, {}, item.raw))
        else:
            declared.append(item)
    session.count_committed(outcomes, judged, declared)
    while due := session.pending.pop_next(session.watermark):
        _apply(session, due)


def _apply(session: RankSession, declared: MetadataFrame) -> None:
    assert reread_metadata_frame(declared.raw, SESSION).frame_id == declared.frame_id
    declaration = declared.declaration
    if isinstance(declaration, IterationEnd):
        session.end_iteration(declared, declaration)
    elif isinstance(declaration, SessionEnd):
        session.close_by_rank(declaration)
    elif isinstance(declaration, EventColumns):
        session.program.add_events(declaration)
    elif isinstance(declaration, GraphPart):
        graph = session.graphs.add_part(declared.frame_id, declaration)
        if graph:
            render_graph(graph, session.storage.context.profile)


def told(session: RankSession) -> None:
    """Return the status of a session as users see it."""
    view = StatusView(sessions=(session.status(),), iterations=tuple(session.iterations()))
    assert view_from_wire(view_to_wire(view)) == view


def _admit(head: RecordHead) -> SelectionVerdict:
    large = head.byte_count > MOST_RECORD_BYTES
    return SelectionVerdict(False, "record_too_large") if large else ACCEPTED_VERDICT


def frames(data: bytes) -> None:
    """Frames of streams of one session, good and bad, in any order."""
    which, rest = chosen(data, len(PLANS))
    agent = _StreamSession(PLANS[which])
    for piece in pieces(rest):
        agent.take(piece)
    agent.end()


def slab_of(data: bytes, *, version: int = SLAB_VERSION) -> memoryview:
    """Return a slab by `released`, `written`, and its ring from there on."""
    memory = memoryview(bytearray(compute_slab_bytes(RING_BYTES)))
    format_slab(memory)
    struct.pack_into("<Q", memory, _VERSION_AT, version)
    store = SlabMemory(memory)
    released = int.from_bytes(data[:8], "little")
    store.write_number(RELEASED_OFFSET, released)
    store.write_number(WRITTEN_OFFSET, int.from_bytes(data[8:16], "little"))
    begin = RING_OFFSET + released % RING_BYTES
    ring = data[16 : 16 + len(memory) - begin]
    memory[begin : begin + len(ring)] = ring
    return memory


def slabs(data: bytes) -> None:
    """A ring that holds anything: what its reader finds goes in as frames with data beside them."""
    _read(data, SLAB_VERSION)


def old_slabs(data: bytes) -> None:
    """The same in a slab of version 1, without seals: what an earlier library left is read."""
    _read(data, 1)


def _read(data: bytes, version: int) -> None:
    which, rest = chosen(data, len(PLANS))
    store = SlabMemory(slab_of(rest, version=version))
    agent, reader = _StreamSession(PLANS[which]), SlabReader(store)
    try:
        for entry in reader.read_entries():
            _taken(agent, reader, entry, "copy_failed")
        for entry in reader.read_remaining_entries():
            _taken(agent, reader, entry, "torn")
    finally:
        agent.end()


def _taken(agent: _StreamSession, reader: SlabReader, entry: SlabEntry, lost: str) -> None:
    if not entry.is_corrupted:
        agent.take(bytes(entry.frame), reader.read_data(entry), "" if entry.has_data else lost)


def requests(data: bytes) -> None:
    """The introduction of a rank, up to its plan."""
    try:
        message = agent_pb2.OpenSessionRequest.FromString(data)
    except DecodeError:
        return
    request = session_messages.session_request_from_wire(message)
    assert request.rank < request.world_size
    registry.read_checked_plan(request)


def ledger(data: bytes) -> None:
    """Frames as the ledger keeps them, damaged."""
    which, rest = chosen(data, 2)
    if which:
        reread_metadata_frame(rest, SESSION)
    else:
        reread_statistic_rows(rest)

"""Tests of FrameAssembler with valid, repeated, lost and invalid frames."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rankdump._core.record import StatisticRows
from rankdump._core.selection import ACCEPTED_VERDICT, SelectionVerdict
from rankdump.errors import ProtocolError, ResendError
from rankdump.wire.v1 import agent_pb2, events_pb2
from rankdumpd.agent.declarations import reread_metadata_frame, reread_statistic_rows
from rankdumpd.agent.ingress.frame_assembler import FrameAssembler
from rankdumpd.agent.records import (
    MetadataFrame,
    ReceivedRecord,
    RecordOutcome,
    RecordStatus,
    StatisticRowsResult,
    load_elements,
)

DATA = bytes(range(16))


def kind(**fields) -> bytes:
    defaults: dict[str, Any] = {
        "op_type": "MatMul",
        "op_name": "Default/MatMul-op0",
        "side": agent_pb2.SIDE_OUTPUT,
        "dtype": "float32",
        "shape": [4],
        "byte_count": 16,
    }
    return agent_pb2.TensorKind(**{**defaults, **fields}).SerializeToString()


def record(sequence: int, data: bytes = DATA, *, iteration=0, timestamp_us=0, **fields):
    body = agent_pb2.Record(
        kind=kind(**fields), iteration=iteration, timestamp_us=timestamp_us, data=data
    )
    return agent_pb2.Frame(sequence=sequence, record=body)


def chunk(sequence: int, offset: int, data: bytes) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, chunk=agent_pb2.Chunk(offset=offset, data=data))


def end(sequence: int, **fields) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, iteration_end=agent_pb2.IterationEnd(**fields))


def figures(sequence: int, *texts: str, **fields) -> agent_pb2.Frame:
    body: dict[str, Any] = {
        "kinds": [kind()] * len(texts),
        "timestamps_us": range(len(texts)),
        "figures": texts,
    }
    rows = agent_pb2.FigureRows(**{**body, **fields})
    return agent_pb2.Frame(sequence=sequence, figure_rows=rows)


def part(sequence: int, **fields) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, graph_part=agent_pb2.GraphPart(**fields))


def node(**fields) -> agent_pb2.GraphNode:
    return agent_pb2.GraphNode(**fields)


def wide(extent: int) -> agent_pb2.TensorType:
    return agent_pb2.TensorType(shape=[extent])


def arguments(sequence: int, **fields) -> agent_pb2.Frame:
    body = agent_pb2.KernelArguments(**fields)
    return agent_pb2.Frame(sequence=sequence, kernel_arguments=body)


def timeouts(sequence: int, *, groups=(), **fields) -> agent_pb2.Frame:
    made = [events_pb2.GroupTimeout(**group) for group in groups]
    return agent_pb2.Frame(sequence=sequence, timeouts=events_pb2.Timeouts(groups=made, **fields))


def operator(**fields) -> agent_pb2.OperatorArguments:
    return agent_pb2.OperatorArguments(**fields)


class FakeAdmission:
    """Gives every record the same verdict, and collects their heads."""

    def __init__(self, answer: SelectionVerdict = ACCEPTED_VERDICT) -> None:
        self.answer = answer
        self.heads = []

    def __call__(self, head) -> SelectionVerdict:
        self.heads.append(head)
        return self.answer


def make_assembler(
    admit=None, *, known=(), highest_first: int = 1, figures=None, degrades=None
) -> FrameAssembler:
    assembler = FrameAssembler(
        "s",
        rank=0,
        net_name="Net",
        highest_first=highest_first,
        statistic_count=figures or degrades or 0,
        degrades_records=degrades is not None,
        known=lambda sequence: sequence in known,
        admit=admit or FakeAdmission(),
    )
    assembler.keeps_elements = figures is None
    return assembler


def feed(assembler: FrameAssembler, *frames: agent_pb2.Frame) -> list:
    return [assembler.feed(frame) for frame in frames]


@pytest.mark.parametrize("cuts", [[16], [0, 16], [0, 1, 15, 16], [5, 16], [3, 3, 16]])
def test_feed_accepts_any_chunk_sizes(cuts):
    """However its bytes are cut, a record arrives once, whole."""
    frames = [record(1, DATA[: cuts[0]])]
    frames += [chunk(1, a, DATA[a:b]) for a, b in pairwise(cuts)]
    *before, last = feed(make_assembler(), *frames)
    assert before == [None] * len(before)
    assert isinstance(last, ReceivedRecord)
    assert load_elements(last.data) == DATA


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([record(2)], "first frame is 2"),
        ([record(0)], "frame number 0"),
        ([record(1), record(1 << 63)], "frame number 9223372036854775808"),
        ([record(1), record(3)], "frame 3 follows frame 1"),
        ([record(1, DATA[:3]), record(2)], "ended at byte 3 of 16"),
        ([record(1, DATA[:3]), end(2)], "ended at byte 3 of 16"),
        ([record(1, DATA[:3]), chunk(1, 4, DATA[4:])], "bytes 4 to 16 after 3"),
        ([record(1, DATA[:3]), chunk(1, 2, DATA[2:])], "bytes 2 to 16 after 3"),
        ([record(1, DATA[:3]), chunk(1, 3, DATA)], "bytes 3 to 19 after 3"),
        ([record(1, DATA[:3]), chunk(1, (1 << 64) - 1, DATA)], "after 3 of 16"),
        ([record(1, DATA[:3]), chunk(2, 3, DATA[3:])], "chunk of record 2"),
        ([chunk(1, 0, DATA)], "chunk of record 1"),
        ([record(1, DATA + b"x")], "contains 17 bytes but declares 16"),
        ([record(1, byte_count=17)], "17 bytes for float32 of shape [4]"),
        ([record(1, b"", shape=[1 << 31, 1 << 31], byte_count=0)], "0 bytes for float32"),
        ([record(1, b"", shape=[1 << 63, 0], byte_count=0)], "over"),
        ([record(1, b"", byte_count=1 << 63)], "over"),
        ([record(1, iteration=1 << 63)], "over"),
        ([record(1, timestamp_us=(1 << 64) - 1)], "over"),
        ([record(1, side=agent_pb2.SIDE_UNSPECIFIED)], "side 0"),
        ([record(1, shape=[1] * 65)], "65 dimensions"),
        ([agent_pb2.Frame(sequence=1)], "body None"),
        ([end(1, expected=1 << 63)], "over"),
        ([end(1, dropped={"why": 1 << 63})], "over"),
        ([end(1, dropped={str(n): 1 for n in range(257)})], "257 reasons"),
        ([figures(1, "1")], "the plan keeps elements"),
        ([part(1, nodes=[node(outputs=[wide(1 << 63)])])], "over"),
        ([part(1, parameters=[agent_pb2.GraphParameter(type=wide(1 << 63))])], "over"),
        ([part(1, parameters=[agent_pb2.GraphParameter(name="n" * 65537)])], "65537 characters"),
        ([part(1, nodes=[node(name="n" * 65537)])], "65537 characters"),
        ([part(1, nodes=[node(attributes={"k": "v" * 65537})])], "65537 characters"),
        ([part(1, nodes=[node(source=[agent_pb2.SourceLine(code="c" * 65537)])])], "65537"),
        ([part(1, nodes=[node(inputs=["i"] * 65537)])], "65537 items"),
        ([part(1, nodes=[node()] * 65537)], "65537 items"),
        ([part(1, nodes=[node(outputs=[agent_pb2.TensorType(shape=[1] * 65)])])], "65 dimensions"),
        ([timeouts(1, groups=[{"timeout_us": 1 << 63}])], "over"),
        ([timeouts(1, groups=[{"group": "g" * 65537}])], "65537 characters"),
        ([timeouts(1, groups=[{}] * 65537)], "65537 limits of time"),
        ([timeouts(1, variables={"V": "v" * 65537})], "65537 characters"),
        ([timeouts(1, limits={"hccl_timeout": float("nan")})], "not a number of seconds"),
        ([arguments(1, iteration=1 << 63)], "over"),
        ([arguments(1, operators=[agent_pb2.OperatorArguments()] * 65537)], "65537 items"),
        ([arguments(1, operators=[operator(op_name="n" * 65537)])], "65537 characters"),
        ([arguments(1, operators=[operator(values={"k": "v" * 65537})])], "65537 characters"),
    ],
)
def test_feed_rejects_protocol_violations(frames, says):
    """A frame that contradicts itself or its predecessors is rejected with its number."""
    assembler = make_assembler()
    feed(assembler, *frames[:-1])
    with pytest.raises((ProtocolError, ResendError)) as refused:
        assembler.feed(frames[-1])
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "frames",
    [
        [record(2)],
        [record(1), record(3)],
        [record(1, DATA[:3]), record(2)],
        [record(1, DATA[:3]), chunk(1, 4, DATA[4:])],
        [record(1, DATA[:3]), chunk(2, 3, DATA[3:])],
    ],
)
def test_feed_raises_resend_error_for_gaps(frames):
    """A frame that was lost on its way is no fault of the rank."""
    assembler = make_assembler()
    feed(assembler, *frames[:-1])
    with pytest.raises(ResendError):
        assembler.feed(frames[-1])


def test_feed_ignores_repeated_frames():
    """Records, their pieces, declarations; at once, later, and within another record."""
    admit = FakeAdmission()
    head, rest = record(2, DATA[:3]), chunk(2, 3, DATA[3:])
    middle = chunk(2, 3, DATA[3:5])
    frames = [record(1), record(1), head, head, record(1), middle, middle, chunk(2, 5, DATA[5:])]
    frames += [rest, middle, head, end(3), end(3), record(1)]
    found = [item for item in feed(make_assembler(admit), *frames) if item is not None]
    assert [item.frame_id.sequence for item in found] == [1, 2, 3]
    assert len(admit.heads) == 2
    assert bytes(found[1].data) == DATA


def test_feed_allocates_no_memory_for_declared_size():
    """A frame of a few bytes declares a gigabyte: pages are allocated when they are filled."""
    huge = 1 << 30
    before = resident_bytes()
    assembler = make_assembler()
    frame = record(1, b"x", dtype="other", shape=[], byte_count=huge)
    assert feed(assembler, frame, chunk(1, 1, DATA)) == [None, None]
    assert resident_bytes() - before < huge // 16


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("frame", "iteration", "count"),
    [
        (record(1, iteration=7, side=0), 7, 1),
        (record(1, iteration=(1 << 63) + 7), 7, 1),
        (figures(1, "1", "2", iteration=3, kinds=[b"", b""]), 3, 2),
        (end(1, expected=1 << 63), None, 0),
        (agent_pb2.Frame(sequence=1), None, 0),
    ],
)
def test_settle_unreadable_uses_up_number(frame, iteration, count):
    """Its tensors are dropped in the iteration it names, and the next frame is taken."""
    assembler = make_assembler(figures=1)
    with pytest.raises(ProtocolError):
        assembler.feed(frame)
    item = assembler.settle_unreadable(frame)
    assert item is not None
    assert item.frame_id.sequence == 1
    if isinstance(item, StatisticRowsResult):
        assert (item.rows.iteration, item.kept) == (iteration, 0)
        assert {reason: len(places) for reason, places in item.refused.items()} == {
            "unreadable": count
        }
    else:
        assert isinstance(item, MetadataFrame)
        assert reread_metadata_frame(item.raw, "s") == item
    assert isinstance(assembler.feed(end(2)), MetadataFrame)


def lost(sequence: int, **fields) -> agent_pb2.Frame:
    body: dict[str, Any] = {"iteration": 7, "tensors": 3, "reason": "corrupted"} | fields
    return agent_pb2.Frame(sequence=sequence, lost=agent_pb2.Lost(**body))


@pytest.mark.parametrize(
    ("said", "counted"),
    [("corrupted", "corrupted"), ("x", "other")],
)
def test_lost_tensors_are_dropped_in_their_iteration(said, counted):
    """Under a word of the list; once, whatever stood under that number before."""
    item = make_assembler().feed(lost(1, reason=said))
    assert isinstance(item, StatisticRowsResult)
    assert (item.frame_id.sequence, item.rows.iteration, item.kept) == (1, 7, 0)
    assert {reason: len(places) for reason, places in item.refused.items()} == {counted: 3}
    assembler = make_assembler(highest_first=2, known=(1,))
    assert feed(assembler, lost(1), lost(1)) == [None, None]
    assert isinstance(assembler.feed(lost(2)), StatisticRowsResult)


@pytest.mark.parametrize("fields", [{"tensors": 0}, {"tensors": 1025}, {"iteration": 1 << 63}])
def test_invalid_count_of_lost_tensors_is_rejected(fields):
    assembler = make_assembler()
    with pytest.raises(ProtocolError):
        assembler.feed(lost(1, **fields))
    assert isinstance(assembler.settle_unreadable(lost(1, **fields)), MetadataFrame)


def test_settle_unreadable_drops_record_with_invalid_chunk():
    """Its other pieces are skipped."""
    assembler = make_assembler()
    bad = chunk(1, 3, DATA)
    feed(assembler, record(1, DATA[:3]))
    with pytest.raises(ProtocolError):
        assembler.feed(bad)
    outcome = assembler.settle_unreadable(bad)
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.reason, outcome.head.byte_count) == ("unreadable", 16)
    assert assembler.feed(chunk(1, 3, DATA[3:])) is None
    assert isinstance(assembler.feed(record(2)), ReceivedRecord)


def test_settle_unreadable_ignores_known_frame():
    assembler = make_assembler(known=(1,), highest_first=2)
    with pytest.raises(ProtocolError):
        assembler.feed(record(1, side=0))
    assert assembler.settle_unreadable(record(1, side=0)) is None


def test_finish_within_record_raises_resend_error():
    """A stream may not end in the middle of a record."""
    assembler = make_assembler()
    feed(assembler, record(1, DATA[:3]))
    with pytest.raises(ResendError):
        assembler.finish()


def test_rejected_record_is_one_outcome_without_memory():
    """Admission is checked once, before allocation; bytes of a rejected record are discarded."""
    admit = FakeAdmission(SelectionVerdict(False, "disk_low"))
    huge = 1 << 50
    assembler = make_assembler(admit)
    frame = record(1, b"", dtype="other", shape=[], byte_count=huge)
    assert feed(assembler, frame, chunk(1, 0, DATA)) == [None, None]
    assert [head.byte_count for head in admit.heads] == [huge]
    small = make_assembler(admit)
    *_, outcome = feed(small, record(1, DATA[:3]), chunk(1, 3, DATA[3:]))
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.status, outcome.reason) == (RecordStatus.DROPPED, "disk_low")


def test_record_without_memory_is_dropped():
    """A record too large for this machine's memory is dropped, not the stream."""
    assembler = make_assembler()
    feed(assembler, record(1, b"", dtype="other", shape=[], byte_count=(1 << 62)))
    assert assembler.feed(chunk(1, 0, DATA)) is None


def test_known_frames_are_neither_admitted_nor_returned():
    """Known frames are recognized by number, with chunks or without."""
    admit = FakeAdmission()
    assembler = make_assembler(admit, known={1, 2, 3}, highest_first=3)
    frames = [record(1), record(2, DATA[:3]), chunk(2, 3, DATA[3:]), end(3, iteration=1)]
    assert feed(assembler, *frames) == [None] * 4
    assert admit.heads == []
    assert isinstance(assembler.feed(record(4)), ReceivedRecord)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (figures(1, "1"), "1 statistics, the plan has 2"),
        (figures(1, ""), "0 statistics, the plan has 2"),
        (figures(1, "1,2", "1,2,3"), "3 statistics, the plan has 2"),
        (figures(1, "1,2", "1," + "2" * 65), "quotes, at most 64"),
        (figures(1, '1,"'), "without quotes"),
        (figures(1, "1,2\n"), "printable"),
        (figures(1, "1,2\u2028"), "printable"),
        (figures(1, "1,2", timestamps_us=[1, 2]), "columns of statistics have [1, 2] rows"),
        (figures(1, "1,2", timestamps_us=[1 << 63]), "over"),
        (figures(1, "1,2", iteration=1 << 63), "over"),
        (figures(1, "1,2", kinds=[b"\xff"]), "no valid kind"),
        (figures(1, "1,2", kinds=[kind(side=0)]), "side 0"),
        (figures(1, "1,2", kinds=[kind(byte_count=17)]), "17 bytes for float32"),
        (figures(1, *["1,2"] * 1025), "at most 1024"),
    ],
)
def test_statistics_that_could_damage_a_table_are_rejected(frame, says):
    """Statistics must match the columns of the plan, be short and contain no separators."""
    with pytest.raises(ProtocolError) as refused:
        make_assembler(figures=2).feed(frame)
    assert says in str(refused.value)


def test_too_many_statistics_are_rejected():
    """The bound holds for the plan too."""
    with pytest.raises(ProtocolError, match="at most 64"):
        make_assembler(figures=65).feed(figures(1, ",".join(["0"] * 65)))


def test_rows_of_statistics_are_returned():
    """They are one frame with one number, in their order, whatever the tensors' sizes."""
    assembler = make_assembler(figures=2)
    declared = assembler.feed(figures(1, "6,-inf", "nan,0", iteration=4))
    assert isinstance(declared, MetadataFrame)
    rows = declared.declaration
    assert isinstance(rows, StatisticRows)
    assert (rows.iteration, rows.statistics) == (4, ("6,-inf", "nan,0"))
    assert [each.byte_count for each in rows.kinds] == [16, 16]
    assert reread_statistic_rows(declared.raw) == rows
    assert isinstance(assembler.feed(figures(2)), MetadataFrame)


def test_plan_without_statistics_accepts_empty_rows():
    """A table may have its fixed columns alone."""
    assert isinstance(make_assembler(figures=0).feed(figures(1, "", "")), MetadataFrame)
    with pytest.raises(ProtocolError, match="1 statistics, the plan has 0"):
        make_assembler(figures=0).feed(figures(1, "1"))


def test_elements_in_place_of_statistics_are_admitted():
    """Whether they are kept is the admission's question: one tensor must not cost the session."""
    assert isinstance(make_assembler(figures=2).feed(record(1)), ReceivedRecord)


@pytest.mark.parametrize(
    "frame",
    [
        end(1, iteration=7, expected=3, dropped={"why": 2}),
        part(1, graph=2, nodes=[node(name="Default/a-op0", inputs=["", "w"])], first=True),
        arguments(1, iteration=4, operators=[operator(op_name="a", values={"k": "v"})]),
    ],
)
def test_metadata_frame_can_be_reread(frame):
    declared = make_assembler().feed(frame)
    assert isinstance(declared, MetadataFrame)
    assert reread_metadata_frame(declared.raw, "s") == declared


class TestSeparateData:
    def test_elements_are_not_copied(self):
        """A parcel's data is the very memory that the slab's entry has."""
        memory = memoryview(bytearray(DATA))
        parcel = make_assembler().feed(record(1, b""), memory)
        assert isinstance(parcel, ReceivedRecord)
        assert parcel.data is memory

    def test_chunks_are_copied_at_once(self):
        """Copied chunks may be overwritten before the record is complete."""
        assembler, memory = make_assembler(), memoryview(bytearray(DATA))
        assert assembler.feed(record(1, b""), memory[:8]) is None
        assert assembler.within_record
        memory[:8] = bytes(8)
        parcel = assembler.feed(chunk(1, 8, b""), memory[8:])
        assert isinstance(parcel, ReceivedRecord)
        assert load_elements(parcel.data) == DATA
        assert not assembler.within_record

    @pytest.mark.parametrize(
        "pieces",
        [
            [(record(1, b""), DATA, "torn")],
            [(record(1, b""), b"", "torn")],
            [(record(1, b""), DATA[:8], "torn"), (chunk(1, 8, b""), DATA[8:], "")],
            [(record(1, b""), DATA[:8], ""), (chunk(1, 8, b""), DATA[8:], "torn")],
        ],
    )
    def test_lost_elements_drop_record(self, pieces):
        """Whichever piece is missing, the record is dropped once, and the next one is taken."""
        assembler = make_assembler()
        *open_ones, outcome = [
            assembler.feed(frame, memoryview(data), lost=lost) for frame, data, lost in pieces
        ]
        assert open_ones == [None] * (len(pieces) - 1)
        assert isinstance(outcome, RecordOutcome)
        assert (outcome.status, outcome.reason) == (RecordStatus.DROPPED, "torn")
        assert isinstance(assembler.feed(record(2, b""), memoryview(DATA)), ReceivedRecord)

    def test_loss_without_elements_has_no_effect(self):
        """Statistics and metadata are in the frame, which is valid without its data."""
        assembler, nothing = make_assembler(figures=1), memoryview(b"")
        assert isinstance(assembler.feed(figures(1, "1"), nothing, lost="torn"), MetadataFrame)
        assert isinstance(assembler.feed(end(2), nothing, lost="torn"), MetadataFrame)

    def test_cut_off_drops_open_record(self):
        """It is dropped for the first reason there is; a repeated one was accounted for before."""
        assembler = make_assembler()
        assert assembler.cut_off("torn") is None
        assembler.feed(record(1, b""), memoryview(DATA)[:8])
        outcome = assembler.cut_off("torn")
        assert isinstance(outcome, RecordOutcome)
        assert outcome.reason == "torn"
        refused = make_assembler(FakeAdmission(SelectionVerdict(False, "disk_low")))
        refused.feed(record(1, b""), memoryview(DATA)[:8])
        outcome = refused.cut_off("torn")
        assert isinstance(outcome, RecordOutcome)
        assert outcome.reason == "disk_low"
        again = make_assembler(known=(1,))
        again.feed(record(1, b""), memoryview(DATA)[:8])
        assert again.cut_off("torn") is None

    def test_elements_in_frame_and_beside_it_are_rejected(self):
        """A frame of a slab that brings bytes of its own is at fault."""
        with pytest.raises(ProtocolError, match="bytes of data itself"):
            make_assembler().feed(record(1), memoryview(DATA))


class TestDegradedRows:
    def test_are_accepted_where_plan_degrades(self):
        """Where the plan's on_full keeps statistics, also beside elements."""
        declared = make_assembler(degrades=1).feed(figures(1, "1", degraded=True))
        assert isinstance(declared, MetadataFrame)
        assert isinstance(declared.declaration, StatisticRows)
        assert declared.declaration.degraded

    @pytest.mark.parametrize("figures_due", [None, 1])
    def test_are_rejected_where_plan_does_not_degrade(self, figures_due):
        """Not where the plan has another on_full."""
        with pytest.raises(ProtocolError, match="is degraded"):
            make_assembler(figures=figures_due).feed(figures(1, "1", degraded=True))

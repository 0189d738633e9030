"""The assembler against friendly and hostile frames."""

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


class Asked:
    """Counts the questions, and answers them all the same."""

    def __init__(self, answer: SelectionVerdict = ACCEPTED_VERDICT) -> None:
        self.answer = answer
        self.heads = []

    def __call__(self, head) -> SelectionVerdict:
        self.heads.append(head)
        return self.answer


def assembler(
    admit=None, *, known=(), highest_first: int = 1, figures=None, degrades=None
) -> FrameAssembler:
    return FrameAssembler(
        "s",
        rank=0,
        net_name="Net",
        highest_first=highest_first,
        statistic_count=figures or degrades or 0,
        elements=figures is None,
        degrades=degrades is not None,
        known=lambda sequence: sequence in known,
        admit=admit or Asked(),
    )


def feed(taker: FrameAssembler, *frames: agent_pb2.Frame) -> list:
    return [taker.feed(frame) for frame in frames]


@pytest.mark.parametrize("cuts", [[16], [0, 16], [0, 1, 15, 16], [5, 16], [3, 3, 16]])
def test_cuts_do_not_matter(cuts):
    """However its bytes are cut, a record arrives once, whole."""
    frames = [record(1, DATA[: cuts[0]])]
    frames += [chunk(1, a, DATA[a:b]) for a, b in pairwise(cuts)]
    *before, last = feed(assembler(), *frames)
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
def test_rules_that_break_a_stream(frames, says):
    """A frame that contradicts itself or its predecessors is refused with the number at fault."""
    taker = assembler()
    feed(taker, *frames[:-1])
    with pytest.raises((ProtocolError, ResendError)) as refused:
        taker.feed(frames[-1])
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
def test_what_is_missing_may_be_sent_again(frames):
    """A frame that was lost on its way is no fault of the rank."""
    taker = assembler()
    feed(taker, *frames[:-1])
    with pytest.raises(ResendError):
        taker.feed(frames[-1])


def test_what_comes_twice_is_taken_once():
    """Records, their pieces, declarations; at once, later, and within another record."""
    admit = Asked()
    head, rest = record(2, DATA[:3]), chunk(2, 3, DATA[3:])
    middle = chunk(2, 3, DATA[3:5])
    frames = [record(1), record(1), head, head, record(1), middle, middle, chunk(2, 5, DATA[5:])]
    frames += [rest, middle, head, end(3), end(3), record(1)]
    found = [item for item in feed(assembler(admit), *frames) if item is not None]
    assert [item.frame_id.sequence for item in found] == [1, 2, 3]
    assert len(admit.heads) == 2
    assert bytes(found[1].data) == DATA


def test_what_is_only_declared_takes_no_memory():
    """A gigabyte in a frame of a few bytes: pages come with what is in them."""
    huge = 1 << 30
    before = resident_bytes()
    taker = assembler()
    frame = record(1, b"x", dtype="other", shape=[], byte_count=huge)
    assert feed(taker, frame, chunk(1, 1, DATA)) == [None, None]
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
def test_a_frame_that_cannot_be_read_takes_its_number(frame, iteration, count):
    """Its tensors are dropped in the iteration it names, and the next frame is taken."""
    taker = assembler(figures=1)
    with pytest.raises(ProtocolError):
        taker.feed(frame)
    item = taker.settle_unreadable(frame)
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
    assert isinstance(taker.feed(end(2)), MetadataFrame)


def lost(sequence: int, **fields) -> agent_pb2.Frame:
    body: dict[str, Any] = {"iteration": 7, "tensors": 3, "reason": "corrupted"} | fields
    return agent_pb2.Frame(sequence=sequence, lost=agent_pb2.Lost(**body))


@pytest.mark.parametrize(
    ("said", "counted"),
    [("corrupted", "corrupted"), ("x", "other")],
)
def test_what_a_rank_lost_is_dropped_in_its_iteration(said, counted):
    """Under a word of the list; once, whatever stood under that number before."""
    item = assembler().feed(lost(1, reason=said))
    assert isinstance(item, StatisticRowsResult)
    assert (item.frame_id.sequence, item.rows.iteration, item.kept) == (1, 7, 0)
    assert {reason: len(places) for reason, places in item.refused.items()} == {counted: 3}
    taker = assembler(highest_first=2, known=(1,))
    assert feed(taker, lost(1), lost(1)) == [None, None]
    assert isinstance(taker.feed(lost(2)), StatisticRowsResult)


@pytest.mark.parametrize("fields", [{"tensors": 0}, {"tensors": 1025}, {"iteration": 1 << 63}])
def test_what_no_frame_brings_cannot_be_lost(fields):
    taker = assembler()
    with pytest.raises(ProtocolError):
        taker.feed(lost(1, **fields))
    assert isinstance(taker.settle_unreadable(lost(1, **fields)), MetadataFrame)


def test_a_record_with_a_bad_piece_is_dropped_whole():
    """Its other pieces are skipped."""
    taker = assembler()
    bad = chunk(1, 3, DATA)
    feed(taker, record(1, DATA[:3]))
    with pytest.raises(ProtocolError):
        taker.feed(bad)
    outcome = taker.settle_unreadable(bad)
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.reason, outcome.head.byte_count) == ("unreadable", 16)
    assert taker.feed(chunk(1, 3, DATA[3:])) is None
    assert isinstance(taker.feed(record(2)), ReceivedRecord)


def test_a_known_frame_that_cannot_be_read_changes_nothing():
    taker = assembler(known=(1,), highest_first=2)
    with pytest.raises(ProtocolError):
        taker.feed(record(1, side=0))
    assert taker.settle_unreadable(record(1, side=0)) is None


def test_end_within_a_record_is_a_fault():
    """A stream may not end in the middle of a record."""
    taker = assembler()
    feed(taker, record(1, DATA[:3]))
    with pytest.raises(ResendError):
        taker.finish()


def test_refused_record_is_one_outcome_and_no_memory():
    """The question comes before the memory, once; the bytes of a refused record go nowhere."""
    admit = Asked(SelectionVerdict(False, "disk_low"))
    huge = 1 << 50
    taker = assembler(admit)
    frame = record(1, b"", dtype="other", shape=[], byte_count=huge)
    assert feed(taker, frame, chunk(1, 0, DATA)) == [None, None]
    assert [head.byte_count for head in admit.heads] == [huge]
    small = assembler(admit)
    *_, outcome = feed(small, record(1, DATA[:3]), chunk(1, 3, DATA[3:]))
    assert isinstance(outcome, RecordOutcome)
    assert (outcome.status, outcome.reason) == (RecordStatus.DROPPED, "disk_low")


def test_memory_that_is_not_there_is_a_reason():
    """A record too large for this machine's memory is dropped, not the stream."""
    taker = assembler()
    feed(taker, record(1, b"", dtype="other", shape=[], byte_count=(1 << 62)))
    assert taker.feed(chunk(1, 0, DATA)) is None


def test_repeated_frames_are_neither_admitted_nor_given_out():
    """What arrived before is recognised by its number, with chunks or without."""
    admit = Asked()
    taker = assembler(admit, known={1, 2, 3}, highest_first=3)
    frames = [record(1), record(2, DATA[:3]), chunk(2, 3, DATA[3:]), end(3, iteration=1)]
    assert feed(taker, *frames) == [None] * 4
    assert admit.heads == []
    assert isinstance(taker.feed(record(4)), ReceivedRecord)


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
def test_figures_that_could_harm_a_table(frame, says):
    """Figures are as many as the plan has columns, short, and nothing that ends a field."""
    with pytest.raises(ProtocolError) as refused:
        assembler(figures=2).feed(frame)
    assert says in str(refused.value)


def test_more_columns_than_a_table_may_have():
    """The bound holds for the plan too."""
    with pytest.raises(ProtocolError, match="at most 64"):
        assembler(figures=65).feed(figures(1, ",".join(["0"] * 65)))


def test_rows_of_figures_arrive_whole():
    """They are one frame with one number, in their order, whatever the tensors' sizes."""
    taker = assembler(figures=2)
    declared = taker.feed(figures(1, "6,-inf", "nan,0", iteration=4))
    assert isinstance(declared, MetadataFrame)
    rows = declared.declaration
    assert isinstance(rows, StatisticRows)
    assert (rows.iteration, rows.statistics) == (4, ("6,-inf", "nan,0"))
    assert [each.byte_count for each in rows.kinds] == [16, 16]
    assert reread_statistic_rows(declared.raw) == rows
    assert isinstance(taker.feed(figures(2)), MetadataFrame)


def test_a_plan_without_figures_has_rows_without():
    """A table may have its fixed columns alone."""
    assert isinstance(assembler(figures=0).feed(figures(1, "", "")), MetadataFrame)
    with pytest.raises(ProtocolError, match="1 statistics, the plan has 0"):
        assembler(figures=0).feed(figures(1, "1"))


def test_elements_in_the_place_of_figures_are_not_a_fault():
    """Whether they are kept is the admission's question: one tensor must not cost the session."""
    assert isinstance(assembler(figures=2).feed(record(1)), ReceivedRecord)


@pytest.mark.parametrize(
    "frame",
    [
        end(1, iteration=7, expected=3, dropped={"why": 2}),
        part(1, graph=2, nodes=[node(name="Default/a-op0", inputs=["", "w"])], first=True),
        arguments(1, iteration=4, operators=[operator(op_name="a", values={"k": "v"})]),
    ],
)
def test_declarations_survive_the_ledger(frame):
    """What the ledger keeps of a declaration is enough to read it again."""
    declared = assembler().feed(frame)
    assert isinstance(declared, MetadataFrame)
    assert reread_metadata_frame(declared.raw, "s") == declared


class TestSlab:
    def test_elements_beside_the_frame_are_not_copied(self):
        """A parcel's data is the very memory that the slab's entry has."""
        memory = memoryview(bytearray(DATA))
        parcel = assembler().feed(record(1, b""), memory)
        assert isinstance(parcel, ReceivedRecord)
        assert parcel.data is memory

    def test_pieces_are_copied_at_once(self):
        """What was copied may be overwritten before the record is whole."""
        taker, memory = assembler(), memoryview(bytearray(DATA))
        assert taker.feed(record(1, b""), memory[:8]) is None
        assert taker.within_record
        memory[:8] = bytes(8)
        parcel = taker.feed(chunk(1, 8, b""), memory[8:])
        assert isinstance(parcel, ReceivedRecord)
        assert load_elements(parcel.data) == DATA
        assert not taker.within_record

    @pytest.mark.parametrize(
        "pieces",
        [
            [(record(1, b""), DATA, "torn")],
            [(record(1, b""), b"", "torn")],
            [(record(1, b""), DATA[:8], "torn"), (chunk(1, 8, b""), DATA[8:], "")],
            [(record(1, b""), DATA[:8], ""), (chunk(1, 8, b""), DATA[8:], "torn")],
        ],
    )
    def test_elements_that_never_came_are_a_drop(self, pieces):
        """Whichever piece is missing, the record is dropped once, and the next one is taken."""
        taker = assembler()
        *open_ones, outcome = [
            taker.feed(frame, memoryview(data), lost=lost) for frame, data, lost in pieces
        ]
        assert open_ones == [None] * (len(pieces) - 1)
        assert isinstance(outcome, RecordOutcome)
        assert (outcome.status, outcome.reason) == (RecordStatus.DROPPED, "torn")
        assert isinstance(taker.feed(record(2, b""), memoryview(DATA)), ReceivedRecord)

    def test_frames_without_elements_lose_nothing(self):
        """Figures and declarations stand in the frame: it counts though its entry was given up."""
        taker, nothing = assembler(figures=1), memoryview(b"")
        assert isinstance(taker.feed(figures(1, "1"), nothing, lost="torn"), MetadataFrame)
        assert isinstance(taker.feed(end(2), nothing, lost="torn"), MetadataFrame)

    def test_record_whose_rest_never_comes(self):
        """It is dropped for the first reason there is; a repeated one was accounted for before."""
        taker = assembler()
        assert taker.cut_off("torn") is None
        taker.feed(record(1, b""), memoryview(DATA)[:8])
        outcome = taker.cut_off("torn")
        assert isinstance(outcome, RecordOutcome)
        assert outcome.reason == "torn"
        refused = assembler(Asked(SelectionVerdict(False, "disk_low")))
        refused.feed(record(1, b""), memoryview(DATA)[:8])
        outcome = refused.cut_off("torn")
        assert isinstance(outcome, RecordOutcome)
        assert outcome.reason == "disk_low"
        again = assembler(known=(1,))
        again.feed(record(1, b""), memoryview(DATA)[:8])
        assert again.cut_off("torn") is None

    def test_elements_stand_in_one_place(self):
        """A frame of a slab that brings bytes of its own is at fault."""
        with pytest.raises(ProtocolError, match="bytes of data itself"):
            assembler().feed(record(1), memoryview(DATA))


class TestDegraded:
    def test_degraded_rows_are_taken(self):
        """Where the plan's on_full keeps statistics, also beside elements."""
        declared = assembler(degrades=1).feed(figures(1, "1", degraded=True))
        assert isinstance(declared, MetadataFrame)
        assert isinstance(declared.declaration, StatisticRows)
        assert declared.declaration.degraded

    @pytest.mark.parametrize("figures_due", [None, 1])
    def test_degraded_without_leave(self, figures_due):
        """Not where the plan has another on_full."""
        with pytest.raises(ProtocolError, match="is degraded"):
            assembler(figures=figures_due).feed(figures(1, "1", degraded=True))

"""The assembler against friendly and hostile frames."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import IterationEnd
from rankdump.contract.selection import YES, Verdict
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.receive import Assembler, declaration_again
from rankdumpd.agent.values import Declared, Fate, Outcome, Parcel

DATA = bytes(range(16))


def record(sequence: int, data: bytes = DATA, **fields) -> agent_pb2.Frame:
    defaults: dict[str, Any] = {
        "op_type": "MatMul",
        "op_name": "Default/MatMul-op0",
        "side": agent_pb2.SIDE_OUTPUT,
        "dtype": "float32",
        "shape": [4],
        "byte_count": 16,
    }
    return agent_pb2.Frame(
        sequence=sequence, record=agent_pb2.Record(data=data, **{**defaults, **fields})
    )


def chunk(sequence: int, offset: int, data: bytes) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, chunk=agent_pb2.Chunk(offset=offset, data=data))


def end(sequence: int, **fields) -> agent_pb2.Frame:
    return agent_pb2.Frame(sequence=sequence, iteration_end=agent_pb2.IterationEnd(**fields))


class Asked:
    """Counts the questions, and answers them all the same."""

    def __init__(self, answer: Verdict = YES) -> None:
        self.answer = answer
        self.heads = []

    def __call__(self, head) -> Verdict:
        self.heads.append(head)
        return self.answer


def assembler(admit=None, *, known=(), highest_first: int = 1) -> Assembler:
    return Assembler(
        "s",
        rank=0,
        net_name="Net",
        highest_first=highest_first,
        known=lambda sequence: sequence in known,
        admit=admit or Asked(),
    )


def feed(taker: Assembler, *frames: agent_pb2.Frame) -> list:
    return [taker.feed(frame) for frame in frames]


@pytest.mark.parametrize("cuts", [[16], [0, 16], [0, 1, 15, 16], [5, 16], [3, 3, 16]])
def test_cuts_do_not_matter(cuts):
    """However its bytes are cut, a record arrives once, whole."""
    frames = [record(1, DATA[: cuts[0]])]
    frames += [chunk(1, a, DATA[a:b]) for a, b in pairwise(cuts)]
    *before, last = feed(assembler(), *frames)
    assert before == [None] * len(before)
    assert isinstance(last, Parcel)
    assert bytes(last.data) == DATA


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([record(2)], "first frame is 2"),
        ([record(0)], "first frame is 0"),
        ([record(1), record(1)], "frame 1 after 1"),
        ([record(1), record(3)], "frame 3 after 1"),
        ([record(1, DATA[:3]), record(2)], "ended at byte 3 of 16"),
        ([record(1, DATA[:3]), end(2)], "ended at byte 3 of 16"),
        ([record(1, DATA[:3]), chunk(1, 4, DATA[4:])], "bytes 4 to 16 after 3"),
        ([record(1, DATA[:3]), chunk(1, 2, DATA[2:])], "bytes 2 to 16 after 3"),
        ([record(1, DATA[:3]), chunk(1, 3, DATA)], "bytes 3 to 19 after 3"),
        ([record(1, DATA[:3]), chunk(1, (1 << 64) - 1, DATA)], "after 3 of 16"),
        ([record(1, DATA[:3]), chunk(2, 3, DATA[3:])], "chunk of record 2"),
        ([chunk(1, 0, DATA)], "chunk of record 1"),
        ([record(1), chunk(1, 16, b"")], "chunk of record 1"),
        ([record(1, DATA + b"x")], "brings 17 bytes, declares 16"),
        ([record(1, byte_count=17)], "17 bytes for float32 of shape [4]"),
        ([record(1, b"", shape=[1 << 31, 1 << 31], byte_count=0)], "0 bytes for float32"),
        ([record(1, b"", shape=[1 << 63, 0], byte_count=0)], "over"),
        ([record(1, b"", byte_count=1 << 63)], "over"),
        ([record(1, iteration=1 << 63)], "over"),
        ([record(1, timestamp_us=(1 << 64) - 1)], "over"),
        ([record(1, side=agent_pb2.SIDE_UNSPECIFIED)], "side 0"),
        ([record(1, shape=[1] * 65)], "65 dimensions"),
        ([record(1, slab=agent_pb2.SlabRange())], "no slab was granted"),
        ([agent_pb2.Frame(sequence=1)], "body None"),
        ([end(1, expected=1 << 63)], "over"),
        ([end(1, dropped={"why": 1 << 63})], "over"),
        ([end(1, dropped={"w" * 101: 1})], "101 characters"),
        ([end(1, dropped={str(n): 1 for n in range(257)})], "257 reasons"),
    ],
)
def test_rules_that_break_a_stream(frames, says):
    """A frame that contradicts itself or its predecessors is refused with the number at fault."""
    taker = assembler()
    feed(taker, *frames[:-1])
    with pytest.raises(ProtocolError) as refused:
        taker.feed(frames[-1])
    assert says in str(refused.value)


def test_end_within_a_record_is_a_fault():
    """A stream may not end in the middle of a record."""
    taker = assembler()
    feed(taker, record(1, DATA[:3]))
    with pytest.raises(ProtocolError):
        taker.finish()


def test_refused_record_is_one_outcome_and_no_memory():
    """The question comes before the memory, once; the bytes of a refused record go nowhere."""
    admit = Asked(Verdict(False, "disk_low"))
    huge = 1 << 50
    taker = assembler(admit)
    frame = record(1, b"", dtype="other", shape=[], byte_count=huge)
    assert feed(taker, frame, chunk(1, 0, DATA)) == [None, None]
    assert [head.byte_count for head in admit.heads] == [huge]
    small = assembler(admit)
    *_, outcome = feed(small, record(1, DATA[:3]), chunk(1, 3, DATA[3:]))
    assert isinstance(outcome, Outcome)
    assert (outcome.fate, outcome.reason) == (Fate.DROPPED, "disk_low")


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
    assert isinstance(taker.feed(record(4)), Parcel)


def test_declarations_survive_the_ledger():
    """What the ledger keeps of a declaration is enough to read it again."""
    declared = assembler().feed(end(1, iteration=7, expected=3, dropped={"why": 2}))
    assert isinstance(declared, Declared)
    assert declared.declaration == IterationEnd(7, 3, {"why": 2})
    assert declaration_again(declared.raw, "s") == declared

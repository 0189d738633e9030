"""Tensors of the black box in full in messages: pieces to values and back, and hostile ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_round_trip import sent, uint63

from rankdump._core.black_box import MAX_STEP_ROWS, StepTensor
from rankdump._core.record import TensorKind, TensorSide
from rankdump._wire.black_box_messages import (
    PIECE_BYTES,
    StepTensorAssembler,
    step_tensor_to_wire,
)
from rankdump._wire.session_messages import kind_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2


def kind_of(size: int, dtype: str = "uint8") -> TensorKind:
    side = TensorSide.INPUT
    return TensorKind(0, "Linear", "Default/fc", side, 1, dtype, (size,), size, "args.1")


KIND = kind_to_wire(kind_of(8))


def feed(assembler: StepTensorAssembler, tensor: StepTensor) -> StepTensor | None:
    found = None
    for piece in step_tensor_to_wire(tensor):
        assert found is None
        found = assembler.feed(sent(piece, agent_pb2.StepTensor))
    return found


@given(
    iteration=uint63,
    data=st.binary(max_size=40),
    row=st.none() | st.integers(0, MAX_STEP_ROWS - 1),
    about_fault=st.booleans(),
)
def test_tensor_round_trip(iteration, data, row, about_fault):
    tensor = StepTensor(iteration, kind_of(len(data)), data, row, about_fault)
    assert feed(StepTensorAssembler(5000), tensor) == tensor


def test_large_tensor_is_joined_from_its_pieces():
    data = bytes(range(256)) * (PIECE_BYTES // 128 + 1)
    tensor = StepTensor(3, kind_of(len(data)), data, about_fault=True)
    assembler = StepTensorAssembler(1 << 24)
    first, *_ = step_tensor_to_wire(tensor)
    # A stream that ended within a tensor: the next one begins anew.
    assert assembler.feed(first) is None
    assert assembler.byte_count == PIECE_BYTES
    assert feed(assembler, tensor) == tensor
    assert assembler.byte_count == 0


def test_skipped_tensor_takes_no_memory():
    data = bytes(2 * PIECE_BYTES + 1)
    assembler = StepTensorAssembler(1 << 24)
    pieces = list(step_tensor_to_wire(StepTensor(3, kind_of(len(data)), data)))
    assembler.feed(pieces[0])
    assembler.skip()
    assert [assembler.feed(piece) for piece in pieces[1:]] == [None, None]
    assert assembler.byte_count == 0
    tensor = StepTensor(3, kind_of(2), b"ab")
    assert feed(assembler, tensor) == tensor


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([{"begin": 1, "data": b"x"}], "begins at 1, after 0 bytes"),
        ([{"tensor_kind": KIND, "data": b"abc"}, {"begin": 4}], "begins at 4, after 3 bytes"),
        ([{"tensor_kind": KIND, "data": b"abc"}, {"begin": 3}], "is empty"),
        ([{"tensor_kind": KIND, "data": b"x" * 9}], "over 8 bytes"),
        ([{"tensor_kind": KIND, "data": b"x" * 8}, {"begin": 8, "data": b"x"}], "begins at 8"),
        ([{"tensor_kind": KIND, "iteration": 1 << 63}], "the number"),
        ([{"tensor_kind": KIND, "row": MAX_STEP_ROWS, "data": b"x" * 8}], "the row 65536"),
        ([{"tensor_kind": b"\xff", "data": b"x"}], "no valid kind"),
        ([{"data": b"x"}], "unknown side"),
        ([{"tensor_kind": kind_to_wire(kind_of(8, "odd"))}], "unknown type 'odd'"),
        ([{"tensor_kind": kind_to_wire(kind_of(1000))}], "tensor_bytes = 5000"),
    ],
)
def test_hostile_piece_is_rejected(fields, words):
    assembler = StepTensorAssembler(5000)
    *before, last = (agent_pb2.StepTensor(**each) for each in fields)
    for message in before:
        assembler.feed(message)
    with pytest.raises(ProtocolError, match=words) as raised:
        assembler.feed(last)
    assert "\n" not in str(raised.value)

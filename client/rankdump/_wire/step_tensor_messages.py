"""Messages of tensors of the black box in full, a piece each, and frozen values; bounds are checked
on receipt.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankdump._core.black_box import MAX_STEP_ROWS, StepTensor, compute_tensor_bytes
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.record import TensorKind
from rankdump._wire.message_fields import check_numbers
from rankdump._wire.session_messages import kind_from_wire, kind_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2

PIECE_BYTES = 1 << 20
"""Most bytes of a piece: while it is made, no other thread of the rank runs Python code."""


def step_tensor_to_wire(tensor: StepTensor) -> Iterator[agent_pb2.StepTensor]:
    """Yield the pieces of a tensor, each made when it is taken."""
    view = memoryview(tensor.data)
    yield agent_pb2.StepTensor(
        iteration=tensor.iteration,
        tensor_kind=kind_to_wire(tensor.kind),
        row=tensor.row,
        about_fault=tensor.about_fault,
        data=bytes(view[:PIECE_BYTES]),
    )
    for begin in range(PIECE_BYTES, len(view), PIECE_BYTES):
        data = bytes(view[begin : begin + PIECE_BYTES])
        yield agent_pb2.StepTensor(iteration=tensor.iteration, begin=begin, data=data)


class StepTensorAssembler:
    """Joins the pieces of the tensors of one session; not for several threads.

    A first piece begins a new tensor, whatever there is of one that a stream has not brought to
    its end.
    """

    def __init__(self, max_bytes: int) -> None:
        """A tensor takes at most `max_bytes`."""
        self._max_bytes = max_bytes
        self._first: tuple[agent_pb2.StepTensor, TensorKind] | None = None
        self._data: bytearray | None = bytearray()
        """None for a tensor that is skipped."""
        self._received = 0

    @property
    def byte_count(self) -> int:
        """Memory of the pieces of a tensor that is not complete."""
        return len(self._data or b"")

    def skip(self) -> None:
        """Give up the tensor whose pieces arrive now."""
        self._data = None

    def feed(self, message: agent_pb2.StepTensor) -> StepTensor | None:
        """Return the tensor that a piece completes; None when there are more to come, or it is
        skipped.

        ProtocolError when the piece contradicts itself, or those before it.
        """
        if not message.begin:
            self._begin(message)
        if self._first is None or message.begin != self._received:
            raise ProtocolError(
                f"a piece of a tensor begins at {message.begin}, after {self._received} bytes"
            )
        first, kind = self._first
        self._received += len(message.data)
        if self._received > kind.byte_count:
            raise ProtocolError(f"the pieces of a tensor have over {kind.byte_count} bytes")
        if self._data is not None:
            self._data += message.data
        if self._received < kind.byte_count:
            if not message.data:
                raise ProtocolError("a piece of a tensor is empty")
            return None
        data, self._data, self._first = self._data, bytearray(), None
        if data is None:
            return None
        row = first.row if first.HasField("row") else None
        return StepTensor(first.iteration, kind, data, row, first.about_fault)

    def _begin(self, message: agent_pb2.StepTensor) -> None:
        self._first, self._data, self._received = None, bytearray(), 0
        check_numbers("tensor of a step", (message.iteration,))
        kind = kind_from_wire(message.tensor_kind)
        if kind.dtype not in ELEMENT_TYPES:
            raise ProtocolError(f"a tensor of a step has the unknown type {kind.dtype[:60]!r}")
        if compute_tensor_bytes(kind.byte_count) > self._max_bytes:
            raise ProtocolError(
                f"a tensor of a step has {kind.byte_count} bytes, over rankdump.blackbox."
                f"tensor_bytes = {self._max_bytes}"
            )
        if message.HasField("row") and message.row >= MAX_STEP_ROWS:
            raise ProtocolError(f"a tensor of a step has the row {message.row}")
        self._first = message, kind

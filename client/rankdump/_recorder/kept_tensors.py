"""Tensors of the running step of the black box that are kept in full: copies that wait for the end
of their step, within the bytes that the outbox has room for, and a count of those left out.
"""

from __future__ import annotations

from rankdump._core.black_box import StepTensor, compute_tensor_bytes
from rankdump._core.record import TensorKind
from rankdump._core.recorder_protocol import TensorSource
from rankdump._transport.step_outbox import StepOutbox


class KeptTensors:
    """The tensors of one step after the other; used on the training thread."""

    def __init__(self, outbox: StepOutbox) -> None:
        self._outbox = outbox
        self._waiting: list[StepTensor] = []
        self._waiting_bytes = self._fault_bytes = 0
        """Of the tensors of the running step that wait, and of those about a fault."""
        self.left_out = 0
        """Tensors of the running step that were to be kept, and are not."""

    @property
    def is_off(self) -> bool:
        """Whether none are kept, because of the plan or of the agent."""
        return not self._outbox.max_tensor_bytes

    def begin_step(self) -> None:
        """Begin a step."""
        self._waiting, self._waiting_bytes, self._fault_bytes, self.left_out = [], 0, 0, 0

    def count_left_out(self, count: int = 1) -> None:
        """Count tensors that were to be kept."""
        if not self.is_off:
            self.left_out += count

    def exceeds_budget(self, byte_count: int, tensors: int) -> bool:
        """Return whether so many tensors of that size together are too large for any step."""
        size = byte_count + compute_tensor_bytes(0) * tensors
        return size > self._outbox.max_tensor_bytes

    def has_room(self, byte_count: int, tensors: int) -> bool:
        """Return whether there is room for them now."""
        size = byte_count + compute_tensor_bytes(0) * tensors
        return self._waiting_bytes + size <= self._outbox.find_tensor_room(about_fault=False)

    def add(self, tensor: StepTensor) -> None:
        """Keep a tensor until its step ends."""
        self._waiting.append(tensor)
        self._waiting_bytes += compute_tensor_bytes(len(tensor.data))

    def send_waiting(self) -> None:
        """Send the tensors that wait, after their step."""
        for tensor in self._waiting:
            self._outbox.add_tensor(tensor)
        self._waiting, self._waiting_bytes = [], 0

    def has_fault_room(self, byte_count: int) -> bool:
        """Return whether there is room for one more tensor about the fault of the running step."""
        size = compute_tensor_bytes(byte_count)
        is_within = self._fault_bytes + size <= self._outbox.max_tensor_bytes
        return is_within and size <= self._outbox.find_tensor_room(about_fault=True)

    def send_about_fault(self, tensor: StepTensor) -> None:
        """Send a tensor about the fault of the running step, which was sent."""
        self._outbox.add_tensor(tensor)
        self._fault_bytes += compute_tensor_bytes(len(tensor.data))

    def discard(self, row: int | None) -> None:
        """Discard the tensor of that row, if it waits: it is sent about a fault."""
        if row is not None and self._waiting and self._waiting[-1].row == row:
            self._waiting_bytes -= compute_tensor_bytes(len(self._waiting.pop().data))


def copy_tensor(
    iteration: int, kind: TensorKind, source: TensorSource, row: int | None, *, about_fault: bool
) -> StepTensor:
    """Return a tensor with a copy of its elements, which change once the job goes on."""
    data = bytearray(kind.byte_count)
    source.copy_into(memoryview(data))
    return StepTensor(iteration, kind, data, row, about_fault)

"""Tensors of the running step of the black box that are kept in full: copies that wait for the end
of the step, within the bytes that the outbox has room for, and a count of the tensors left out.
"""

from __future__ import annotations

from rankdump._core.black_box import StepTensor, compute_tensor_bytes
from rankdump._core.record import TensorKind
from rankdump._core.recorder_protocol import TensorSource
from rankdump._transport.step_outbox import StepOutbox


class KeptTensors:
    """Tensors of the running step that are kept in full; used on the training thread."""

    def __init__(self, outbox: StepOutbox) -> None:
        self._outbox = outbox
        self._waiting: list[StepTensor] = []
        self._waiting_bytes = self._fault_bytes = 0
        """Bytes of the tensors that wait for the end of the running step, and of those sent about a
        fault.
        """
        self.left_out = 0
        """Tensors of the running step that were selected to be kept but were not."""

    @property
    def is_off(self) -> bool:
        """Whether no tensors are kept, because of the plan or of the agent."""
        return not self._outbox.max_tensor_bytes

    def begin_step(self) -> None:
        """Forget the tensors and counts of the last step."""
        self._waiting, self._waiting_bytes, self._fault_bytes, self.left_out = [], 0, 0, 0

    def count_left_out(self, count: int = 1) -> None:
        """Count tensors that were selected to be kept but were not."""
        if not self.is_off:
            self.left_out += count

    def exceeds_budget(self, byte_count: int, tensors: int) -> bool:
        """Return whether tensors of this number and total size are too large for any step."""
        size = byte_count + compute_tensor_bytes(0) * tensors
        return size > self._outbox.max_tensor_bytes

    def has_room(self, byte_count: int, tensors: int) -> bool:
        """Return whether there is room for tensors of this number and total size now."""
        size = byte_count + compute_tensor_bytes(0) * tensors
        return self._waiting_bytes + size <= self._outbox.find_tensor_room(about_fault=False)

    def add(self, tensor: StepTensor) -> None:
        """Keep a tensor until its step ends."""
        self._waiting.append(tensor)
        self._waiting_bytes += compute_tensor_bytes(len(tensor.data))

    def send_waiting(self) -> None:
        """Send the waiting tensors; called after their step was sent."""
        for tensor in self._waiting:
            self._outbox.add_tensor(tensor)
        self._waiting, self._waiting_bytes = [], 0

    def has_fault_room(self, byte_count: int) -> bool:
        """Return whether there is room for one more tensor about the fault of the running step."""
        size = compute_tensor_bytes(byte_count)
        is_within = self._fault_bytes + size <= self._outbox.max_tensor_bytes
        return is_within and size <= self._outbox.find_tensor_room(about_fault=True)

    def send_about_fault(self, tensor: StepTensor) -> None:
        """Send a tensor about the fault of the running step; called after the step was sent."""
        self._outbox.add_tensor(tensor)
        self._fault_bytes += compute_tensor_bytes(len(tensor.data))

    def discard(self, row: int | None) -> None:
        """Discard the waiting tensor of this row, because it is sent about a fault instead."""
        if row is not None and self._waiting and self._waiting[-1].row == row:
            self._waiting_bytes -= compute_tensor_bytes(len(self._waiting.pop().data))


def copy_tensor(
    iteration: int, kind: TensorKind, source: TensorSource, row: int | None, *, about_fault: bool
) -> StepTensor:
    """Return a tensor with a copy of its elements, because the elements change when the job goes
    on.
    """
    data = bytearray(kind.byte_count)
    source.copy_into(memoryview(data))
    return StepTensor(iteration, kind, data, row, about_fault)

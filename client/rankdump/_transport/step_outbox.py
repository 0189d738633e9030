"""Steps of the black box, their tensors in full, and faults on their way to the agent: the latest
ones, and the kinds that the present stream has not brought yet. Nothing is acknowledged; a step
that is not sent before the outbox is full is replaced by later ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from rankdump._core.black_box import FaultNotice, StepState, StepTensor, compute_tensor_bytes
from rankdump._wire.black_box_messages import fault_notice_to_wire, step_state_to_wire
from rankdump._wire.step_tensor_messages import step_tensor_to_wire
from rankdump.wire.v1 import agent_pb2

_MAX_FAULTS = 16
"""Faults that wait, beside the steps."""


@dataclass(slots=True, eq=False)
class _TensorBatch:
    """Tensors of one step."""

    waiting: deque[StepTensor]
    about_fault: bool
    byte_count: int
    """With what each tensor takes besides its elements."""


class StepOutbox:
    """Outbox of one session; filled by the training thread, emptied by the sender."""

    def __init__(self, max_steps: int, max_tensor_bytes: int = 0) -> None:
        self._lock = threading.Lock()
        self._max_steps, self._max_tensor_bytes = max_steps, max_tensor_bytes
        self._items: deque[StepState | FaultNotice | _TensorBatch] = deque()
        """In the order in which they arose: a fault comes before the step that it was found in,
        tensors after their step."""
        self._tensor_bytes = {False: 0, True: 0}
        """Of the tensors that wait or are being sent, by whether they are about a fault."""
        self._kinds: list[bytes] = []
        self._stream = -1
        self._brought = 0
        """Kinds that this stream has brought."""
        self.is_wanted = False
        """Whether the agent keeps steps; what comes before that is known waits."""
        self._keeps_tensors = True
        """Whether it keeps tensors in full; not False before that is known."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when something waits; the transport sets it."""

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that the agent wants."""
        return self.is_wanted and bool(self._items)

    def set_agent(self, *, keeps_steps: bool, keeps_tensors: bool) -> None:
        """Note what the agent keeps; what it does not keep is not held for it."""
        with self._lock:
            self.is_wanted = keeps_steps
            self._keeps_tensors = keeps_steps and keeps_tensors
            if not self._keeps_tensors:
                self._drop_tensors()

    def add_kind(self, kind: bytes) -> int:
        """Give a serialized kind its number, which holds for the session."""
        with self._lock:
            self._kinds.append(kind)
            return len(self._kinds) - 1

    def add_state(self, state: StepState) -> None:
        """Send a step."""
        self._add(state, self._max_steps)

    def add_fault(self, notice: FaultNotice) -> None:
        """Send a fault, after the steps that wait."""
        self._add(notice, _MAX_FAULTS)

    @property
    def max_tensor_bytes(self) -> int:
        """Most bytes of tensors that wait; 0 where none are kept."""
        return self._max_tensor_bytes if self._keeps_tensors else 0

    def find_tensor_room(self, *, about_fault: bool) -> int:
        """Return how many bytes of tensors may be added now. Those about a fault have a budget of
        their own, so that others do not keep them out.
        """
        return self.max_tensor_bytes - self._tensor_bytes[about_fault]

    def add_tensors(self, tensors: Sequence[StepTensor]) -> None:
        """Send tensors of a step that was sent, all of them about its fault or none; the caller
        has looked whether there is room.
        """
        size = sum(compute_tensor_bytes(len(each.data)) for each in tensors)
        batch = _TensorBatch(deque(tensors), tensors[0].about_fault, size)
        with self._lock:
            self._items.append(batch)
            self._tensor_bytes[batch.about_fault] += size
        self.on_news()

    def _drop_tensors(self) -> None:
        for batch in [each for each in self._items if isinstance(each, _TensorBatch)]:
            self._items.remove(batch)
            self._tensor_bytes[batch.about_fault] -= batch.byte_count

    def _add(self, item: StepState | FaultNotice, most: int) -> None:
        """Add an item, in the place of the oldest of its sort when there are too many."""
        with self._lock:
            same = [each for each in self._items if type(each) is type(item)]
            if len(same) >= most:
                self._items.remove(same[0])
            self._items.append(item)
        self.on_news()

    def take_requests(self, stream: int) -> Generator[agent_pb2.PushRequest]:
        """Yield what waits, for the stream of that number."""
        while True:
            with self._lock:
                if stream != self._stream:
                    self._stream, self._brought = stream, 0
                item = self._items.popleft() if self.is_wanted and self._items else None
                request = self._make_request(item)
            if isinstance(item, _TensorBatch):
                yield from self._take_tensors(item)
            elif request is None:
                return
            else:
                yield request

    def _make_request(
        self, item: StepState | FaultNotice | _TensorBatch | None
    ) -> agent_pb2.PushRequest | None:
        if isinstance(item, FaultNotice):
            return agent_pb2.PushRequest(fault=fault_notice_to_wire(item))
        if not isinstance(item, StepState):
            return None
        first, self._brought = self._brought, len(self._kinds)
        message = step_state_to_wire(item, self._kinds[first:], first)
        return agent_pb2.PushRequest(step_state=message)

    def _take_tensors(self, batch: _TensorBatch) -> Iterator[agent_pb2.PushRequest]:
        """Yield the pieces of tensors; where a stream ends before, the rest is lost with it."""
        try:
            while batch.waiting:
                for piece in step_tensor_to_wire(batch.waiting.popleft()):
                    yield agent_pb2.PushRequest(step_tensor=piece)
        finally:
            with self._lock:
                self._tensor_bytes[batch.about_fault] -= batch.byte_count

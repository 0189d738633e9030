"""Outbox of the black box: the latest steps, their full tensors and faults on their way to the
agent, and the kinds that the present stream has not sent yet. Nothing is acknowledged; if the
outbox is full, later steps replace steps that were not sent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rankdump._core.black_box import FaultNotice, StepState, StepTensor, compute_tensor_bytes
from rankdump._wire.black_box_messages import (
    PIECE_BYTES,
    fault_notice_to_wire,
    step_state_to_wire,
    step_tensor_to_wire,
)
from rankdump.wire.v1 import agent_pb2

_MAX_FAULTS = 16
"""Maximum number of waiting faults, which do not count as steps."""
WAKE_PAUSE_S = 0.1
"""Minimum seconds between two steps that wake the sender. Waking the sender and its connection
takes a millisecond of processor time, so steps between are sent with a later one, or at the
sender's next tick.
"""


class StepOutbox:
    """Outbox of one session; filled by the training thread, emptied by the sender."""

    def __init__(
        self,
        max_steps: int,
        max_tensor_bytes: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._woken_s = -WAKE_PAUSE_S
        self._max_steps = max_steps
        self._items: deque[StepState | FaultNotice] = deque()
        """Items in the order in which they arose: a fault comes before the step that it was found
        in.
        """
        self._tensors = _TensorQueue(max_tensor_bytes)
        self._kinds: list[bytes] = []
        self._stream = -1
        self._brought = 0
        """Number of kinds that the present stream has sent."""
        self._is_finishing = False
        self.is_wanted = False
        """Whether the agent keeps steps; items that are added before this is known wait."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when something is to be sent now; set by the transport."""

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that the agent wants."""
        return self.is_wanted and bool(self._items or self._tensors)

    def set_agent(self, *, keeps_steps: bool, keeps_tensors: bool) -> None:
        """Note whether the agent keeps steps and tensors; tensors that it does not keep are not
        held for it.
        """
        with self._lock:
            self.is_wanted = keeps_steps
            self._tensors.is_off = not (keeps_steps and keeps_tensors)
            if self._tensors.is_off:
                self._tensors.clear()

    def add_kind(self, kind: bytes) -> int:
        """Add a serialized kind; return its number, which is valid for the session."""
        with self._lock:
            self._kinds.append(kind)
            return len(self._kinds) - 1

    def add_state(self, state: StepState) -> None:
        """Send a step; it replaces a waiting state of the same step."""
        with self._lock:
            for item in self._items:
                if isinstance(item, StepState) and item.iteration == state.iteration:
                    self._items.remove(item)
                    break
        self._add(state, self._max_steps)
        self._wake_at_intervals()

    def add_fault(self, notice: FaultNotice) -> None:
        """Send a fault after the waiting steps."""
        self._add(notice, _MAX_FAULTS)
        self.on_news()

    def add_tensor(self, tensor: StepTensor) -> None:
        """Send a tensor of a step that was added, after all waiting steps and faults; the caller
        has checked that there is room.
        """
        with self._lock:
            self._tensors.add(tensor)
        if tensor.about_fault:
            self.on_news()
        else:
            self._wake_at_intervals()

    @property
    def max_tensor_bytes(self) -> int:
        """Maximum bytes of tensors that may wait; 0 if no tensors are kept."""
        return self._tensors.max_bytes

    def find_tensor_room(self, *, about_fault: bool) -> int:
        """Return how many bytes of tensors may be added now. Tensors about a fault have a separate
        budget, so that other tensors do not use it up.
        """
        return self._tensors.find_room(about_fault=about_fault)

    def _wake_at_intervals(self) -> None:
        now_s = self._clock()
        if now_s - self._woken_s >= WAKE_PAUSE_S:
            self._woken_s = now_s
            self.on_news()

    def _add(self, item: StepState | FaultNotice, most: int) -> None:
        """Add an item; if there are too many of its sort, it replaces the oldest one."""
        with self._lock:
            same = [each for each in self._items if type(each) is type(item)]
            if len(same) >= most:
                self._items.remove(same[0])
            self._items.append(item)

    def finish(self) -> None:
        """Note that the session ends: all tensors are sent before the agent learns of the end."""
        self._is_finishing = True

    def take_requests(self, stream: int) -> Iterator[agent_pb2.PushRequest]:
        """Yield the waiting items as requests of the stream with this number. There is at most one
        request with tensors, because frames do not wait for tensors, except at the end of the
        session.
        """
        is_over = False
        while not is_over:
            with self._lock:
                if stream != self._stream:
                    self._stream, self._brought = stream, 0
                    self._tensors.give_up_sent()
                if not self.is_wanted:
                    return
                states, first = self._take_states(), self._brought
                kinds = self._kinds[first:] if states else []
                self._brought = first + len(kinds)
                request = None if states else self._take_other()
            if states:
                # This is done without the lock, because the training thread may wait for the lock.
                request = _make_states_request(states, kinds, first)
            if request is None:
                return
            yield request
            is_over = request.HasField("step_tensors") and not self._is_finishing

    def _take_states(self) -> list[StepState]:
        """Return the steps for the next message: those before the next fault, as many as fit."""
        states: list[StepState] = []
        size = 0
        while self._items and isinstance(item := self._items[0], StepState) and size < PIECE_BYTES:
            states.append(item)
            size += len(item.rows) + len(item.details) + sum(map(len, item.stacks))
            self._items.popleft()
        return states

    def _take_other(self) -> agent_pb2.PushRequest | None:
        """Return the message of the next fault, or if there is none, of tensors."""
        if self._items and isinstance(item := self._items.popleft(), FaultNotice):
            return agent_pb2.PushRequest(fault=fault_notice_to_wire(item))
        pieces = self._tensors.take_pieces()
        if not pieces:
            return None
        return agent_pb2.PushRequest(step_tensors=agent_pb2.StepTensors(pieces=pieces))


def _make_states_request(
    states: Sequence[StepState], kinds: Sequence[bytes], first_kind: int
) -> agent_pb2.PushRequest:
    """Return the message of several steps; the kinds are sent with the first step."""
    messages = [step_state_to_wire(states[0], kinds, first_kind)]
    messages += [step_state_to_wire(state, (), first_kind + len(kinds)) for state in states[1:]]
    return agent_pb2.PushRequest(step_states=agent_pb2.StepStates(states=messages))


class _TensorQueue:
    """Waiting tensors, those about a fault first, and the tensor that is being sent."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.is_off = False
        """Whether the agent keeps no tensors; False as long as that is not known."""
        self._waiting: dict[bool, deque[StepTensor]] = {True: deque(), False: deque()}
        self._byte_counts = {True: 0, False: 0}
        """Bytes of tensors about a fault (True) and of other tensors (False), including the one
        that is being sent.
        """
        self._sent: tuple[StepTensor, Iterator[agent_pb2.StepTensor]] | None = None
        """The tensor that is being sent, with its remaining pieces."""

    def __bool__(self) -> bool:
        return self._sent is not None or any(self._waiting.values())

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of tensors about a fault, and likewise of other tensors."""
        return 0 if self.is_off else self._max_bytes

    def find_room(self, *, about_fault: bool) -> int:
        """Return how many bytes of tensors may be added."""
        return self.max_bytes - self._byte_counts[about_fault]

    def add(self, tensor: StepTensor) -> None:
        """Add a tensor that there is room for, unless the agent keeps no tensors."""
        if self.is_off:
            return
        self._waiting[tensor.about_fault].append(tensor)
        self._byte_counts[tensor.about_fault] += compute_tensor_bytes(len(tensor.data))

    def take_pieces(self) -> list[agent_pb2.StepTensor]:
        """Return the next pieces, together less than twice PIECE_BYTES; an empty list if no tensor
        waits.
        """
        pieces: list[agent_pb2.StepTensor] = []
        size = 0
        while size < PIECE_BYTES:
            piece = self._take_piece()
            if piece is None:
                break
            pieces.append(piece)
            size += piece.ByteSize()
        return pieces

    def _take_piece(self) -> agent_pb2.StepTensor | None:
        while True:
            piece = next(self._sent[1], None) if self._sent else None
            if piece is not None:
                return piece
            self.give_up_sent()
            waiting = next((each for each in self._waiting.values() if each), None)
            if waiting is None:
                return None
            tensor = waiting.popleft()
            self._sent = tensor, step_tensor_to_wire(tensor)

    def give_up_sent(self) -> None:
        """Forget the tensor that is being sent, because all of it was sent or its
        stream has ended.
        """
        if self._sent is not None:
            tensor, self._sent = self._sent[0], None
            self._byte_counts[tensor.about_fault] -= compute_tensor_bytes(len(tensor.data))

    def clear(self) -> None:
        """Drop all tensors."""
        self._sent = None
        for about_fault, waiting in self._waiting.items():
            waiting.clear()
            self._byte_counts[about_fault] = 0

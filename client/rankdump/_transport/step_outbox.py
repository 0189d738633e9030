"""Steps of the black box and faults on their way to the agent: the latest ones, and the kinds that
the present stream has not brought yet. Nothing is acknowledged; a step that is not sent before the
outbox is full is replaced by later ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from rankdump._core.black_box import FaultNotice, StepState
from rankdump._wire.black_box_messages import fault_notice_to_wire, step_state_to_wire
from rankdump.wire.v1 import agent_pb2

_MAX_FAULTS = 16
"""Faults that wait, beside the steps."""
WAKE_PAUSE_S = 0.04
"""Shortest time between two steps that wake the sender, which takes half a millisecond of processor
time: steps between are sent with a later one, or at the sender's next tick.
"""


class StepOutbox:
    """Outbox of one session; filled by the training thread, emptied by the sender."""

    def __init__(self, max_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._woken_s = -WAKE_PAUSE_S
        self._max_steps = max_steps
        self._items: deque[StepState | FaultNotice] = deque()
        """In the order in which they arose: a fault comes before the step that it was found in."""
        self._kinds: list[bytes] = []
        self._stream = -1
        self._brought = 0
        """Kinds that this stream has brought."""
        self.is_wanted = False
        """Whether the agent keeps steps; what comes before that is known waits."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when something waits that is to be sent now; the transport sets it."""

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that the agent wants."""
        return self.is_wanted and bool(self._items)

    def add_kind(self, kind: bytes) -> int:
        """Give a serialized kind its number, which holds for the session."""
        with self._lock:
            self._kinds.append(kind)
            return len(self._kinds) - 1

    def add_state(self, state: StepState) -> None:
        """Send a step, in the place of what waits of it."""
        with self._lock:
            for item in self._items:
                if isinstance(item, StepState) and item.iteration == state.iteration:
                    self._items.remove(item)
                    break
        self._add(state, self._max_steps)
        now_s = self._clock()
        if now_s - self._woken_s >= WAKE_PAUSE_S:
            self._woken_s = now_s
            self.on_news()

    def add_fault(self, notice: FaultNotice) -> None:
        """Send a fault, after the steps that wait."""
        self._add(notice, _MAX_FAULTS)
        self.on_news()

    def _add(self, item: StepState | FaultNotice, most: int) -> None:
        """Add an item, in the place of the oldest of its sort when there are too many."""
        with self._lock:
            same = [each for each in self._items if type(each) is type(item)]
            if len(same) >= most:
                self._items.remove(same[0])
            self._items.append(item)

    def take_requests(self, stream: int) -> Iterator[agent_pb2.PushRequest]:
        """Yield what waits, for the stream of that number."""
        while True:
            with self._lock:
                if stream != self._stream:
                    self._stream, self._brought = stream, 0
                request = self._take_request() if self.is_wanted else None
            if request is None:
                return
            yield request

    def _take_request(self) -> agent_pb2.PushRequest | None:
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, FaultNotice):
            return agent_pb2.PushRequest(fault=fault_notice_to_wire(item))
        first, self._brought = self._brought, len(self._kinds)
        message = step_state_to_wire(item, self._kinds[first:], first)
        return agent_pb2.PushRequest(step_state=message)

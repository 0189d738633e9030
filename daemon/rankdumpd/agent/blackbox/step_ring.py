"""Rings with the latest steps of ranks, in the memory of the agent, so that they remain when the
process of the rank ends, hangs or is killed.

All rings together stay within the memory that the other parts of the agent leave. Beyond it, the
oldest full tensors of all ranks are dropped, then their oldest steps, and both are counted. The
plan of a session limits the bytes of full tensors in its ring: the oldest ones are removed first,
those about a fault after all others.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from rankdump._core.black_box import (
    PULSE_ROW,
    RankStep,
    StepState,
    StepTensor,
    compute_tensor_bytes,
)
from rankdump._wire.black_box_messages import (
    MAX_STEP_NUMBERS,
    StepTensorAssembler,
    check_new_kinds,
    step_state_from_wire,
)
from rankdump._wire.session_messages import kind_from_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.freeze_decision import MIN_INTERVALS
from rankdumpd.agent.session.rank_session import RankSession

MAX_KINDS_BYTES = 32 << 20
"""Largest size of all kinds of one session; a kind of the usual length has some 120 bytes."""
_CALLS_BYTES = 256
"""Memory of the calls of one process group in a step, without its members."""
_STEP_BYTES = 512
"""Memory of a step besides its rows and texts."""
_MAX_INTERVALS = 64


def count_trailing_zeros(iteration: int) -> int:
    """Return the number of trailing zero bits of a number; for 0 more than any other number has.

    >>> count_trailing_zeros(12), count_trailing_zeros(7), count_trailing_zeros(0)
    (2, 0, 64)
    """
    return (iteration & -iteration).bit_length() - 1 if iteration else 64


def compute_step_bytes(state: StepState) -> int:
    """Return the approximate bytes of memory that a step takes."""
    cause = state.cause
    texts = (*cause.numbers, *cause.digests, *cause.digests.values(), *state.stacks, *state.notes)
    members = sum(len(calls.ranks) for calls in state.calls)
    return (
        _STEP_BYTES
        + len(state.rows)
        + len(state.details)
        + sum(map(len, texts))
        + _CALLS_BYTES * len(state.calls)
        + 8 * members
    )


def count_tensors(state: StepState) -> int:
    """Return the number of tensors that a rank has passed in a step."""
    return len(state.rows) // PULSE_ROW.itemsize + state.skipped


class StepRing:
    """The latest steps of one session, by iteration; protected by the lock of `StepRings`."""

    def __init__(self, session: RankSession) -> None:
        self.session = session
        self.kinds: list[bytes] = []
        """Serialised kinds of tensors; rows of the steps refer to them by their position."""
        self._step_bytes = 0
        """Bytes of the steps and kinds."""
        max_bytes = session.plan.black_box.tensor_bytes
        self.tensors, self._assembler = HeldTensors(max_bytes), StepTensorAssembler(max_bytes)
        self.dropped_tensors = 0
        """Full tensors that were dropped because memory was short, because they arrived after their
        step was removed, or because they never arrived completely.
        """
        self.finished_steps = 0
        """Steps that have ended since the session began."""
        self.dropped_steps = 0
        """Steps that were dropped because memory was short."""
        self.newest_iteration = 0
        self.finished_iteration = -1
        """Highest iteration that the rank has ended; -1 for none."""
        self.finished_s = 0.0
        """Time at which the last finished step arrived."""
        self.active_s = 0.0
        """Time of the rank's last progress: when a step with more tensors arrived, or a frame was
        acknowledged.
        """
        self._acknowledged = 0
        """Highest acknowledged sequence number at the last call of `note_frames`."""
        self.longest_pause_s = 0.0
        """Longest time without progress that was followed by progress, since there is a median step
        time.
        """
        self._steps: dict[int, tuple[int, StepState]] = {}
        """Steps by iteration, the oldest first, each with the number of its arrival."""
        self._intervals_s: deque[float] = deque(maxlen=_MAX_INTERVALS)
        self._ended_us = 0
        """Time at which the last finished step ended, by the clock of its rank, because several
        steps may arrive together.
        """
        self._compared = -1
        """Iteration of the step that is compared with those of other ranks next; -1 for none."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def byte_count(self) -> int:
        """Bytes of memory that the ring takes."""
        return self._step_bytes + self.tensors.byte_count + self._assembler.byte_count

    @property
    def steps(self) -> list[StepState]:
        """All steps in the ring, the oldest first."""
        return [state for _, state in self._steps.values()]

    @property
    def row_count(self) -> int:
        """Number of rows in all steps."""
        row_bytes = sum(len(state.rows) for _, state in self._steps.values())
        return row_bytes // PULSE_ROW.itemsize

    @property
    def oldest_arrival(self) -> int | None:
        """Number of the arrival of the oldest step; None without steps."""
        return next((number for number, _ in self._steps.values()), None)

    @property
    def median_step_s(self) -> float:
        """Median time between finished steps; 0 until two have arrived."""
        return statistics.median(self._intervals_s) if self._intervals_s else 0.0

    @property
    def interval_count(self) -> int:
        """Number of intervals between finished steps that the median is computed from."""
        return len(self._intervals_s)

    def list_tensors(self) -> dict[int, tuple[StepTensor, ...]]:
        """Return the full tensors of each step that has any, by iteration."""
        listed = {iteration: self.tensors.list_step(iteration) for iteration in self._steps}
        return {iteration: tensors for iteration, tensors in listed.items() if tensors}

    def pop_compared_step(self) -> StepState | None:
        """Return one of the steps that have ended since the last call; None if none has.

        It is the step whose iteration has most trailing zero bits. Agents of a job look at
        different times, and with this rule they return steps of the same iterations.
        """
        iteration, self._compared = self._compared, -1
        held = self._steps.get(iteration)
        return held[1] if held else None

    def add_kinds(self, first: int, kinds: Sequence[bytes]) -> None:
        """Add kinds from the position `first` on; ProtocolError when a position has another kind
        already.
        """
        known = self.kinds[first : first + len(kinds)]
        for number, (before, now) in enumerate(zip(known, kinds, strict=False), first):
            if before != now:
                raise ProtocolError(f"a step brings another kind with the number {number}")
        new = kinds[len(known) :]
        size = sum(map(len, new))
        if size and sum(map(len, self.kinds)) + size > MAX_KINDS_BYTES:
            raise ProtocolError(
                f"the kinds of tensors of a session take over {MAX_KINDS_BYTES} bytes"
            )
        self.kinds += new
        self._step_bytes += size

    def put(self, state: StepState, number: int, now_s: float) -> None:
        """Add a step, which replaces an earlier state of its iteration; remove the oldest steps
        beyond the plan's number.
        """
        held = self._steps.get(state.iteration)
        before = held[1] if held else None
        if state.unfinished and before is not None and not before.unfinished:
            # Another thread of the rank sent the state, so an older state may arrive later.
            return
        if before is None or count_tensors(before) < count_tensors(state) or not state.unfinished:
            if self.interval_count >= MIN_INTERVALS:
                self.longest_pause_s = max(self.longest_pause_s, now_s - self.active_s)
            self.active_s = now_s
        self._steps.pop(state.iteration, None)
        self._steps[state.iteration] = number, state
        self._step_bytes += compute_step_bytes(state)
        self._step_bytes -= compute_step_bytes(before) if before else 0
        self.newest_iteration = max(self.newest_iteration, state.iteration)
        if not state.unfinished and (before is None or before.unfinished):
            self._count_finished(state, now_s)
        while len(self._steps) > self.session.plan.black_box.steps:
            self._remove(next(iter(self._steps)))

    def note_frames(self, acknowledged: int, now_s: float) -> None:
        """Count progress for a rank whose frames are still being committed: it may wait for the
        agent, or deliver the rest before it ends its session.
        """
        if acknowledged > self._acknowledged:
            self._acknowledged, self.active_s = acknowledged, now_s

    def feed_tensor(self, message: agent_pb2.StepTensor, number: int) -> None:
        """Take a piece of a full tensor, and keep the tensor once it is complete.

        ProtocolError when the piece contradicts itself or the pieces before it.
        """
        # The stream that sent the beginning of the tensor has ended.
        self.dropped_tensors += not message.begin and self._assembler.byte_count > 0
        tensor = self._assembler.feed(message)
        if tensor is None:
            return
        if tensor.iteration in self._steps:
            self.tensors.put(tensor, number)
        else:
            self.dropped_tensors += 1

    def end_tensor(self) -> None:
        """Drop the tensor that is incomplete, because its session has ended."""
        if self._assembler.byte_count:
            self._assembler.skip()
            self.dropped_tensors += 1

    @property
    def oldest_tensor(self) -> tuple[bool, float] | None:
        """Sort key of the full tensor that is dropped next, comparable between rings; None without
        tensors.
        """
        arriving = (True, math.inf) if self._assembler.byte_count else None
        return self.tensors.oldest or arriving

    def drop_oldest_tensor(self) -> None:
        """Drop the tensor with the lowest sort key, because memory is short."""
        if len(self.tensors):
            self.tensors.drop_oldest()
        else:
            self._assembler.skip()
        self.dropped_tensors += 1

    def _count_finished(self, state: StepState, now_s: float) -> None:
        if self.finished_steps:
            self._intervals_s.append(max(0, state.ended_us - self._ended_us) / 1e6)
        self.finished_steps += 1
        self.finished_s, self._ended_us = now_s, state.ended_us
        self.finished_iteration = max(self.finished_iteration, state.iteration)
        zeros = count_trailing_zeros(state.iteration)
        if self._compared < 0 or zeros >= count_trailing_zeros(self._compared):
            self._compared = state.iteration

    def drop_oldest(self) -> None:
        """Drop the oldest step, because memory is short."""
        self._remove(next(iter(self._steps)))
        self.dropped_steps += 1

    def forget(self, states: Iterable[StepState], tensors: int) -> int:
        """Remove these steps, of which a freeze has taken `tensors` full tensors. Return how many
        tensors arrived after that and are lost with their steps.
        """
        removed = 0
        for state in states:
            held = self._steps.get(state.iteration)
            if held is not None and held[1] is state:
                removed += self._remove(state.iteration)
        dropped = max(0, removed - tensors)
        self.dropped_tensors += dropped
        return dropped

    def _remove(self, iteration: int) -> int:
        """Remove a step; return how many full tensors it had."""
        held = self._steps.pop(iteration, None)
        if held is not None:
            self._step_bytes -= compute_step_bytes(held[1])
        return self.tensors.remove_step(iteration)


class StepRings:
    """The rings of all sessions of an agent; safe to use from several threads."""

    def __init__(self, find_room: Callable[[], int], clock: Callable[[], float]) -> None:
        """`find_room` returns how many bytes all rings together may take now."""
        self._find_room, self._clock = find_room, clock
        self.lock = threading.RLock()
        """Lock that callers hold while they read a ring."""
        self._rings: dict[str, StepRing] = {}
        self._arrivals = 0
        self.dropped_steps = 0
        """Number of steps that were dropped for lack of memory since the agent was started."""
        self.dropped_tensors = 0
        """Number of full tensors that were dropped since the agent was started."""

    def take_step(self, session: RankSession, message: agent_pb2.StepState) -> StepRing:
        """Put a step into the ring of its session; ProtocolError when the step
        contradicts itself.
        """
        if not session.plan.black_box.steps:
            raise ProtocolError("a step arrived, and the plan of its session has no black box")
        with self.lock:
            ring = self._rings.setdefault(session.request.session_id, StepRing(session))
            known = len(ring.kinds)
        # Checked without the lock, because a message with thousands of kinds takes some
        # milliseconds.
        check_new_kinds(message, known)
        for kind in message.new_kinds:
            kind_from_wire(kind)
        known = max(known, message.first_kind + len(message.new_kinds))
        state = step_state_from_wire(message, known)
        with self.lock:
            ring.add_kinds(message.first_kind, message.new_kinds)
            self._arrivals += 1
            ring.put(state, self._arrivals, self._clock())
        self.trim()
        return ring

    def take_tensors(self, session: RankSession, message: agent_pb2.StepTensors) -> None:
        """Put pieces of full tensors into the ring of their session; ProtocolError when a piece
        contradicts itself or the pieces before it.
        """
        settings = session.plan.black_box
        if not settings.steps or not settings.tensor_bytes:
            raise ProtocolError("a tensor of a step arrived, and the plan of its session has none")
        with self.lock:
            ring = self._rings.setdefault(session.request.session_id, StepRing(session))
            dropped = ring.dropped_tensors
            try:
                for piece in message.pieces:
                    self._arrivals += 1
                    ring.feed_tensor(piece, self._arrivals)
            finally:
                self.dropped_tensors += ring.dropped_tensors - dropped
        self.trim()

    def trim(self) -> None:
        """Drop the oldest full tensors, then the oldest steps, until all rings together fit into
        the available memory.
        """
        room = self._find_room()
        with self.lock:
            used = sum(ring.byte_count for ring in self._rings.values())
            while used > room:
                oldest = self._find_oldest()
                if oldest is None:
                    return
                used -= oldest.byte_count
                if oldest.oldest_tensor:
                    oldest.drop_oldest_tensor()
                    self.dropped_tensors += 1
                else:
                    oldest.drop_oldest()
                    self.dropped_steps += 1
                used += oldest.byte_count

    def _find_oldest(self) -> StepRing | None:
        """Return the ring with the tensor that is dropped next; if no ring has tensors, the ring
        with the oldest step.
        """
        kept = [(ring.oldest_tensor, ring) for ring in self._rings.values()]
        tensors = [(oldest, ring) for oldest, ring in kept if oldest is not None]
        if tensors:
            return min(tensors, key=lambda each: each[0])[1]
        held = [ring for ring in self._rings.values() if len(ring)]
        return min(held, key=lambda ring: ring.oldest_arrival or 0, default=None)

    def find(self, session_id: str) -> StepRing | None:
        """Return the ring of a session; None when it has sent no step."""
        return self._rings.get(session_id)

    def list_rings(self, job_id: str = "") -> list[StepRing]:
        """Return the rings of a job; without an id the rings of all jobs."""
        with self.lock:
            return [
                ring for ring in self._rings.values() if job_id in ("", ring.session.request.job_id)
            ]

    def pop_compared_steps(self) -> list[RankStep]:
        """Return one step with numbers of each ring in which steps have ended since the
        last call.
        """
        with self.lock:
            popped = [(ring, ring.pop_compared_step()) for ring in self._rings.values()]
        return [
            _make_rank_step(ring.session, state)
            for ring, state in popped
            if state is not None and state.cause.numbers
        ]

    def discard(self, session_id: str) -> None:
        """Remove the ring of a session."""
        with self.lock:
            self._rings.pop(session_id, None)

    @property
    def step_count(self) -> int:
        """Number of steps in all rings."""
        with self.lock:
            return sum(map(len, self._rings.values()))

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that all rings take."""
        with self.lock:
            return sum(ring.byte_count for ring in self._rings.values())


def _make_rank_step(session: RankSession, state: StepState) -> RankStep:
    request, numbers = session.request, state.cause.numbers
    # Sorted, so that all ranks of a job send the same names.
    names = sorted(numbers)[:MAX_STEP_NUMBERS]
    chosen = {name: numbers[name] for name in names}
    return RankStep(request.job_id, request.rank, request.attempt, state.iteration, chosen)


class HeldTensors:
    """The full tensors of one session; protected by the lock of `StepRings`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.byte_count = 0
        """Bytes of all tensors, including what each takes besides its elements."""
        self._ranked: dict[bool, dict[int, deque[tuple[int, StepTensor]]]] = {False: {}, True: {}}
        """Tensors by whether they are about a fault, then by iteration; each list is in the order
        of arrival and has the number of the arrival with each tensor.
        """

    def __len__(self) -> int:
        return sum(len(held) for steps in self._ranked.values() for held in steps.values())

    @property
    def element_bytes(self) -> int:
        """Bytes of the elements of all tensors."""
        return self.byte_count - compute_tensor_bytes(0) * len(self)

    @property
    def oldest(self) -> tuple[bool, int] | None:
        """Sort key of the tensor that is dropped next, comparable between rings; None without
        tensors.
        """
        for about_fault, steps in self._ranked.items():
            for held in steps.values():
                return about_fault, held[0][0]
        return None

    def put(self, tensor: StepTensor, number: int) -> None:
        """Add a tensor of a step that is in the ring; `number` is the number of its arrival."""
        steps = self._ranked[tensor.about_fault]
        steps.setdefault(tensor.iteration, deque()).append((number, tensor))
        self.byte_count += compute_tensor_bytes(len(tensor.data))
        while self.byte_count > self._max_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the tensor with the lowest sort key."""
        for steps in self._ranked.values():
            for iteration, held in steps.items():
                self._count_off(held.popleft()[1])
                if not held:
                    del steps[iteration]
                return

    def remove_step(self, iteration: int) -> int:
        """Remove the tensors of a step; return how many there were."""
        removed = [
            tensor for steps in self._ranked.values() for _, tensor in steps.pop(iteration, ())
        ]
        for tensor in removed:
            self._count_off(tensor)
        return len(removed)

    def list_step(self, iteration: int) -> tuple[StepTensor, ...]:
        """Return the tensors of a step, in the order of their arrival."""
        found = [each for steps in self._ranked.values() for each in steps.get(iteration, ())]
        return tuple(tensor for _, tensor in sorted(found, key=lambda each: each[0]))

    def _count_off(self, tensor: StepTensor) -> None:
        self.byte_count -= compute_tensor_bytes(len(tensor.data))

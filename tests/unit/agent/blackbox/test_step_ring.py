"""Rings of steps: what stays, what leaves, and hostile messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rankdump._core.black_box import PULSE_ROW, StepCause, StepState, StepTensor
from rankdump._core.plan import BlackBoxSettings, DumpPlan, OutputSettings
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import SessionRequest
from rankdump._wire.black_box_messages import (
    MAX_STEP_NUMBERS,
    PIECE_BYTES,
    step_state_to_wire,
    step_tensor_to_wire,
)
from rankdump._wire.session_messages import kind_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.blackbox.step_ring import StepRing, StepRings
from rankdumpd.agent.session.rank_session import RankSession


def rows_of(*kinds: int) -> bytes:
    rows = np.zeros(len(kinds), PULSE_ROW)
    rows["kind"] = kinds
    return rows.tobytes()


def step(iteration: int, *kinds: int, **fields) -> StepState:
    return StepState(iteration, 10 * iteration, 10 * iteration + 5, rows_of(*kinds), **fields)


@pytest.fixture
def make_session(make_request: Callable[..., SessionRequest]):
    def make(steps: int = 4, tensor_bytes: int = 0, **fields) -> RankSession:
        settings = BlackBoxSettings(steps, tensor_bytes=tensor_bytes)
        plan = DumpPlan(OutputSettings("/dump"), black_box=settings)
        return RankSession(make_request(**fields), plan)

    return make


@pytest.fixture
def kinds(make_kind: Callable[..., TensorKind]) -> list[bytes]:
    return [kind_to_wire(make_kind(slot=slot)) for slot in range(3)]


class HandClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_rings(room: int = 1 << 30, clock: HandClock | None = None) -> StepRings:
    return StepRings(lambda: room, clock or HandClock())


def test_ring_keeps_the_latest_steps(make_session, kinds):
    rings, session = make_rings(), make_session(steps=3)
    rings.take_step(session, step_state_to_wire(step(0, 0, 2), kinds, 0))
    for iteration in range(1, 6):
        rings.take_step(session, step_state_to_wire(step(iteration, 1), (), 0))
    ring = rings.find(session.request.session_id)
    assert ring
    assert [state.iteration for state in ring.steps] == [3, 4, 5]
    assert (ring.finished_steps, ring.dropped_steps, rings.step_count) == (6, 0, 3)
    assert ring.row_count == 3


def test_late_unfinished_state_does_not_replace_the_finished_step(make_session, kinds):
    rings, session = make_rings(), make_session()
    for state in (step(0, 0, 1), step(0, 0, unfinished=True)):
        rings.take_step(session, step_state_to_wire(state, kinds, 0))
    ring = rings.find(session.request.session_id)
    assert ring
    assert [each.unfinished for each in ring.steps] == [False]


def test_step_that_comes_further_is_no_pause(make_session, kinds):
    """Eleven steps of a second, and one that measures something every 3 s, for 12 s."""
    clock = HandClock()
    rings, session = make_rings(clock=clock), make_session()

    def take(state: StepState, later_s: float) -> StepRing:
        clock.now_s += later_s
        return rings.take_step(session, step_state_to_wire(state, kinds, 0))

    for iteration in range(11):
        take(step(iteration, 0), 1.0)
    for count in range(1, 5):
        assert take(step(11, *[0] * count, unfinished=True), 3.0).active_s == clock.now_s
    ring = rings.find(session.request.session_id)
    assert ring
    assert (ring.longest_pause_s, ring.finished_iteration) == (3.0, 10)
    # What a freeze asks for may have nothing new.
    assert take(step(11, 0, 0, 0, 0, unfinished=True), 9.0).active_s == clock.now_s - 9.0
    assert take(step(11, 0, 0, 0, 0), 1.0).longest_pause_s == 10.0


def test_rank_whose_frames_are_being_committed_comes_further(make_session, kinds):
    """But that is no pause after which it went on."""
    rings, session = make_rings(), make_session()
    ring = rings.take_step(session, step_state_to_wire(step(0, 0), kinds, 0))
    begun_s = ring.active_s
    ring.note_frames(0, begun_s + 7.0)
    assert ring.active_s == begun_s
    ring.note_frames(12, begun_s + 8.0)
    ring.note_frames(12, begun_s + 9.0)
    assert (ring.active_s, ring.longest_pause_s) == (begun_s + 8.0, 0.0)


def test_finished_step_replaces_the_unfinished_one(make_session, kinds):
    rings, session = make_rings(), make_session()
    for state in (step(0, 0), step(1, unfinished=True, stacks=("a",)), step(1, 0, 1)):
        rings.take_step(session, step_state_to_wire(state, kinds, 0))
    ring = rings.find(session.request.session_id)
    assert ring
    assert [(each.iteration, each.unfinished) for each in ring.steps] == [(0, False), (1, False)]
    assert ring.finished_steps == 2
    size = ring.byte_count
    rings.take_step(session, step_state_to_wire(step(1, 0, 1), kinds, 0))
    assert (ring.byte_count, ring.finished_steps) == (size, 2)


def test_new_stream_brings_all_kinds_again(make_session, kinds):
    rings, session = make_rings(), make_session()
    rings.take_step(session, step_state_to_wire(step(0, 1), kinds[:2], 0))
    ring = rings.take_step(session, step_state_to_wire(step(1, 2), kinds, 0))
    assert ring.kinds == kinds


def test_oldest_steps_of_all_ranks_leave_when_memory_is_short(make_session, kinds):
    first, second = make_session(session_id="a"), make_session(session_id="b", rank=0)
    roomy = make_rings()
    roomy.take_step(first, step_state_to_wire(step(0, 0), kinds, 0))
    one = roomy.used_bytes
    rings = make_rings(room=3 * one)
    for iteration in range(2):
        for session in (first, second):
            rings.take_step(session, step_state_to_wire(step(iteration, 0), kinds, 0))
    assert rings.used_bytes <= 3 * one
    assert rings.dropped_steps == sum(ring.dropped_steps for ring in rings.list_rings()) > 0
    ring = rings.find("b")
    assert ring
    assert ring.steps[-1].iteration == 1
    assert make_rings(room=0).take_step(first, step_state_to_wire(step(0, 0), kinds, 0)).steps == []


def test_median_is_of_times_between_finished_steps(make_session, kinds):
    """By the clock of the rank, as short steps arrive together; one that goes back counts as 0."""
    rings, session = make_rings(), make_session()
    for iteration, ended_s in enumerate((10, 11, 13, 22, 21)):
        state = step(iteration, 0)._replace(ended_us=ended_s * 1_000_000)
        rings.take_step(session, step_state_to_wire(state, kinds, 0))
        rings.take_step(session, step_state_to_wire(step(iteration + 1, unfinished=True), (), 0))
    ring = rings.find(session.request.session_id)
    assert ring
    assert (ring.median_step_s, ring.interval_count) == (1.5, 4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": b"\0"}, "end within a row"),
        ({"rows": rows_of(3)}, "kind 3, there are 3"),
        ({"first_kind": 9}, "from number 9"),
        ({"new_kinds": [b"\xff"], "first_kind": 3}, "no valid kind"),
        ({"iteration": 1 << 63}, "is over"),
        ({"first_kind": 1 << 20}, "from number"),
        ({"stacks": ["a\0b"]}, "NUL"),
        ({"cause": agent_pb2.StepCause(digests={"a": "b" * 300})}, "300 characters"),
    ],
)
def test_hostile_step_is_rejected(make_session, kinds, fields, words):
    rings, session = make_rings(), make_session()
    ring = rings.take_step(session, step_state_to_wire(step(0, 0), kinds, 0))
    with pytest.raises(ProtocolError, match=words):
        rings.take_step(session, agent_pb2.StepState(**fields))
    assert (len(ring), ring.kinds) == (1, kinds)


def test_other_kind_with_a_known_number_is_rejected(make_session, kinds):
    rings, session = make_rings(), make_session()
    rings.take_step(session, step_state_to_wire(step(0, 0), kinds, 0))
    with pytest.raises(ProtocolError, match="another kind with the number 0"):
        rings.take_step(session, step_state_to_wire(step(1, 0), kinds[1:], 0))


def test_step_without_a_black_box_is_rejected(make_session):
    with pytest.raises(ProtocolError, match="has no black box"):
        make_rings().take_step(make_session(steps=0), agent_pb2.StepState())


def test_causes_and_stacks_count_as_memory(make_session):
    rings, session = make_rings(), make_session()
    bare = rings.take_step(session, step_state_to_wire(step(0), (), 0)).byte_count
    cause = StepCause({"loss": 1.0}, {"batch.0": "ab"})
    rings.take_step(session, step_state_to_wire(step(0, cause=cause, stacks=("x" * 50,)), (), 0))
    assert rings.used_bytes == bare + len("loss") + len("batch.0") + 2 + 50


def test_compared_step_is_the_one_with_most_zero_bits_since_the_last(make_session, kinds):
    rings, session = make_rings(), make_session(steps=64)

    def take(*iterations: int, **fields) -> None:
        for iteration in iterations:
            state = step(iteration, cause=StepCause({"loss": iteration / 8}), **fields)
            rings.take_step(session, step_state_to_wire(state, kinds, 0))

    take(*range(3, 14))
    [found] = rings.pop_compared_steps()
    assert (found.iteration, found.numbers) == (8, {"loss": 1.0})
    assert (found.job_id, found.rank) == (session.request.job_id, session.request.rank)
    assert rings.pop_compared_steps() == []
    take(14, 15, 17)
    assert [each.iteration for each in rings.pop_compared_steps()] == [14]
    take(18, unfinished=True)
    assert rings.pop_compared_steps() == []


def test_compared_step_needs_numbers_and_has_few(make_session, kinds):
    rings, session = make_rings(), make_session(steps=64)
    rings.take_step(session, step_state_to_wire(step(8), kinds, 0))
    assert rings.pop_compared_steps() == []
    numbers = {f"n{at:03d}": 1.0 for at in range(100)}
    rings.take_step(session, step_state_to_wire(step(9, cause=StepCause(numbers)), kinds, 0))
    [found] = rings.pop_compared_steps()
    assert list(found.numbers) == sorted(numbers)[:MAX_STEP_NUMBERS]


def take_tensor(
    rings: StepRings,
    session: RankSession,
    iteration: int,
    size: int = 1000,
    *,
    about_fault: bool = False,
) -> None:
    kind = TensorKind(0, "Linear", "a", TensorSide.OUTPUT, 0, "uint8", (size,), size)
    tensor = StepTensor(iteration, kind, bytes(size), about_fault=about_fault)
    for piece in step_tensor_to_wire(tensor):
        rings.take_tensors(session, agent_pb2.StepTensors(pieces=[piece]))


def count_tensors(ring: StepRing) -> dict[int, int]:
    return {iteration: len(tensors) for iteration, tensors in ring.list_tensors().items()}


def test_tensors_in_full_are_kept_with_their_step(make_session):
    rings, session = make_rings(), make_session(steps=2, tensor_bytes=1 << 20)
    ring = rings.take_step(session, step_state_to_wire(step(0, unfinished=True), (), 0))
    bare = ring.byte_count
    take_tensor(rings, session, 0, about_fault=True)
    assert ring.byte_count == bare + 5096
    # The finished step replaces the unfinished one.
    rings.take_step(session, step_state_to_wire(step(0), (), 0))
    take_tensor(rings, session, 0)
    assert count_tensors(ring) == {0: 2}
    for iteration in (1, 2):
        rings.take_step(session, step_state_to_wire(step(iteration), (), 0))
        take_tensor(rings, session, iteration)
    assert count_tensors(ring) == {1: 1, 2: 1}
    assert rings.dropped_tensors == 0
    take_tensor(rings, session, 0)  # its step has left
    assert (ring.dropped_tensors, rings.dropped_tensors) == (1, 1)
    assert ring.byte_count == rings.used_bytes == 2 * bare + 2 * 5096


def test_oldest_tensors_leave_and_those_about_a_fault_last(make_session):
    rings, session = make_rings(), make_session(steps=8, tensor_bytes=3 * 5096)
    ring = rings.take_step(session, step_state_to_wire(step(0), (), 0))
    take_tensor(rings, session, 0, about_fault=True)
    for iteration in range(1, 6):
        rings.take_step(session, step_state_to_wire(step(iteration), (), 0))
        take_tensor(rings, session, iteration)
    assert count_tensors(ring) == {0: 1, 4: 1, 5: 1}
    for _ in range(3):
        take_tensor(rings, session, 5, about_fault=True)
    assert count_tensors(ring) == {5: 3}
    assert (len(ring), ring.dropped_tensors) == (6, 0)


def test_tensors_leave_before_steps_when_memory_is_short(make_session):
    first = make_session(session_id="a", tensor_bytes=1 << 20)
    second = make_session(session_id="b", rank=0, tensor_bytes=1 << 20)
    bare = make_rings().take_step(first, step_state_to_wire(step(0), (), 0)).byte_count
    rings = make_rings(room=4 * bare + 2 * 5096)
    for session in (first, second):
        rings.take_step(session, step_state_to_wire(step(0), (), 0))
    take_tensor(rings, first, 0, about_fault=True)
    take_tensor(rings, second, 0)
    take_tensor(rings, first, 0)
    rings.take_step(second, step_state_to_wire(step(1), (), 0))
    rings.take_step(second, step_state_to_wire(step(2), (), 0))
    assert [count_tensors(ring) for ring in rings.list_rings()] == [{0: 2}, {}]
    take_tensor(rings, second, 2)
    # That of the fault stays, although it is the oldest.
    assert [count_tensors(ring) for ring in rings.list_rings()] == [{0: 1}, {2: 1}]
    assert [ring.dropped_tensors for ring in rings.list_rings()] == [1, 1]
    assert (rings.dropped_tensors, rings.dropped_steps, rings.step_count) == (2, 0, 4)


def test_tensor_without_room_is_given_up_before_steps(make_session):
    session = make_session(tensor_bytes=1 << 24)
    bare = make_rings().take_step(session, step_state_to_wire(step(0), (), 0)).byte_count
    rings = make_rings(room=2 * bare)
    ring = rings.take_step(session, step_state_to_wire(step(0), (), 0))
    take_tensor(rings, session, 0, 3 * PIECE_BYTES)
    assert (ring.byte_count, len(ring)) == (bare, 1)
    assert (ring.dropped_tensors, rings.dropped_tensors, rings.dropped_steps) == (1, 1, 0)


def test_pieces_count_as_memory_before_their_tensor_is_complete(make_session):
    rings, session = make_rings(), make_session(tensor_bytes=1 << 24)
    ring = rings.take_step(session, step_state_to_wire(step(0), (), 0))
    bare = ring.byte_count
    kind = TensorKind(0, "a", "a", TensorSide.OUTPUT, 0, "uint8", (1 << 23,), 1 << 23)
    first, *_ = step_tensor_to_wire(StepTensor(0, kind, bytes(1 << 23)))
    rings.take_tensors(session, agent_pb2.StepTensors(pieces=[first]))
    assert (ring.byte_count, count_tensors(ring)) == (bare + PIECE_BYTES, {})


@pytest.mark.parametrize("fields", [{"steps": 0}, {"tensor_bytes": 0}])
def test_tensor_that_the_plan_does_not_want_is_rejected(make_session, fields):
    rings, session = make_rings(), make_session(**fields)
    with pytest.raises(ProtocolError, match="the plan of its session has none"):
        take_tensor(rings, session, 0)


def test_tensors_that_came_after_a_freeze_took_their_step_are_counted(make_session):
    rings, session = make_rings(), make_session(tensor_bytes=1 << 20)
    ring = rings.take_step(session, step_state_to_wire(step(0), (), 0))
    take_tensor(rings, session, 0)
    taken = ring.steps
    take_tensor(rings, session, 0)
    assert ring.forget(taken, 1) == ring.dropped_tensors == 1
    assert (len(ring), count_tensors(ring)) == (0, {})


def test_tensor_that_does_not_come_to_its_end_is_counted(make_session):
    rings, session = make_rings(), make_session(tensor_bytes=1 << 24)
    ring = rings.take_step(session, step_state_to_wire(step(0), (), 0))
    kind = TensorKind(0, "a", "a", TensorSide.OUTPUT, 0, "uint8", (1 << 23,), 1 << 23)
    first, *_ = step_tensor_to_wire(StepTensor(0, kind, bytes(1 << 23)))
    for _ in range(2):
        rings.take_tensors(session, agent_pb2.StepTensors(pieces=[first]))
    assert (ring.dropped_tensors, rings.dropped_tensors) == (1, 1)
    ring.end_tensor()
    assert (ring.dropped_tensors, ring.tensors.byte_count) == (2, 0)
    ring.end_tensor()
    assert ring.dropped_tensors == 2

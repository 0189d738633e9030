"""Steps of the black box beside frames and doorbells of a stream."""

from __future__ import annotations

import threading

import pytest
from support.black_box_side import BlackBoxSide

from rankdump._core.black_box import FaultKind, FaultNotice, StepState, StepTensor
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import IterationEnd, SessionEnd
from rankdump._transport.push_stream import PushStream
from rankdump._transport.send_buffer import SendBuffer
from rankdump._transport.step_outbox import WAKE_PAUSE_S, StepOutbox
from rankdump._wire.black_box_messages import PIECE_BYTES
from rankdump._wire.session_messages import kind_from_wire

KIND = TensorKind(0, "Linear", "Default/fc", TensorSide.OUTPUT, 0, "float32", (2,), 8)


@pytest.fixture
def side() -> BlackBoxSide:
    made = BlackBoxSide()
    made.recorder.begin_step(0)
    made.recorder.add_pulse(made.recorder.number_kind(KIND), (2, 1, 1, 2, 2, 0, 0, 0, 2, 0, 0))
    made.recorder.end_step(ran=True)
    return made


def make_stream(side: BlackBoxSide) -> PushStream:
    buffer = SendBuffer(on_release=lambda item: None, on_copy_failed=lambda head: None)
    return PushStream(buffer, side.outbox, on_tick=lambda: None)


def test_step_goes_over_a_stream_without_frames(side: BlackBoxSide):
    outgoing = make_stream(side)
    requests = outgoing.requests(outgoing.begin_stream())
    [message] = next(requests).step_states.states
    assert [kind_from_wire(kind) for kind in message.new_kinds] == [KIND]
    outgoing.closing = True
    assert list(requests) == []


def test_closing_stream_sends_the_last_steps(side: BlackBoxSide):
    outgoing = make_stream(side)
    outgoing.closing = True
    requests = list(outgoing.requests(outgoing.begin_stream()))
    assert [request.WhichOneof("body") for request in requests] == ["step_states"]


def test_new_step_wakes_the_sender(side: BlackBoxSide):
    outgoing = make_stream(side)
    requests = outgoing.requests(outgoing.begin_stream())
    next(requests)
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.append(next(requests).step_states.states[0].iteration)
    )
    thread.start()
    side.recorder.begin_step(1)
    side.now_ns += round(WAKE_PAUSE_S * 1e9)
    side.recorder.end_step(ran=True)
    thread.join()
    assert found == [1]


def test_short_steps_wake_the_sender_together(side: BlackBoxSide):
    """A fault wakes it at once, and takes the steps before it along."""
    woken: list[int] = []
    side.outbox.on_news = lambda: woken.append(side.recorder._iteration)
    for iteration in range(1, 21):
        side.recorder.begin_step(iteration)
        side.now_ns += round(WAKE_PAUSE_S * 1e8)
        side.recorder.end_step(ran=True)
    assert woken == [10, 20]
    side.recorder.begin_step(21)
    side.recorder.report_fault(FaultKind.NON_FINITE, "loss is nan")
    assert woken == [10, 20, 21]
    side.take()
    assert [state.iteration for state in side.states] == [*range(21)]


def test_nothing_is_sent_to_an_agent_that_keeps_no_steps(side: BlackBoxSide):
    side.outbox.is_wanted = False
    outgoing = make_stream(side)
    outgoing.closing = True
    assert list(outgoing.requests(outgoing.begin_stream())) == []
    assert not side.outbox.has_waiting
    side.outbox.is_wanted = True
    assert side.outbox.has_waiting


def test_fault_goes_before_the_step_that_it_was_found_in(side: BlackBoxSide):
    side.take()
    side.recorder.begin_step(1)
    side.recorder.note({"loss": float("nan")})
    side.recorder.end_step(ran=True)
    side.recorder.begin_step(2)
    side.recorder.end_step(ran=True)
    fault, steps = side.outbox.take_requests(0)
    assert fault.fault.iteration == 1
    assert [state.iteration for state in steps.step_states.states] == [1, 2]


def test_too_many_faults_leave_the_steps(side: BlackBoxSide):
    for iteration in range(1, 100, 2):
        side.recorder.begin_step(iteration)
        side.recorder.note({"loss": float("nan")})
        side.recorder.end_step(ran=True)
    requests = list(side.outbox.take_requests(0))
    assert sum(request.HasField("fault") for request in requests) == 16
    assert sum(len(request.step_states.states) for request in requests) == 51


def make_tensor(size: int, iteration: int = 0, *, about_fault: bool = False) -> StepTensor:
    kind = TensorKind(0, "Linear", "a", TensorSide.OUTPUT, 0, "uint8", (size,), size)
    return StepTensor(iteration, kind, bytes(size), about_fault=about_fault)


def test_large_tensor_is_sent_in_pieces_and_holds_its_bytes_until_it_is_sent():
    size = 2 * PIECE_BYTES + 5
    outbox = StepOutbox(4, 1 << 24)
    outbox.is_wanted = True
    outbox.finish()
    outbox.add_tensor(make_tensor(size))
    requests = outbox.take_requests(0)
    messages = [next(requests).step_tensors.pieces for _ in range(2)]
    assert outbox.find_tensor_room(about_fault=False) == (1 << 24) - (4096 + size)
    assert outbox.find_tensor_room(about_fault=True) == 1 << 24
    messages.append(next(requests).step_tensors.pieces)
    assert [[(piece.begin, len(piece.data)) for piece in pieces] for pieces in messages] == [
        [(0, PIECE_BYTES)],
        [(PIECE_BYTES, PIECE_BYTES)],
        [(2 * PIECE_BYTES, 5)],
    ]
    assert next(requests, None) is None
    assert outbox.find_tensor_room(about_fault=False) == 1 << 24


def test_stream_that_ends_within_a_tensor_loses_it_and_frees_its_bytes():
    outbox = StepOutbox(4, 1 << 24)
    outbox.is_wanted = True
    outbox.add_tensor(make_tensor(PIECE_BYTES + 1, about_fault=True))
    assert next(outbox.take_requests(0)).step_tensors.pieces[0].begin == 0
    assert outbox.has_waiting
    assert next(outbox.take_requests(1), None) is None
    assert outbox.find_tensor_room(about_fault=True) == 1 << 24
    assert not outbox.has_waiting


def test_steps_and_faults_overtake_tensors_and_those_of_a_fault_overtake_others():
    outbox = StepOutbox(4, 1 << 24)
    outbox.is_wanted = True
    outbox.add_tensor(make_tensor(PIECE_BYTES + 1, 0))
    outbox.add_tensor(make_tensor(3, 1))
    requests = outbox.take_requests(0)
    assert len(next(requests).step_tensors.pieces[0].data) == PIECE_BYTES
    outbox.finish()
    outbox.add_fault(FaultNotice(FaultKind.NON_FINITE, 2, "NaN"))
    outbox.add_state(StepState(2, 0, 0, b""))
    outbox.add_tensor(make_tensor(4, 2, about_fault=True))
    fault, state, tensors = requests
    assert (fault.fault.iteration, state.step_states.states[0].iteration) == (2, 2)
    # Small ones share a message.
    assert [piece.iteration for piece in tensors.step_tensors.pieces] == [0, 2, 1]


def test_message_of_small_tensors_is_bounded():
    outbox = StepOutbox(4, 1 << 24)
    outbox.is_wanted = True
    outbox.finish()
    for _ in range(5):
        outbox.add_tensor(make_tensor(PIECE_BYTES // 2 - 1000))
    sizes = [request.ByteSize() for request in outbox.take_requests(0)]
    assert len(sizes) == 2
    assert max(sizes) < 2 * PIECE_BYTES


def test_frames_do_not_wait_for_tensors_that_are_about_no_fault():
    side = BlackBoxSide()
    outgoing = make_stream(side)
    for _ in range(2):
        side.outbox.add_tensor(make_tensor(2 * PIECE_BYTES))
    requests = outgoing.requests(outgoing.begin_stream())
    seen = [next(requests).WhichOneof("body")]
    outgoing._buffer.submit(IterationEnd(0, 0))
    seen += [next(requests).WhichOneof("body") for _ in range(3)]
    assert seen == ["step_tensors", "step_tensors", "batch", "step_tensors"]


def test_end_of_a_session_comes_after_all_tensors():
    """The agent freezes what it has when all ranks have ended."""
    side = BlackBoxSide()
    outgoing = make_stream(side)
    for _ in range(2):
        side.outbox.add_tensor(make_tensor(2 * PIECE_BYTES))
    side.recorder.close(raised=False)
    outgoing._buffer.submit(SessionEnd(0))
    requests = outgoing.requests(outgoing.begin_stream())
    seen = [next(requests).WhichOneof("body") for _ in range(5)]
    assert seen == [*["step_tensors"] * 4, "batch"]

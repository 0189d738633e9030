"""The sender of call stacks: order, frames, and losses."""

from __future__ import annotations

from support.send_buffers import SendBufferDouble

from rankdump._core.record import MAX_FRAME_ROWS
from rankdump._core.session_protocol import CallStacks
from rankdump._recorder.metadata_sender import MAX_STACK_CHARACTERS, CallStackSender
from rankdump._recorder.record_builder import CALL_BYTES, StagingBudget, StagingBuffer

STACKS = (("a", "b"), ("c",))


class StackSenderRig:
    """A list of frames, and room for so many calls."""

    def __init__(self, calls: int = 1 << 20) -> None:
        self.buffer = SendBufferDouble()
        self.stage = StagingBuffer(
            self.buffer,
            records=StagingBudget(0),
            rows=StagingBudget(calls * CALL_BYTES),
        )
        self.callers = CallStackSender(self.stage, self.buffer)

    @property
    def frames(self) -> list[CallStacks]:
        return [item for item in self.buffer.submitted if isinstance(item, CallStacks)]

    def calls(self) -> list[tuple[int, str, tuple[str, ...]]]:
        return [
            (frame.iteration, name, frame.texts[place])
            for frame in self.frames
            for name, place in zip(frame.calls, frame.stacks, strict=True)
        ]


def test_call_stacks_are_sent_once_in_their_iteration():
    """Frames hold calls of one iteration, up to a limit, and each stack once."""
    sent = StackSenderRig()
    expected = [(n // 1500, f"call {n}", STACKS[n % 2]) for n in range(4000)]
    for iteration, name, stack in expected:
        sent.callers.add(iteration, name, stack)
    sent.callers.flush()
    sent.callers.flush()
    assert sent.calls() == expected
    assert all(
        len(frame.calls) <= MAX_FRAME_ROWS and len(frame.texts) <= 2 for frame in sent.frames
    )
    assert sent.callers.lost_calls == 0


def test_long_call_stacks_are_sent_sooner():
    """A frame has to fit into a message."""
    sent = StackSenderRig()
    for number in range(4):
        sent.callers.add(0, f"call {number}", ("x" * MAX_STACK_CHARACTERS, str(number)))
    assert len(sent.frames) == 4


def test_call_stacks_without_space_are_counted_and_never_wait():
    """Space is released when a frame was acknowledged."""
    sent = StackSenderRig(calls=2)
    for name in ("a", "b", "c"):
        sent.callers.add(0, name, STACKS[0])
        sent.callers.flush()
    assert len(sent.frames) == 2
    assert sent.callers.lost_calls == 1
    for frame in sent.frames:
        sent.stage.release(frame)
    sent.callers.add(0, "d", STACKS[0])
    sent.callers.flush()
    assert [name for _, name, _ in sent.calls()] == ["a", "b", "d"]

"""Tests of PendingMetadata: order, suspension and rereading of metadata frames."""

from __future__ import annotations

from rankdump._core.session_protocol import CallStacks, IterationEnd, SessionEnd
from rankdumpd.agent.records import FrameId, MetadataFrame
from rankdumpd.agent.session.pending_metadata import PendingMetadata


def at(sequence: int, declaration=None) -> MetadataFrame:
    stacks = CallStacks(0, (), (), ())
    return MetadataFrame(FrameId("s", sequence), declaration or stacks, b"")


def taken(due: PendingMetadata, watermark: int = 99) -> list[int]:
    found: list[int] = []
    while (item := due.pop_next(watermark)) is not None:
        found.append(item.frame_id.sequence)
    return found


def test_pending_metadata_pops_in_order_up_to_watermark():
    due = PendingMetadata()
    due.add([at(4), at(1), at(2)])
    assert taken(due, 3) == [1, 2]
    assert due.is_complete


def test_suspended_metadata_yields_each_end_once():
    """Also after several failed retries; a session end does not delay acknowledgements."""
    due = PendingMetadata()
    due.add([at(1), at(2, IterationEnd(0, 0)), at(3), at(4, SessionEnd(1))])
    assert due.session_ends == [4]
    due.pop_next(99)
    failed = due.pop_next(99)
    due.suspend(failed)
    assert due.session_ends == []
    assert taken(due) == [2, 4]
    due.add([at(5), at(6, IterationEnd(1, 0))])
    assert taken(due) == [6]
    due.resume()
    due.add_from_ledger([at(1), at(2, IterationEnd(0, 0))], all_there=False)
    assert due.read_to == 2
    due.pop_next(99)
    due.suspend(due.pop_next(99))
    assert taken(due) == []
    assert not due.is_complete


def test_was_begun_covers_frames_popped_before_suspension():
    """Only frames that were begun before are treated as repeated."""
    due = PendingMetadata()
    due.add([at(1), at(2), at(3)])
    due.suspend(due.pop_next(99))
    due.resume()
    due.add([at(4)])
    due.add_from_ledger([at(1), at(2), at(3), at(4)], all_there=True)
    assert [due.was_begun(at(number)) for number in (1, 2)] == [True, False]
    assert taken(due) == [1, 2, 3, 4]
    assert due.is_complete
    assert due.read_to is None

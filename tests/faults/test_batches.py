"""Duplicate and reordered batches: no session ends, nothing is stored twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.agent_rig import EACH, AgentRig, wait_until
from faults.message_tamperer import MessageTamperer
from faults.values import FaultKind


@pytest.fixture
def tamperer(rig: AgentRig) -> Iterator[MessageTamperer]:
    made = MessageTamperer(f"unix:{rig.folder}/m.sock", rig.agent.address)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [FaultKind.DOUBLED, FaultKind.SWAPPED])
def test_duplicate_and_swapped_batches_store_each_tensor_once(
    rig: AgentRig, tamperer: MessageTamperer, kind: FaultKind
):
    address = f"unix:{rig.folder}/m.sock"
    with rig.session(address=address, shared_memory=False) as session:
        for iteration in range(1, 4):
            tamperer.want(kind)
            rig.play(session, iteration)
            session.step(iteration + 1)
            wait_until(lambda: tamperer.done[kind])
            rig.settled(iteration)
    assert [each.kept_tensors for each in rig.settled(3)[:3]] == [EACH] * 3
    assert rig.stored() == 3 * EACH


def test_flipped_byte_on_the_stream_is_found_before_writing(
    rig: AgentRig, tamperer: MessageTamperer
):
    """Law: the tensor is counted as `corrupted`, or was sent again; no other is touched."""
    address = f"unix:{rig.folder}/m.sock"
    with rig.session(address=address, shared_memory=False) as session:
        tamperer.want(FaultKind.FLIPPED_CHUNK)
        rig.play(session, 1)
        session.step(2)
        rig.settled(1)
        assert tamperer.done[FaultKind.FLIPPED_CHUNK] == 1
        rig.play(session, 2)
    first, second = rig.settled(2)
    assert set(first.dropped) <= {"corrupted"}
    assert first.kept_tensors >= EACH - 1
    assert second.kept_tensors == EACH
    assert rig.stored() == first.kept_tensors + EACH

"""Batches that come twice, or out of order: no session ends by it, and nothing is doubled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.meddler import Meddler
from faults.stand import EACH, Stand, wait_until
from faults.values import Kind


@pytest.fixture
def meddler(stand: Stand) -> Iterator[Meddler]:
    made = Meddler(f"unix:{stand.folder}/m.sock", stand.agent.address)
    yield made
    made.close()


@pytest.mark.parametrize("kind", [Kind.DOUBLED, Kind.SWAPPED])
def test_duplicate_and_swapped_batches_store_each_tensor_once(
    stand: Stand, meddler: Meddler, kind: Kind
):
    address = f"unix:{stand.folder}/m.sock"
    with stand.session(address=address, shared_memory=False) as session:
        for iteration in range(1, 4):
            meddler.want(kind)
            stand.play(session, iteration)
            session.step(iteration + 1)
            wait_until(lambda: meddler.done[kind])
            stand.settled(iteration)
    assert [each.kept_tensors for each in stand.settled(3)[:3]] == [EACH] * 3
    assert stand.stored() == 3 * EACH


def test_flipped_byte_on_the_stream_is_found_before_writing(stand: Stand, meddler: Meddler):
    """Law: the tensor is counted as `corrupted`, or was sent again; no other is touched."""
    address = f"unix:{stand.folder}/m.sock"
    with stand.session(address=address, shared_memory=False) as session:
        meddler.want(Kind.FLIPPED_CHUNK)
        stand.play(session, 1)
        session.step(2)
        stand.settled(1)
        assert meddler.done[Kind.FLIPPED_CHUNK] == 1
        stand.play(session, 2)
    first, second = stand.settled(2)
    assert set(first.dropped) <= {"corrupted"}
    assert first.kept_tensors >= EACH - 1
    assert second.kept_tensors == EACH
    assert stand.stored() == first.kept_tensors + EACH

"""Events in columns: they are gathered and read back without loss."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.event_lists import list_events

from rankdump._core.events import (
    EVENT_COLUMN_TYPES,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1)
words = st.sampled_from(["", "Default/a-op0", "conv1.weight", "\u4e2d", "hccl_world_group"])
events = st.builds(
    RankEvent,
    graph=uint32,
    iteration=uint64,
    position=uint64,
    end_position=uint64,
    name=words,
    kind=st.sampled_from(EventKind),
    start_us=times,
    end_us=times,
    stream=uint32,
    group=words,
    sequence=uint64,
    element_count=uint64,
    dtype=words,
    peer=st.integers(-1, 2**31 - 1),
)


@given(batch=st.lists(events, max_size=20))
def test_event_columns_round_trip(batch: list[RankEvent]):
    """The events come back in order, equal to the last field."""
    groups = (ProcessGroup("world", (0, 1)),)
    columns = EventColumns.from_events(batch, groups)
    assert len(columns) == len(batch)
    assert list_events(columns) == batch
    assert columns.groups == groups


@given(batch=st.lists(events, max_size=20))
def test_event_columns_have_their_types_and_unique_texts(batch: list[RankEvent]):
    """All columns are there, of one length and of their own type; texts appear once."""
    columns = EventColumns.from_events(batch)
    assert list(columns.columns) == list(EVENT_COLUMN_TYPES)
    for field, code in EVENT_COLUMN_TYPES.items():
        assert columns.columns[field].dtype == code
        assert len(columns.columns[field]) == len(batch)
    assert columns.names[0] == ""
    assert len(set(columns.names)) == len(columns.names)


def test_event_columns_reject_numbers_out_of_range():
    """A number that its column cannot hold is an error, never another number."""
    good = RankEvent(0, 0, 0, 0, "a", EventKind.OPERATOR, 0, 0)
    for field, value in (("graph", -1), ("graph", 2**32), ("position", 2**64), ("peer", 2**31)):
        fields: dict[str, Any] = {name: getattr(good, name) for name in RankEvent.__slots__} | {
            field: value
        }
        with pytest.raises(OverflowError):
            EventColumns.from_events([RankEvent(**fields)])


def test_event_kind_tells_collectives_from_messages():
    """Every member takes part in all of them but operators and messages."""
    single = {EventKind.OPERATOR, EventKind.SEND, EventKind.RECV}
    assert {kind for kind in EventKind if not kind.is_collective} == single

"""Values that messages carry, and their round trip over the wire format."""

from __future__ import annotations

from hypothesis import strategies as st
from support.event_lists import list_events

from rankdump._core.drop_reasons import DROP_REASONS
from rankdump._core.events import EventColumns, EventKind, RankEvent

uint32 = st.integers(0, 2**32 - 1)
uint63 = st.integers(0, 2**63 - 1)
uint64 = st.integers(0, 2**64 - 1)
sint64 = st.integers(-(2**63), 2**63 - 1)
blobs = st.binary(max_size=20)
# protobuf strings are UTF-8: unpaired surrogates cannot travel in them; a NUL is refused.
letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(letters, max_size=20)
names = st.text(letters, min_size=1, max_size=20)
# What `str.isprintable` allows; to filter letters by it leaves too few of them.
lines = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=20)
counts = st.dictionaries(texts, uint64, max_size=3)
losses = st.dictionaries(st.sampled_from(sorted(DROP_REASONS)), st.integers(0, 1 << 61), max_size=3)


def sent(message, kind):
    """Return the message as the other side parses it."""
    return kind.FromString(message.SerializeToString())


def same_columns(left: EventColumns, right: EventColumns) -> bool:
    """Compare two batches by what they say."""
    return (left.names, left.groups, list_events(left)) == (
        right.names,
        right.groups,
        list_events(right),
    )


ONE = EventColumns.from_events([RankEvent(0, 0, 0, 0, "a", EventKind.OPERATOR, 0, 0)])
"""The smallest batch."""

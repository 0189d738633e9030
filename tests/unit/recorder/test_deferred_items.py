"""Items of operators that wait for the end of their call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._recorder.triggers import DeferredItems

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "keep", "settle", "clear"]),
        st.sampled_from([(0, "a"), (0, "b"), (1, "a")]),
    ),
    max_size=40,
)


@given(steps=STEPS, limit=st.integers(0, 3))
def test_deferred_items_are_returned_exactly_once(steps, limit):
    """Law: held items are returned once, in order, by `keep_operator` or at the end."""
    held: DeferredItems[int] = DeferredItems(limit)
    back: list[int] = []
    for number, (what, name) in enumerate(steps):
        if what == "hold":
            back += held.add_item(name, number)
        elif what == "clear":
            back += held.end_all_operators()
        else:
            back += held.keep_operator(name) if what == "keep" else held.end_operator(name)
    back += held.end_all_operators()
    assert sorted(back) == [n for n, (what, _) in enumerate(steps) if what == "hold"]


A, B, C = ((0, name) for name in "abc")


def test_kept_operator_ends_with_its_call():
    held: DeferredItems[str] = DeferredItems()
    held.add_item(A, "input")
    assert not held.is_kept(A)
    assert held.keep_operator(A) == ["input"]
    assert held.is_kept(A)
    assert held.end_operator(A) == []
    assert not held.is_kept(A)


@pytest.mark.parametrize(("limit", "kept"), [(0, ["a", "b", "c"]), (1, ["a"]), (2, ["a", "b"])])
def test_limit_counts_kept_operators(limit, kept):
    """Law: an operator kept twice counts once; operators beyond the limit are not kept."""
    held: DeferredItems[str] = DeferredItems(limit)
    for call in (A, B, C):
        held.add_item(call, call[1])
        held.keep_operator(call)
        held.keep_operator(call)
    assert [name for graph, name in (A, B, C) if held.is_kept((graph, name))] == kept
    assert held.full is (0 < limit <= len(kept))
    assert held.end_all_operators() == [name for name in "abc" if name not in kept]


def test_operators_that_never_end_are_released_beyond_the_limit(monkeypatch):
    monkeypatch.setattr("rankdump._recorder.triggers._MAX_OPEN_OPERATORS", 2)
    held: DeferredItems[str] = DeferredItems()
    found = [held.add_item((0, name), name) for name in "abcd"]
    assert found == [[], [], ["a"], ["b"]]

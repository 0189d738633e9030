"""Ranges of operators (`opname_range`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.plan import OperatorSelection, TensorSelection
from rankdump._recorder.record_filter import OperatorRanges


def a_range(*bounds: tuple[str, str], **models: tuple[str, str]) -> TensorSelection:
    lists = {name: OperatorSelection(False, ranges=(pair,)) for name, pair in models.items()}
    return TensorSelection(
        operators=OperatorSelection(False, ranges=bounds), models=tuple(lists.items())
    )


def run(ranges: OperatorRanges, program: str, graph: int = 0) -> str:
    for name in program:
        ranges.enter_operator(graph, name)
    return "".join(sorted({name for name in program if ranges.is_in_range(graph, name)}))


@pytest.mark.parametrize(
    ("bounds", "program", "inside", "words"),
    [
        ([("b", "d")], "abcde", "bcd", ""),
        ([("b", "b")], "abc", "b", ""),
        ([("a", "z")], "abc", "abc", ""),
        ([("z", "c")], "ab", "", ""),
        ([("b", "d"), ("d", "e")], "abcdef", "bcde", ""),
        ([("a", "a"), ("c", "c")], "abcd", "ac", ""),
        # The last one before the first one: there is no such range, not even later.
        ([("c", "b")], "abcdb", "", "ran before the first"),
        # Another stretch begins.
        ([("b", "c")], "abcdbe", "bc", "the first operator ran again"),
        ([("b", "b")], "abcb", "b", "the first operator ran again"),
        # Within, neither bound means anything else.
        ([("b", "d")], "abbcd", "bcd", ""),
        ([("b", "d")], "abdcd", "bd", ""),
    ],
)
def test_ranges_contain_operators_between_their_bounds(bounds, program, inside, words):
    """Law: a range goes from the first call of its first operator to the next of its last, once."""
    said: list[str] = []
    ranges = OperatorRanges(a_range(*bounds), lambda graph: "Net", said.append)
    for _ in range(2):
        ranges.restart()
        assert run(ranges, program) == inside
    assert len(set(said)) == bool(words)
    assert all(words in sentence for sentence in said)


def test_ranges_of_models_are_independent():
    """Law: neither the ranges of another model count nor its operators."""
    selection = a_range(("a", "b"), B=("b", "c"))
    ranges = OperatorRanges(selection, {0: "A", 1: "B"}.__getitem__, pytest.fail)
    ranges.enter_operator(0, "a")
    ranges.enter_operator(1, "b")
    assert run(ranges, "xb", graph=0) == "bx"
    assert run(ranges, "ayc", graph=1) == "acy"


def test_gradients_and_recomputations_are_in_the_range_of_their_operator():
    """Law: a gradient arrives long after the range was passed, and belongs to its forward."""
    ranges = OperatorRanges(a_range(("b", "b")), lambda graph: "Net", pytest.fail)
    assert run(ranges, "abc") == "b"
    assert ranges.is_in_range(0, "Gradients/b")
    assert ranges.is_in_range(0, "Recompute/b")
    assert not ranges.is_in_range(0, "Gradients/a")


def test_range_bounds_match_any_spelling():
    scope = "Default/network-Net/{0}-Relu/Relu-op0"
    first, last = scope.format("act1"), scope.format("act2")
    ranges = OperatorRanges(
        a_range(("act1", last.replace("/", "_"))), lambda graph: "Net", pytest.fail
    )
    names = [scope.format(name) for name in ("act0", "act1", "x", "act2", "act3")]
    for name in names:
        ranges.enter_operator(0, name)
    assert [name for name in names if ranges.is_in_range(0, name)] == [first, names[2], last]


def test_operators_in_ranges_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("rankdump._recorder.record_filter._MAX_REMEMBERED_OPERATORS", 10)
    said: list[str] = []
    ranges = OperatorRanges(a_range(("n0", "z")), lambda graph: "Net", said.append)
    for number in range(50):
        ranges.enter_operator(0, f"n{number}")
    assert [ranges.is_in_range(0, f"n{number}") for number in range(12)] == [True] * 10 + [
        False
    ] * 2
    assert len(set(said)) == 1


@given(program=st.text("abcd", max_size=12), bounds=st.tuples(*[st.sampled_from("abcd")] * 2))
def test_ranges_agree_with_a_search_in_the_whole_program(program, bounds):
    """Law: the result equals cutting the program at the first calls of the bounds."""
    first, last = bounds
    start = program.find(first)
    early = 0 <= program.find(last) < start or (start < 0 and last in program)
    end = program.find(last, start)
    stretch = "" if early or start < 0 else program[start : end + 1 if end >= 0 else None]
    ranges = OperatorRanges(a_range(bounds), lambda graph: "Net", lambda sentence: None)
    assert run(ranges, program) == "".join(sorted(set(stretch)))

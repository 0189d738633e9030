"""Findings from run cards: causes first, parameters merged over ranks, a line for absent cards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._analysis.compare.card_findings import (
    CardFinding,
    compare_cards,
    compare_ranks,
    merge_parameters,
)
from rankdump._analysis.reader.run_cards import FoundCards, RankCard
from rankdump._core.run_card import ModelSummary, ParameterDigest, RunCard, format_parameter


def digest(number: int, part: str = "", dtype: str = "float32") -> str:
    return format_parameter(ParameterDigest(dtype, number, part))


def found(cards: Iterable[RankCard], *problems: str) -> FoundCards:
    return FoundCards(tuple(cards), problems, 0)


def steps(count: int = 3, rank: int = 0, **more: object) -> list[RankCard]:
    """Cards of some iterations of a rank; a value by iteration is given as a list."""
    cards: list[RankCard] = []
    for iteration in range(count):
        values = {
            name: value[iteration] if isinstance(value, list) else value
            for name, value in more.items()
        }
        cards.append(RankCard(rank, iteration, 0, RunCard(**values)))  # type: ignore[arg-type]
    return cards


def compare(a: list[RankCard], b: list[RankCard]) -> list[str]:
    return [each.text for each in find(a, b)]


def find(a: list[RankCard], b: list[RankCard]) -> tuple[CardFinding, ...]:
    places = sorted({(each.rank, each.iteration) for each in a})
    return compare_cards(found(a), found(b), [(place, place) for place in places])


def test_equal_cards_have_no_findings():
    card: dict[str, Any] = {
        "digests": {"batch.0": "0f"},
        "parameters": {"w": digest(1)},
        "revision": "ab",
    }
    assert find(steps(**card), steps(**card)) == ()


def test_causes_come_in_the_order_of_a_step():
    own: dict[str, Any] = {
        "digests": [{"batch.0": "0f", "random.cpu": "aa"}, {"batch.0": "1f"}, {"batch.0": "2f"}],
        "parameters": [{"a": digest(1), "b": digest(2)}, {}, {}],
        "numbers": {"learning_rate.0": "0.1", "loss": "3.0"},
        "versions": {"torch": "2.12", "numpy": "2.4"},
        "settings": {"torch.num_threads": "2"},
        "environment": {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"},
        "revision": "a" * 40,
        "command": ("python", "train.py", "--lr=0.1"),
        "models": (ModelSummary("Net", 2, 9, "00", {"float32": 2}),),
    }
    other: dict[str, Any] = {
        "digests": [{"batch.0": "ff", "random.cpu": "bb"}, {"batch.0": "fe"}, {"batch.0": "fd"}],
        "parameters": [{"a": digest(1), "b": digest(3)}, {}, {}],
        "numbers": [
            {"learning_rate.0": "0.1"},
            {"learning_rate.0": "0.2"},
            {"learning_rate.0": "0.3", "loss": "4.0"},
        ],
        "versions": {"torch": "2.13", "numpy": "2.4", "cuda": "12.4"},
        "settings": {"torch.num_threads": "4"},
        "environment": {"CUDA_VISIBLE_DEVICES": "1"},
        "revision": "b" * 40,
        "command": ("python", "train.py", "--lr=0.2"),
        "models": (ModelSummary("Net", 1, 4, "01", {"float32": 1}),),
    }
    assert compare(steps(**own), steps(**other)) == [
        "the batches differ from iteration 0 on: batch.0 (rank 0)",
        "the weights differ before iteration 0: 1 of 2 parameters (b)",
        "the states of random generators differ from iteration 0 on: random.cpu (rank 0)",
        "the learning rates differ from iteration 1 on: group 0 0.1 against 0.2 (rank 0)",
        "model 0 Net with 2 parameters, 9 elements, 2 float32, names and shapes 00 against "
        "Net with 1 parameter, 4 elements, 1 float32, names and shapes 01",
        "cuda none against 12.4",
        "torch 2.12 against 2.13",
        "torch.num_threads 2 against 4",
        "OMP_NUM_THREADS 2 against none",
        "git revision aaaaaaaaaaaa against bbbbbbbbbbbb",
        "the command lines differ: only in a --lr=0.1; only in b --lr=0.2",
    ]


def test_learning_rates_are_named_by_optimizer_and_group():
    """The names of the first optimizer have no number of theirs."""
    own = steps(numbers={"learning_rate.1": "0.1", "learning_rate.1.0": "0.1"})
    other = steps(numbers={"learning_rate.1": "0.2", "learning_rate.1.0": "0.3"})
    assert [text.partition(": ")[2] for text in compare(own, other)] == [
        "group 1 0.1 against 0.2 (rank 0)",
        "group 0 of optimizer 1 0.1 against 0.3 (rank 0)",
    ]


def test_differences_that_end_name_their_iterations():
    own = steps(4, digests=[{"batch.0": each} for each in "abcd"])
    other = steps(4, digests=[{"batch.0": each} for each in "axxd"])
    (finding,) = find(own, other)
    assert finding.text == "the batches differ in iteration 1-2: batch.0 (rank 0)"
    assert (finding.subject, finding.names, finding.ranks) == ("batch", ("batch.0",), (0,))
    assert finding.iteration == 1


def test_ranks_that_differ_alone_are_named():
    own = [*steps(), *steps(rank=1)]
    other = [*steps(), *steps(rank=1, versions={"torch": "2"}, digests={"batch.0": "00"})]
    assert compare(own, other) == ["torch none against 2 (rank 1)"]


def test_only_generators_that_are_used_are_compared():
    """Those of Python and numpy have another state in each process, unless they are seeded."""
    unused = steps(digests={"random.python": "aa", "random.numpy": "bb", "random.cpu": "cc"})
    other = steps(digests={"random.python": "00", "random.numpy": "01", "random.cpu": "cc"})
    assert compare(unused, other) == []
    # In the last iteration no model was called.
    last = [{"random.python": "00"}, {"random.python": "00"}, {}]
    assert compare(unused, steps(digests=last)) == []
    used = steps(digests=[{"random.python": each} for each in ("00", "01", "02")])
    assert compare(unused, used) == [
        "the states of random generators differ from iteration 0 on: random.python (rank 0)"
    ]


def test_batches_of_other_numbers_of_ranks_are_not_compared():
    own = [*steps(digests={"batch.0": "0f"}), *steps(rank=1, digests={"batch.0": "1f"})]
    other = steps(digests={"batch.0": "ff"})
    (finding,) = find(own, other)
    assert finding.text == "batches were not compared: a has 2 ranks, b has 1"
    assert not finding.is_difference


def test_sharded_parameters_compare_with_the_whole():
    """Parts add up modulo 2**64; copies of a part count once."""
    parts = {0: digest(2**64 - 1, "0:1/2,0:3/3"), 1: digest(5, "1:2/2,0:3/3")}
    own = [
        *steps(1, parameters={"w": parts[0], "v": digest(7)}),
        *steps(1, rank=1, parameters={"w": parts[1], "v": digest(7)}),
        *steps(1, rank=2, parameters={"w": parts[1], "v": digest(7)}),
    ]
    assert compare(own, steps(1, parameters={"w": digest(4), "v": digest(7)})) == []
    assert compare(own, steps(1, parameters={"w": digest(3), "v": digest(8)})) == [
        "the weights differ before iteration 0: 2 of 2 parameters (w, v)"
    ]


@given(
    digests=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    copies=st.lists(st.integers(0, 4), max_size=5),
)
def test_parts_in_any_order_merge_to_their_sum(digests: list[int], copies: list[int]):
    size = len(digests)
    texts = [digest(each, f"{n}:{n + 1}/{size}") for n, each in enumerate(digests)]
    held = [*texts, *(texts[n % size] for n in copies)]
    cards = [RankCard(r, 0, 0, RunCard(parameters={"w": text})) for r, text in enumerate(held)]
    merged = merge_parameters(cards)
    assert merged.whole == {"w": ParameterDigest("float32", sum(digests) % 2**64)}
    assert not merged.unequal


@pytest.mark.parametrize(
    "texts",
    [
        [digest(1, "0:1/2")],
        [digest(1, "0:1/2"), digest(1, "0:2/2")],
        [digest(1, "0:1/2"), digest(1)],
        [digest(1, "0:1/2"), digest(1, "1:2/3")],
        [digest(1), digest(1, dtype="bfloat16")],
        [digest(1, "hunter2")],
        [digest(1, "0:9999999999/2,::")],
    ],
)
def test_parts_that_do_not_cover_a_parameter_are_not_compared(texts: list[str]):
    own = [RankCard(r, 0, 0, RunCard(parameters={"w": text})) for r, text in enumerate(texts)]
    whole = [RankCard(r, 0, 0, RunCard(parameters={"w": digest(9)})) for r in range(len(texts))]
    remarks = [each for each in find(own, whole) if not each.is_difference]
    assert [each.text for each in remarks] == [
        "1 parameter not compared: the cards do not have all parts of them"
    ]


def test_types_of_parameters_are_no_difference_of_values():
    own = steps(1, parameters={"w": digest(1), "v": digest(1)})
    other = steps(1, parameters={"w": digest(2, dtype="bfloat16"), "v": digest(1)})
    assert compare(own, other) == [
        "the types of the weights differ before iteration 0: 1 of 2 parameters "
        "(float32 against bfloat16, w)"
    ]


def test_first_iteration_with_other_weights_counts():
    own = steps(parameters=[{"w": digest(1)}, {"v": digest(2)}, {"v": digest(3)}])
    other = steps(parameters=[{"w": digest(1)}, {"v": digest(9)}, {"v": digest(9)}])
    assert compare(own, other) == ["the weights differ before iteration 1: 1 of 1 parameter (v)"]


def test_absent_cards_are_one_remark():
    have, none = found(steps()), found([])
    for a, b, text in (
        (none, none, "run cards were not compared: neither dump has any"),
        (have, none, "run cards were not compared: b has none"),
        (none, have, "run cards were not compared: a has none"),
    ):
        (finding,) = compare_cards(a, b, [((0, 0), (0, 0))])
        assert (finding.text, finding.is_difference) == (text, False)
    (finding,) = compare_cards(have, have, [((0, 7), (0, 7))])
    assert not finding.is_difference


def test_damaged_cards_are_remarks_of_their_side():
    broken = found([], "rank 0, iteration 0: run card cannot be read: it is [], not an object")
    texts = [each.text for each in compare_cards(found(steps()), broken, [])]
    assert texts[0].startswith("in b, rank 0, iteration 0: run card cannot be read")
    assert len(texts) == 2


# -- ranks of one dump


def test_ranks_that_agree_have_no_findings():
    card: dict[str, Any] = {
        "parameters": {"w": digest(1)},
        "numbers": {"learning_rate.0": "0.1"},
        "environment": {"CUDA_VISIBLE_DEVICES": "0"},
    }
    second: dict[str, Any] = {**card, "environment": {"CUDA_VISIBLE_DEVICES": "1"}}
    both = [*steps(digests={"batch.0": "a"}, **card), *steps(rank=1, **second)]
    assert compare_ranks(found(both)) == ()


def test_ranks_that_differ_are_named():
    first: dict[str, Any] = {
        "parameters": {"w": digest(1), "v": digest(1)},
        "numbers": {"learning_rate.0": "0.1"},
        "settings": {"torch.initial_seed": "3"},
        "digests": {"batch.0": "0f"},
    }
    second: dict[str, Any] = {
        **first,
        "parameters": {"w": digest(2), "v": digest(1)},
        "numbers": [{"learning_rate.0": "0.1"}, {"learning_rate.0": "0.2"}],
        "settings": {"torch.initial_seed": "4"},
    }
    findings = compare_ranks(found([*steps(2, **first), *steps(2, rank=1, **second)]))
    assert [(each.text, each.is_difference) for each in findings] == [
        ("the weights differ between ranks before iteration 0: 1 of 2 parameters (w; rank 0-1)", 1),
        (
            "the learning rates differ between ranks in iteration 1: 0.1 on rank 0, 0.2 on rank 1",
            True,
        ),
        ("torch.initial_seed differs between ranks: 3 on rank 0, 4 on rank 1", True),
        (
            "rank 0-1 have the same batch in iteration 0-1: right for tensor or pipeline "
            "parallelism, wrong for data parallelism",
            False,
        ),
    ]


def test_tree_without_cards_is_one_remark():
    (finding,) = compare_ranks(found([]))
    assert finding.text.startswith("the tree has no run cards: ")
    assert not finding.is_difference

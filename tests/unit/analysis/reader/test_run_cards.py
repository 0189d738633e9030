"""Run cards are read from manifests; those that are damaged are named, and the others read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

import rankdump
from rankdump._analysis.reader.run_cards import read_run_cards
from rankdump._core.run_card import RunCard

NAME = "Default/network-Net/fc-Linear/Linear-op0"


def add(tree: TreeBuilder, rank: int, iteration: int, card: object, session: str = "") -> None:
    tree.tensor(rank, iteration, NAME, np.ones(2, np.float32))
    tree.complete(rank, iteration, card=card, session=session)


@pytest.fixture
def tree(tmp_path) -> TreeBuilder:
    return TreeBuilder(tmp_path / "tree")


def test_cards_are_read_by_rank_and_iteration(tree):
    """Also a card that is longer than what is read of a manifest at first."""
    add(tree, 1, 0, {"version": 1, "revision": "ab"})
    add(tree, 0, 0, {"version": 1, "command": ["é" * 100] * 100})
    add(tree, 0, 1, {"version": 1})
    dump = rankdump.open(tree.root)
    found = [(each.rank, each.iteration, each.card) for each in dump.cards]
    long = RunCard(command=("é" * 100,) * 100)
    assert found == [(0, 0, long), (0, 1, RunCard()), (1, 0, RunCard(revision="ab"))]
    assert dump.card_problems == ()
    assert [each.iteration for each in dump.where(rank=0, iteration="1-4").cards] == [1]
    assert len(dump.where(rank=0).find_cards_of({0, 1}).cards) == 3


def test_manifests_of_other_ranks_and_iterations_are_not_opened(tree):
    """A comparison of one iteration does not read the manifests of all others."""
    for rank, iteration in ((0, 0), (0, 1), (1, 0)):
        add(tree, rank, iteration, {"version": 1})
    for path in tree.root.glob("rank_*/.dump_metadata/manifest/*.json"):
        if path.parts[-4] != "rank_0" or not path.name.startswith("iteration_1."):
            path.unlink()
            path.mkdir()
    found = read_run_cards(tree.root, lambda rank, iteration: (rank, iteration) == (0, 1))
    assert [(each.rank, each.iteration) for each in found.cards] == [(0, 1)]
    assert found.problems == ()


def test_tree_without_cards_has_none(tree):
    add(tree, 0, 0, None)
    dump = rankdump.open(tree.root)
    assert (dump.cards, dump.card_problems, dump.found_cards.without) == ((), (), 1)


@pytest.mark.parametrize("card", [[], "text", 7, {"version": 9}, {"version": 1, "models": 3}])
def test_damaged_card_is_one_sentence(tree, card):
    add(tree, 0, 0, card)
    add(tree, 1, 0, {"version": 1})
    dump = rankdump.open(tree.root)
    assert [each.rank for each in dump.cards] == [1]
    (problem,) = dump.card_problems
    assert problem.startswith("rank 0, iteration 0: run card cannot be read: ")
    assert "\n" not in problem
    assert dump.load(dump.tensors(rank=0)[0]).tolist() == [1, 1]


def test_many_damaged_cards_are_counted(tree):
    for iteration in range(9):
        add(tree, 0, iteration, [])
    found = read_run_cards(tree.root)
    assert len(found.problems) == 4
    assert found.problems[-1] == "... and 6 more run cards that cannot be read"


def test_manifest_whose_end_is_garbage_has_no_card(tree):
    """Whatever the bytes are, nothing raises."""
    add(tree, 0, 0, {"version": 1})
    (path,) = tree.root.glob("rank_0/.dump_metadata/manifest/*.json")
    whole = path.read_bytes()
    for damaged in (
        whole[:-40] + b"\x00" * 40,
        whole.replace(b'"version": 1}, "crc32', b'"version": }, "crc32'),
        whole.replace(b'"card": {', b'"card": ' + b"[" * 90_000),
    ):
        path.write_bytes(damaged)
        found = read_run_cards(tree.root)
        assert found.cards == ()
        assert found.without + len(found.problems) == 1
        assert all("\n" not in each and len(each) < 300 for each in found.problems)


def test_of_several_attempts_the_last_card_counts(tree):
    add(tree, 0, 0, {"version": 1, "revision": "old"}, session="first")
    manifest = tree.complete(0, 0, card={"version": 1, "revision": "new"}, session="second")
    body = json.loads(manifest.to_json())
    body["status"]["attempt"] = 1
    del body["crc32"]
    (path,) = tree.root.glob("rank_0/.dump_metadata/manifest/*second.json")
    records = body.pop("records"), body.pop("card")
    text = json.dumps(body)[:-1] + ', "records": [\n' + json.dumps(records[0])[1:-1]
    path.write_text(f'{text}\n], "card": {json.dumps(records[1])}, "crc32": 0}}')
    assert [each.card.revision for each in read_run_cards(tree.root).cards] == ["new"]
    assert [c.card.revision for c in read_run_cards(tree.root, attempt=0).cards] == ["old"]

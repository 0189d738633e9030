"""`rankdump card`, and how `rankdump diff` leads with run cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._cli.command_group import run_command_line
from rankdump._core.run_card import (
    ModelSummary,
    ParameterDigest,
    RunCard,
    format_card,
    format_parameter,
)

NAME = "Default/network-Net/fc-Linear/Linear-op0"
CARD = RunCard(
    command=("python", "train.py"),
    versions={"python": "3.11", "torch": "2.12"},
    revision="ab" * 20,
    settings={"torch.initial_seed": "3"},
    models=(ModelSummary("Net", 1, 6, "0f", {"float32": 1}),),
    numbers={"learning_rate.0": "0.1", "loss": "2.5"},
    digests={"batch.0": "aa", "random.cpu": "bb"},
    parameters={"fc.weight": format_parameter(ParameterDigest("float32", 1))},
)


def make_tree(folder: Path, *cards: RunCard | object, ranks: int = 2) -> Path:
    """A tree with the same tensors whatever the cards are, one for each iteration."""
    tree = TreeBuilder(folder)
    for rank in range(ranks):
        for iteration, card in enumerate(cards):
            tree.tensor(rank, iteration, NAME, np.ones((2, 3), np.float32))
            body = json.loads(format_card(card)) if isinstance(card, RunCard) else card
            tree.complete(rank, iteration, card=body)
    return tree.root


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_command_line([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_card_shows_facts_once_and_a_row_for_each_iteration(tmp_path, capsys):
    code, out, _ = told(capsys, "card", make_tree(tmp_path / "a", CARD, replace(CARD, numbers={})))
    assert code == 0
    assert out.startswith("2 ranks agree\nrank 0-1 have the same batch in iteration 0-1: right")
    assert out.count("rank 0-1: python train.py\n") == 1
    assert f"  git revision: {'ab' * 20}\n" in out
    assert "  versions: python 3.11, torch 2.12\n" in out
    assert "  model Net: 1 parameter, 6 elements; 1 float32; names and shapes 0f\n" in out
    rows = [line.split() for line in out.splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert rows[0][4:] == ["1", "0.1", "loss", "2.5"]
    assert rows[1][4:] == ["1", "-", "-"]
    _, out, _ = told(capsys, "card", tmp_path / "a", "--rank", 1, "--iteration", 1, "--limit", 0)
    assert out.splitlines()[-1].split()[:2] == ["1", "1"]
    assert told(capsys, "card", tmp_path / "a", "--limit", 1)[1].endswith(
        "... 3 more iterations: --limit 0\n"
    )


def test_card_leads_with_what_differs_between_ranks(tmp_path, capsys):
    tree = TreeBuilder(tmp_path / "a")
    for rank in (0, 1):
        tree.tensor(rank, 0, NAME, np.ones(2, np.float32))
        card = replace(CARD, settings={"torch.initial_seed": str(rank)})
        tree.complete(rank, 0, card=json.loads(format_card(card)))
    code, out, _ = told(capsys, "card", tree.root)
    assert code == 0
    assert out.startswith(
        "differs between ranks:\n"
        "  torch.initial_seed differs between ranks: 0 on rank 0, 1 on rank 1\n"
    )
    assert "rank 0: python" in out
    assert "rank 1: python" in out


def test_card_as_json_has_all_parts(tmp_path, capsys):
    root = make_tree(tmp_path / "a", CARD, None, ranks=1)
    code, out, _ = told(capsys, "card", root, "--json")
    body = json.loads(out)
    assert code == 0
    assert (body["without"], body["problems"], body["findings"]) == (1, [], [])
    (card,) = body["cards"]
    assert (card["rank"], card["iteration"], card["attempt"]) == (0, 0, 0)
    assert card["models"][0]["dtypes"] == {"float32": 1}
    assert card["parameters"] == dict(CARD.parameters)


def test_tree_without_cards_is_one_line(tmp_path, capsys):
    code, out, err = told(capsys, "card", make_tree(tmp_path / "a", None))
    assert (code, err) == (0, "")
    assert out == (
        "the tree has no run cards: an earlier release or another program wrote it, or its plan "
        "has card: false\n"
    )


def test_damaged_card_is_one_line_and_fails(tmp_path, capsys):
    code, out, err = told(capsys, "card", make_tree(tmp_path / "a", CARD, "\x1b[31m", ranks=1))
    assert (code, err) == (1, "")
    (line,) = [line for line in out.splitlines() if "cannot be read" in line]
    assert line.startswith("in the tree, rank 0, iteration 1: run card cannot be read: ")
    assert "\x1b" not in out


def test_no_tree_is_an_error(tmp_path, capsys):
    code, out, err = told(capsys, "card", tmp_path)
    assert (code, out) == (1, "")
    assert "not a dump tree" in err


def test_diff_leads_with_cards_and_its_exit_code_is_that_of_tensors(tmp_path, capsys):
    own = make_tree(tmp_path / "a", CARD)
    other = replace(CARD, versions={"python": "3.11", "torch": "2.13"}, digests={"batch.0": "a0"})
    code, out, _ = told(capsys, "diff", own, make_tree(tmp_path / "b", other))
    assert code == 0
    assert out.startswith(
        "before the first operator:\n"
        "  the batches differ from iteration 0 on: batch.0 (rank 0-1)\n"
        "  torch 2.12 against 2.13\n\n"
    )
    code, out, _ = told(capsys, "diff", own, tmp_path / "b", "--json")
    assert [each["subject"] for each in json.loads(out)["cards"]] == ["batch", "versions"]
    assert code == 0
    code, out, _ = told(capsys, "diff", own, own)
    assert "before the first operator" not in out


def test_diff_of_trees_without_cards_says_so_in_one_line(tmp_path, capsys):
    own, other = make_tree(tmp_path / "a", CARD), make_tree(tmp_path / "b", None)
    code, out, err = told(capsys, "diff", own, other)
    assert (code, err) == (0, "")
    assert out.count("run cards were not compared: b has none\n") == 1
    broken = make_tree(tmp_path / "c", [])
    code, out, _ = told(capsys, "diff", own, broken)
    assert code == 0
    assert "in b, rank 0, iteration 0: run card cannot be read" in out


def test_diff_of_one_rank_compares_the_weights_of_all(tmp_path, capsys):
    """Parts of parameters are on other ranks than those that are compared."""
    trees = {"a": ("0:1/2", "1:2/2"), "b": ("",)}
    for name, parts in trees.items():
        tree = TreeBuilder(tmp_path / name)
        for rank, part in enumerate(parts):
            tree.tensor(rank, 0, NAME, np.ones((2, 3), np.float32))
            found = ParameterDigest("float32", 2 // len(parts), part)
            card = replace(CARD, parameters={"fc.weight": format_parameter(found)})
            tree.complete(rank, 0, card=json.loads(format_card(card)))
    code, out, _ = told(capsys, "diff", tmp_path / "a", tmp_path / "b", "--rank", 0)
    assert code == 0
    assert "weights" not in out
    assert "parameter not compared" not in out


def test_diff_says_what_was_moved_in_a_noise_run(tmp_path, capsys):
    moved = replace(CARD, settings={**CARD.settings, "rankdump.perturb": "1ulp: batch.0"})
    a, b = (make_tree(tmp_path / name, CARD) for name in "ab")
    c = make_tree(tmp_path / "c", moved)
    code, out, _ = told(capsys, "diff", a, b, "--noise", c)
    assert code == 0
    assert f"4 times the error of {c} (input moved by 1ulp: batch.0); matched" in " ".join(
        out.split()
    )
    assert "(input moved" not in told(capsys, "diff", a, b, "--noise", b)[1]
    _, out, _ = told(capsys, "card", c)
    assert "  settings: torch.initial_seed 3, rankdump.perturb 1ulp: batch.0\n" in out


def test_run_rejects_another_perturbation_in_one_line(capsys):
    code, out, err = told(capsys, "run", "--perturb", "2ulp", "--", "true")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'2ulp' is not '1ulp'" in err


def test_selection_without_a_card_names_those_there_are(tmp_path, capsys):
    tree = make_tree(tmp_path / "a", CARD, CARD)
    code, out, err = told(capsys, "card", tree, "--iteration", 9)
    assert (code, err) == (0, "")
    assert out == "no run card matches; the tree has those of rank 0-1, iteration 0-1\n"


@pytest.mark.parametrize("command", ["card", "forecast", "status"])
def test_damaged_manifest_is_named_and_fails(command, tmp_path, capsys):
    tree = make_tree(tmp_path / "a", CARD, CARD, ranks=1)
    manifest = max(tree.rglob("iteration_1.*.json"))
    manifest.write_bytes(manifest.read_bytes()[:200])
    code, out, err = told(capsys, command, tree)
    assert code == 1
    assert f"{manifest}: manifest cannot be read: " in (out if command == "status" else err)


def test_headings_have_the_names_of_attached_models(tmp_path, capsys):
    """Both are of one class; the card has them in the order in which they were attached."""
    models = tuple(replace(CARD.models[0], name=name) for name in ("G", "D"))
    tree = TreeBuilder(tmp_path)
    for graph in (1, 0):
        name = "Default/network-Sequential/Sequential-op0"
        tree.tensor(0, 0, name, np.ones(2, np.float32), graph=graph)
    tree.complete(0, 0, world_size=1, card=json.loads(format_card(replace(CARD, models=models))))
    _, out, _ = told(capsys, "ls", tree.root)
    headings = [line for line in out.splitlines() if line.startswith("rank 0, ")]
    assert [line.rpartition(", ")[2] for line in headings] == ["model D", "model G"]


@pytest.mark.parametrize("cards", [(), (CARD,)], ids=["none", "one-model"])
def test_headings_have_classes_where_cards_do_not_have_all_models(tmp_path, capsys, cards):
    tree = TreeBuilder(tmp_path)
    for graph, kind in enumerate(("G", "D")):
        name = f"Default/network-{kind}/{kind}-op0"
        tree.tensor(0, 0, name, np.ones(2, np.float32), graph=graph)
    tree.complete(0, 0, world_size=1, card=json.loads(format_card(CARD)) if cards else None)
    _, out, _ = told(capsys, "ls", tree.root)
    assert ", model G\n" in out
    assert ", model D\n" in out
